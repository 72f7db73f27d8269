"""Whether a volume can be reached from a GPU by GPUDirect Storage: tried, with a time limit, and proved by counts."""

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offloadd.cuda.cufile_stats import PathCounts, StatsUnavailable
from offloadd.cuda.driver import CudaError, check, load
from offloadd.cuda.gds import GdsVolume, StagingSlot
from offloadd.cuda.gds_setup import Gds, GdsUnavailable, WhyNot, within
from offloadd.machine.block import layers
from offloadd.machine.gds_ways import nvfs_obstacle_to, p2pdma_obstacle_to
from offloadd.machine.system import System
from offloadd.model.enums import Way

Bytes = npt.NDArray[np.uint8]

#: What cuFile says where the machine offers it no way past the host; the machine's files say more.
_MAY_COME_OF_THE_MACHINE = (WhyNot.BOUNCED, WhyNot.FILE_SYSTEM, WhyNot.DRIVER)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`way`: how the bytes went, empty if none came so far; `reason` and `why`: what stands in the way, None and empty if nothing does."""

    available: bool
    way: str
    reason: WhyNot | None
    why: str

    @classmethod
    def refused(cls, error: GdsUnavailable, way: str = "") -> "ProbeResult":
        """The result for an error, that of `configure` for every volume among them."""
        return cls(available=False, way=way, reason=error.reason, why=str(error))


def probe(
    gds: Gds, data_fd: int, synced_fd: int, *, slot_bytes: int, file_offset: int, writes: bool, timeout_s: float, system: System | None = None
) -> ProbeResult:
    """Move `slot_bytes` at `file_offset` through a slot of that size, and see which way they went.

    With `writes` the range must be scratch, nobody's: it gets random bytes, which must come back by cuFile and by a plain O_DIRECT read (`data_fd` is open with
    it) alike. Without, it is only read. Counts are of the whole process, so no other transfer may run meanwhile: one that bounces would be taken for ours.
    After TIMEOUT a thread, a thread of KvikIO's pool, the slot and, if it was being written, the scratch range stay in use until the I/O comes back.
    `system`: the machine whose files name causes that cuFile does not (default: this one). Raises ValueError for sizes that can't be.
    """
    given_up = threading.Event()
    # The caller may close its descriptors after a time-out, and their numbers may be given to other files.
    own_data_fd, own_synced_fd = os.dup(data_fd), os.dup(synced_fd)

    def work() -> ProbeResult:
        try:
            return _Attempt(gds, own_data_fd, own_synced_fd, slot_bytes, file_offset, given_up).run(writes=writes)
        finally:
            os.close(own_data_fd)
            os.close(own_synced_fd)

    try:
        result = within(timeout_s, work, f"probe {slot_bytes} bytes at offset {file_offset}")
    except GdsUnavailable as error:
        given_up.set()
        result = ProbeResult.refused(error)
    return _with_cause(result, system or System(), data_fd) if result.reason in _MAY_COME_OF_THE_MACHINE else result


def _with_cause(result: ProbeResult, system: System, data_fd: int) -> ProbeResult:
    """The result with what the machine lacks, where its files tell: then cuFile takes compatibility mode or refuses the file, and does not say why."""
    # cuFile finds the device behind a file system in udev's database.
    udev = system.path("/run/udev")
    if not os.access(udev, os.R_OK | os.X_OK):
        return ProbeResult(False, result.way, WhyNot.UDEV, f"{udev} can't be read, which cuFile needs (in a container, mount it): {result.why}")
    stack = layers(system, _device_number(data_fd))
    nvfs, p2pdma = nvfs_obstacle_to(system, stack), p2pdma_obstacle_to(stack)
    if nvfs is None or p2pdma is None:
        return result
    return ProbeResult(False, result.way, WhyNot.P2PDMA, f"{nvfs.cause}; {p2pdma.cause}: {result.why}")


def _device_number(fd: int) -> str:
    """`major:minor` of the block device that the volume is or lies on."""
    status = os.fstat(fd)
    number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    return f"{os.major(number)}:{os.minor(number)}"


@dataclass(frozen=True, slots=True)
class _Attempt:
    gds: Gds
    data_fd: int
    synced_fd: int
    slot_bytes: int
    file_offset: int
    given_up: threading.Event

    def run(self, *, writes: bool) -> ProbeResult:
        before = self.gds.proof.snapshot()
        try:
            with contextlib.ExitStack() as opened:
                slot = StagingSlot.allocate(self.gds.device, self.slot_bytes)
                opened.callback(slot.close)
                volume = GdsVolume.open(self.gds, self.data_fd, self.synced_fd)
                opened.callback(volume.close)
                if writes:
                    self._write_and_read(volume, slot)
                else:
                    self._step(lambda: volume.read(slot, 0, self.slot_bytes, self.file_offset))
            return _judged(self.gds.proof.since(before), reads=1, writes=int(writes))
        except GdsUnavailable as error:
            return ProbeResult.refused(error, self._way_since(before))
        except StatsUnavailable as error:
            return ProbeResult(False, "", WhyNot.UNPROVEN, str(error))
        except CudaError as error:
            return ProbeResult(False, self._way_since(before), WhyNot.CUDA, str(error))
        except OSError as error:
            reason = WhyNot.PERMISSION if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else WhyNot.IO_ERROR
            return ProbeResult(False, self._way_since(before), reason, str(error))

    def _step(self, step: Callable[[], object]) -> None:
        """Nothing new is begun for a caller who has gone."""
        if self.given_up.is_set():
            raise GdsUnavailable(WhyNot.TIMEOUT, "given up")
        step()

    def _write_and_read(self, volume: GdsVolume, slot: StagingSlot) -> None:
        size_bytes, offset = self.slot_bytes, self.file_offset
        wanted = np.frombuffer(os.urandom(size_bytes), np.uint8)
        _to_device(slot, wanted)
        self._step(lambda: volume.write(slot, 0, size_bytes, offset))
        self._step(volume.sync)
        # What was in the slot must not be taken for what was read.
        _to_device(slot, np.zeros(size_bytes, np.uint8))
        self._step(lambda: volume.read(slot, 0, size_bytes, offset))
        # mmap for its alignment: O_DIRECT.
        with mmap.mmap(-1, size_bytes) as plain:
            self._step(lambda: os.preadv(self.data_fd, [plain], offset))
            for name, got in (("cuFile", _from_device(slot)), ("a plain read", np.frombuffer(bytes(plain), np.uint8))):
                wrong = np.flatnonzero(got != wanted)
                if len(wrong):
                    text = f"{len(wrong)} of {size_bytes} bytes written by cuFile at offset {offset} came back wrong by {name}, the first at {wrong[0]}"
                    raise GdsUnavailable(WhyNot.WRONG_BYTES, text)

    def _way_since(self, before: PathCounts) -> str:
        try:
            return _told(self.gds.proof.since(before).way)
        except StatsUnavailable:
            return ""


def _told(way: Way) -> str:
    return "" if way is Way.UNPROVEN else way.label


def _judged(counts: PathCounts, *, reads: int, writes: int) -> ProbeResult:
    way = counts.way
    if way is Way.UNPROVEN or (way.is_gds and (counts.reads.done < reads or counts.writes.done < writes)):
        moved = f"{reads} reads and {writes} writes were made, cuFile counted {counts.reads.done} and {counts.writes.done}"
        return ProbeResult(False, _told(way), WhyNot.UNPROVEN, moved)
    if way.is_gds:
        return ProbeResult(True, way.label, None, "")
    who = "cuFile" if way is Way.CUFILE_POSIX else "KvikIO"
    return ProbeResult(False, way.label, WhyNot.BOUNCED, f"{who} bounced through POSIX: the bytes went through host memory")


def _to_device(slot: StagingSlot, data: Bytes) -> None:
    slot.device.make_current()
    check(load().cuMemcpyHtoD(slot.address, data.ctypes.data, data.nbytes), f"copy {data.nbytes} bytes to {slot.device}")


def _from_device(slot: StagingSlot) -> Bytes:
    data = np.empty(slot.size_bytes, np.uint8)
    slot.device.make_current()
    check(load().cuMemcpyDtoH(data.ctypes.data, slot.address, data.nbytes), f"copy {data.nbytes} bytes from {slot.device}")
    return data

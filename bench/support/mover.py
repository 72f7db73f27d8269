"""A real mover process driven over its sockets, with the jobs and windows of the front: the pipeline without gRPC, catalog and scheduler."""

import itertools
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support.machine import ROOT
from offloadd.config import MoverConfig, VolumeConfig
from offloadd.config.sizes import default_lane_threads
from offloadd.ipc.channel import Channel, socket_pair
from offloadd.model.enums import Way
from offloadd.model.region import Layout, Plane
from offloadd.model.slots import BLOCK_DTYPE, RESULT_DTYPE
from offloadd.mover.messages import (
    JOB_BLOCKS_MAX,
    AddLane,
    ArenaLocked,
    ControlAnswer,
    Copied,
    CopiesChosen,
    Hello,
    Job,
    LaneAnswer,
    LaneReady,
    LaneRefused,
    MapArena,
    Mapped,
    MapRegion,
    Operation,
    Piece,
    PlaneSpec,
    SliceDone,
)
from offloadd.tiers.format import Geometry, slot_bytes_for
from offloadd.tiers.volume_io import VolumeFile

#: What slices of a `gds` lane tell that did not go past the host.
BOUNCED = (Way.CUFILE_POSIX, Way.KVIKIO_POSIX, Way.UNPROVEN)
#: As the front spawns its movers.
MOVER_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x40000", "OMP_NUM_THREADS": "1"}
#: The front's defaults: jobs in flight, and bytes of one.
JOBS_IN_FLIGHT = 2
JOB_BYTES: int = MoverConfig.model_fields["restore_bytes_in_flight"].default // JOBS_IN_FLIGHT
#: A volume's lane as the daemon makes it by default.
THREADS: int = VolumeConfig.model_fields["io_threads"].default
#: The arena's lane as the daemon makes it on this machine.
ARENA_THREADS = default_lane_threads()
STAGING_SLOT_BYTES: int = MoverConfig.model_fields["staging_slot_bytes"].default
ANSWER_TIMEOUT_S = 300.0

Records = npt.NDArray[Any]


class LaneRefusedError(RuntimeError):
    """The mover has no such way; its text says why."""


class LaneEnd:
    """The front's end of one lane."""

    def __init__(self, channel: "Channel[LaneAnswer]") -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        #: Thread nanoseconds of the last run by stage.
        self.stage_ns: dict[str, int] = {}
        #: Slices of the last run, and those of them whose bytes did not go past the host though the lane does.
        self.slice_count = 0
        self.bounced_count = 0
        #: Payload bytes of the last run by the way that they went.
        self.way_bytes: dict[Way, int] = {}
        #: Seconds until the last source of the last run had been copied; 0 if it was no evict.
        self.copied_s = 0.0

    def run(self, operation: Operation, records: Records, slot_bytes: int, *, verify: bool = True) -> float:
        """Move all blocks and return the seconds from the first job sent to the last result. RuntimeError if a block failed."""
        waiting = parts_of(records, slot_bytes)
        left: dict[int, int] = {}
        self.stage_ns = dict.fromkeys(("queue_ns", "copy_ns", "checksum_ns", "io_ns"), 0)
        failed = self.slice_count = self.bounced_count = 0
        self.copied_s = 0.0
        self.way_bytes = {}
        start = time.perf_counter()
        while waiting or left:
            while waiting and len(left) < JOBS_IN_FLIGHT:
                blocks = waiting.pop(0)
                number = next(self._numbers)
                left[number] = len(blocks)
                self._channel.send(
                    Job(
                        job=number,
                        move=number,
                        operation=operation,
                        slot_bytes=slot_bytes,
                        blocks=blocks.tobytes(),
                        submitted_ns=time.monotonic_ns(),
                        verify=verify,
                    )
                )
            received = self._channel.receive()
            if received is None:
                raise RuntimeError("the mover closed the lane")
            done = received[0]
            if isinstance(done, Copied):
                self.copied_s = time.perf_counter() - start
            if isinstance(done, SliceDone):
                self.slice_count += 1
                self.bounced_count += done.way in BOUNCED
                self.way_bytes[Way(done.way)] = self.way_bytes.get(Way(done.way), 0) + done.payload_bytes
                results = np.frombuffer(done.results, dtype=RESULT_DTYPE)
                if operation == Operation.ARENA_EVICT:
                    records["checksum"][results["position"]] = results["checksum"]
                failed += int((results["reason"] != 0).sum())
                left[done.job] -= len(results)
                if left[done.job] == 0:
                    del left[done.job]
                for name in self.stage_ns:
                    self.stage_ns[name] += getattr(done, name)
        seconds = time.perf_counter() - start
        if failed:
            raise RuntimeError(f"{failed} of {len(records)} blocks of {operation.name} failed")
        return seconds


class MoverProcess:
    """One mover, of the host or of a GPU (`cuda:N` or its UUID); a context manager. RuntimeError with its reason if it can't use the device."""

    def __init__(self, device: str = "host", *options: str) -> None:
        ours, theirs = socket_pair()
        ours.settimeout(ANSWER_TIMEOUT_S)
        self._log_fd = os.memfd_create("mover-log")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offloadd.mover.main", "--fd", str(theirs.fileno()), "--device", device, *options],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **MOVER_ENVIRONMENT},
            stderr=self._log_fd,
            cwd=ROOT,
        )
        theirs.close()
        self._control: Channel[ControlAnswer] = Channel(ours, ControlAnswer)
        self._lanes: list[Channel[LaneAnswer]] = []
        #: What copies of its regions go by, as measured.
        self.chosen: list[CopiesChosen] = []
        self._locked: ArenaLocked | None = None
        hello = self._receive()
        if not isinstance(hello, Hello):
            raise RuntimeError(f"the mover did not say hello, but {hello}")
        if hello.note:
            self.__exit__()
            raise RuntimeError(f"the mover of {device} can't use it: {hello.note}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def said(self) -> str:
        """What it has written to its standard error so far."""
        return os.pread(self._log_fd, os.fstat(self._log_fd).st_size, 0).decode(errors="replace")

    def _next(self) -> ControlAnswer | None:
        """The next message; None for what it told without having been asked, which is kept."""
        received = self._control.receive()
        if received is None:
            raise RuntimeError(f"the mover is gone: {self.said}")
        match received[0]:
            case CopiesChosen():
                self.chosen.append(received[0])
            case ArenaLocked():
                self._locked = received[0]
            case answer:
                return answer
        return None

    def _receive(self) -> ControlAnswer:
        while (answer := self._next()) is None:
            pass
        return answer

    def _notice(self, what: str) -> None:
        """Wait for one message that it tells without having been asked. TimeoutError after ANSWER_TIMEOUT_S."""
        try:
            answer = self._next()
        except TimeoutError as error:
            raise TimeoutError(f"the mover has not told within {ANSWER_TIMEOUT_S:g} s {what}: {self.said}") from error
        if answer is not None:
            raise RuntimeError(f"the mover told {answer} where it was to tell {what}: {self.said}")

    def _await_choice(self, known: int) -> None:
        """Until it has measured what copies of the region go by: a lane that changes from one to the other has no speed of its own."""
        while len(self.chosen) == known and all(chosen.shape for chosen in self.chosen):
            self._notice("what copies go by")

    def _ask(self, message: Any, fds: Sequence[int], expected: ControlAnswer) -> None:
        self._control.send(message, fds)
        answer = self._receive()
        if isinstance(answer, LaneRefused):
            raise LaneRefusedError(answer.why)
        if answer != expected:
            raise RuntimeError(f"the mover answered {answer}")

    def map_region(self, number: int, fd: int, layout: Layout, memory_bytes: int) -> None:
        """Map engine memory that lies in one memfd."""
        self._map(number, [fd], layout, memory_bytes, ())

    def map_device_memory(self, number: int, piece: Piece, layout: Layout, memory_bytes: int) -> None:
        """Map engine memory of another process on the mover's GPU: a process can't open what it exported itself."""
        known = len(self.chosen)
        self._map(number, [], layout, memory_bytes, (piece,))
        self._await_choice(known)

    def _map(self, number: int, fds: Sequence[int], layout: Layout, memory_bytes: int, pieces: tuple[Piece, ...]) -> None:
        planes = tuple(PlaneSpec(plane.memory, plane.offset_bytes, plane.block_stride_bytes, plane.block_bytes) for plane in layout.planes)
        message = MapRegion(region=number, memory_bytes=(memory_bytes,), block_count=layout.block_count, planes=planes, pieces=pieces)
        self._ask(message, fds, Mapped(region=number))

    def map_arena(self, fd: int, arena_bytes: int) -> None:
        """Map the arena."""
        self._ask(MapArena(arena_bytes=arena_bytes, huge_pages=True), [fd], Mapped(region=0))

    def map_locked_arena(self, fd: int, arena_bytes: int) -> ArenaLocked:
        """Map the arena into a GPU's mover, and wait until it has page-locked what it can: before, copies take a way around. A second for some GiB.

        TimeoutError when it has not told within ANSWER_TIMEOUT_S.
        """
        self.map_arena(fd, arena_bytes)
        while self._locked is None:
            self._notice("that the arena is page-locked")
        return self._locked

    def add_lane(self, number: int, file: VolumeFile | None = None, geometry: Geometry | None = None, *, path: str = "host") -> LaneEnd:
        """Start a lane: to the volume by `path`, or to the arena. Raises LaneRefusedError where the device has no such way to this volume."""
        ours, theirs = socket_pair()
        ours.settimeout(ANSWER_TIMEOUT_S)
        fds = [theirs.fileno()]
        message = AddLane(lane=number, path="ddr", thread_count=ARENA_THREADS, staging_slot_bytes=STAGING_SLOT_BYTES)
        if file is not None and geometry is not None:
            fds += [file.data_fd, file.synced_fd]
            message = AddLane(
                lane=number,
                path=path,
                thread_count=THREADS,
                staging_slot_bytes=STAGING_SLOT_BYTES,
                volume_uuid=geometry.volume_uuid,
                slab_bytes=geometry.slab_bytes,
                data_offset=geometry.data_offset,
            )
        try:
            self._ask(message, fds, LaneReady(lane=number))
        except LaneRefusedError:
            ours.close()
            raise
        finally:
            theirs.close()
        channel: Channel[LaneAnswer] = Channel(ours, LaneAnswer)
        self._lanes.append(channel)
        return LaneEnd(channel)

    def __enter__(self) -> "MoverProcess":
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._lanes:
            channel.close()
        self._control.close()
        self.process.wait(30)
        sys.stderr.write(self.said)
        os.close(self._log_fd)


def parts_of(records: Records, slot_bytes: int) -> list[Records]:
    """The records of each job, as the front cuts a move: evenly, since the lane cuts each job over its threads again."""
    job_count = -(-len(records) // max(1, min(JOB_BLOCKS_MAX, JOB_BYTES // slot_bytes)))
    per_job = max(1, -(-len(records) // max(1, job_count)))
    return [records[first : first + per_job] for first in range(0, len(records), per_job)]


def layout_of(block_bytes: int, block_count: int, plane_count: int) -> Layout:
    """Planes one after the other in one memory, blocks side by side in each: one plane is a cross-layer layout, two a layer the usual one."""
    piece = block_bytes // plane_count
    return Layout(block_count, tuple(Plane(0, number * block_count * piece, piece, piece) for number in range(plane_count)))


def make_records(block_bytes: int, block_count: int, *, scattered: bool = False) -> Records:
    """BLOCK_DTYPE records of blocks 0, 1, … (`scattered`: in another order) of region 1 in slots 0, 1, … of slab 0, and side by side in the arena."""
    records: Records = np.zeros(block_count, dtype=BLOCK_DTYPE)
    numbers = np.arange(block_count)
    keys = np.frombuffer(secrets.token_bytes(32 * block_count), dtype="V32")
    records["key"] = keys
    records["nonce"] = np.void(secrets.token_bytes(16))
    records["payload_bytes"] = block_bytes
    records["region"] = 1
    records["slot"] = records["position"] = numbers
    records["block_index"] = np.random.default_rng(5).permutation(block_count) if scattered else numbers
    records["generation"] = 1
    records["namespace_epoch"] = 1
    records["sequence"] = numbers + 1
    records["arena_offset"] = numbers * (slot_bytes_for(block_bytes) - 4096)
    return records

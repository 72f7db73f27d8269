"""Reads and writes between GPU memory and volumes through KvikIO and cuFile, with no fallback that nobody sees."""

import contextlib
import enum
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from offloadd.cuda.cufile_stats import Proof, StatsUnavailable
from offloadd.cuda.device import Device
from offloadd.cuda.memory import DeviceMemory
from offloadd.units import MIB, SECTOR_BYTES

#: nvidia-fs keeps a shadow buffer of at most this size for a registration; a larger one would be served in pieces.
SLOT_BYTES_MAX = 16 * MIB
#: Opening the driver of cuFile takes well under a second where it works.
OPEN_TIMEOUT_S = 30.0

_ERRNO_BY_TEXT = {os.strerror(code): code for code in errno.errorcode}
_PLACE_IN_SOURCE = re.compile(r"(?:KvikIO failure at|cuFile error at|CUDA error at|Linux system/library function call error at): \S+:\d+: ")
_T = TypeVar("_T")


class WhyNot(enum.StrEnum):
    """Why GPUDirect Storage can't be used."""

    NO_KVIKIO = "no_kvikio"
    NO_CUFILE = "no_cufile"
    DRIVER = "driver"
    FILE_SYSTEM = "file_system"
    REGISTRATION = "registration"
    PERMISSION = "permission"
    UDEV = "udev"
    CUDA = "cuda"
    IO_ERROR = "io_error"
    WRONG_BYTES = "wrong_bytes"
    TIMEOUT = "timeout"
    BOUNCED = "bounced"
    UNPROVEN = "unproven"


class GdsUnavailable(OSError):
    """GPUDirect Storage can't be used, here or for this volume. An OSError, as all that keeps bytes from moving is."""

    def __init__(self, reason: WhyNot, why: str) -> None:
        super().__init__(errno.EOPNOTSUPP, why)
        self.reason = reason
        self.why = why

    def __str__(self) -> str:
        return self.why


class ShortTransfer(OSError):
    """cuFile moved fewer bytes than asked for, or more. `moved_bytes`: what it says it moved."""

    def __init__(self, moved_bytes: int, text: str) -> None:
        super().__init__(errno.EIO, text)
        self.moved_bytes = moved_bytes


class VolumeDoomed(OSError):
    """A sync of the volume failed: what was written since the last good one may be lost, and no later sync could tell."""


class Gds:
    """KvikIO and cuFile, set up for one device. Made once in a process, by `configure`."""

    def __init__(self, device: Device, proof: Proof, task_bytes: int) -> None:
        """See `configure`."""
        self.device = device
        self.proof = proof
        self.task_bytes = task_bytes

    def close(self) -> None:
        """Close the driver of cuFile. Slots and volumes must be closed before."""
        import kvikio.cufile_driver

        self.device.make_current()
        self.proof.close()
        kvikio.cufile_driver.driver_close()


def configure(device: Device, *, task_bytes: int, threads: int, timeout_s: float = OPEN_TIMEOUT_S, proc: Path = Path("/proc")) -> Gds:
    """Set KvikIO up and open the driver of cuFile; once in a process, before any other use of KvikIO, and never before a fork.

    `task_bytes`: the longest slice, so that each is exactly one call of cuFile. `threads`: KvikIO has one pool for all volumes and an I/O holds a thread of it
    until it ends, hung ones for ever; so it must be at least the number of I/Os in flight at once over all volumes, and one more for each probe. `proc`: where
    procfs is mounted. Raises ValueError for sizes that can't be, GdsUnavailable otherwise, after `timeout_s` at the latest (then a thread of this process may
    never end, and this must not be called again).
    """
    if task_bytes % SECTOR_BYTES or not SECTOR_BYTES <= task_bytes <= SLOT_BYTES_MAX:
        raise ValueError(f"task_bytes {task_bytes} is not a multiple of {SECTOR_BYTES} up to {SLOT_BYTES_MAX}")
    if threads < 1:
        raise ValueError(f"threads {threads} is below 1")
    kvikio = _import_kvikio()
    if not (proc / "modules").exists():
        # libcufile 1.20 looks for it again and again, on a core of its own, in cuFileDriverOpen.
        raise GdsUnavailable(
            WhyNot.DRIVER, f"{proc}/modules is missing, and cuFile would wait for it for ever: this kernel or container does not tell its modules"
        )
    kvikio.defaults.set(
        {
            # AUTO falls back to host memory without a word, file by file.
            "compat_mode": kvikio.CompatMode.OFF,
            # Below it (16 KiB by default) KvikIO bounces reads and writes itself, even with compat mode OFF.
            "gds_threshold": 0,
            "task_size": task_bytes,
            "num_threads": threads,
        }
    )

    def open_driver() -> Proof:
        device.make_current()
        try:
            kvikio.cufile_driver.driver_open()
        except RuntimeError as error:
            text = _text_of(error)
            raise GdsUnavailable(WhyNot.NO_CUFILE if "libcufile" in text else WhyNot.DRIVER, f"open the driver of cuFile: {text}") from error
        try:
            return Proof.start()
        except StatsUnavailable as error:
            kvikio.cufile_driver.driver_close()
            raise GdsUnavailable(WhyNot.UNPROVEN, str(error)) from error

    return Gds(device, within(timeout_s, open_driver, "open the driver of cuFile"), task_bytes)


def _import_kvikio() -> Any:
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except (ImportError, OSError, RuntimeError) as error:
        # The wheel of KvikIO loads libcufile while it is imported, where cuda-pathfinder is installed.
        reason = WhyNot.NO_CUFILE if "cufile" in str(error) else WhyNot.NO_KVIKIO
        raise GdsUnavailable(reason, f"KvikIO can't be imported ({error}); install offloadd with its extra cuda12 or cuda13") from error
    return kvikio


def within(timeout_s: float, work: Callable[[], _T], what: str) -> _T:
    """What `work` gives, done in a daemon thread: a call into cuFile can't be stopped, only left alone. Raises GdsUnavailable after `timeout_s`."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"gds: {what}", daemon=True).start()
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():
            return future.result()
        raise GdsUnavailable(WhyNot.TIMEOUT, f"{what}: not done within {timeout_s:g} s") from None


class _Uses:
    """Counts the I/Os that use a thing, so that it is not taken from under them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self._what} is used after it was closed")
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1

    def end(self) -> bool:
        """Let no I/O begin any more; False if that was so already. Raises ValueError while one is in flight."""
        with self._lock:
            if self._count:
                raise ValueError(f"{self._what} can't be closed while {self._count} I/Os use it")
            was_closed, self._closed = self._closed, True
            return not was_closed


class StagingSlot:
    """GPU memory of our own, registered with cuFile, so that its I/O goes by DMA. KvikIO and CuPy take it as an array."""

    def __init__(self, memory: DeviceMemory) -> None:
        """See `allocate`."""
        self.device = memory.device
        self.address = memory.address
        self.size_bytes = memory.size_bytes
        self._memory = memory
        self._registered = False
        self._uses = _Uses(f"a staging slot of {memory.size_bytes} bytes on {memory.device}")

    @classmethod
    def allocate(cls, device: Device, size_bytes: int) -> "StagingSlot":
        """Allocate and register; after `configure`.

        Raises ValueError unless the size is a multiple of 4 KiB up to 16 MiB, CudaError when the GPU has not got it, GdsUnavailable when cuFile refuses it.
        """
        if size_bytes % SECTOR_BYTES or not SECTOR_BYTES <= size_bytes <= SLOT_BYTES_MAX:
            raise ValueError(f"a staging slot of {size_bytes} bytes is not a multiple of {SECTOR_BYTES} up to {SLOT_BYTES_MAX}")
        slot = cls(DeviceMemory.allocate(device, size_bytes))
        try:
            slot._register()
        except BaseException:
            slot.close()
            raise
        return slot

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return _array_interface(self.address, self.size_bytes)

    def using(self) -> contextlib.AbstractContextManager[None]:
        """For the length of an I/O or copy: `close` is refused meanwhile. Raises ValueError when the slot is closed."""
        return self._uses.one()

    def _register(self) -> None:
        import kvikio

        self.device.make_current()
        try:
            kvikio.memory_register(self)
        except RuntimeError as error:
            raise GdsUnavailable(WhyNot.REGISTRATION, f"register {self.size_bytes} bytes on {self.device} with cuFile: {_text_of(error)}") from error
        self._registered = True

    def close(self) -> None:
        """Deregister, then free, with the wait of `DeviceMemory.close`. May be called again.

        Raises ValueError while an I/O uses it. OSError: cuFile did not let go of it; then it is not freed, since nvidia-fs can deadlock over registered memory
        that is gone.
        """
        self._uses.end()
        if self._registered:
            import kvikio

            self.device.make_current()
            try:
                kvikio.memory_deregister(self)
            except RuntimeError as error:
                raise OSError(errno.EIO, f"deregister {self.size_bytes} bytes on {self.device}: {_text_of(error)}") from error
            self._registered = False
        self._memory.close()


def _array_interface(address: int, size_bytes: int) -> dict[str, Any]:
    return {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}


class GroupSync:
    """One sync for all that ask at about the same time. Any thread may call."""

    def __init__(self, sync: Callable[[], None]) -> None:
        """`sync`: makes all that was written before it began durable, or raises OSError."""
        self._sync = sync
        self._changed = threading.Condition()
        #: Syncs are numbered from 1; number `_begun` runs if it is not `_done`.
        self._begun = 0
        self._done = 0
        self._failure: OSError | None = None

    @property
    def doomed(self) -> str:
        """Why nothing can be made durable any more; empty if it can."""
        return "" if self._failure is None else str(self._failure)

    def sync(self) -> None:
        """Return when a sync that began after this call has succeeded. Raises VolumeDoomed when one failed, now or earlier: it is never tried again.

        A kernel reports a lost write once; the sync after it succeeds, though the bytes are gone.
        """
        with self._changed:
            # One that runs now may have begun before the caller's write returned.
            wanted = self._begun + 1
            while self._done < wanted:
                self.refuse_doomed()
                if self._begun == self._done:
                    self._lead()
                else:
                    self._changed.wait()

    def refuse_doomed(self) -> None:
        """Raise VolumeDoomed if a sync has failed."""
        if self._failure is not None:
            raise VolumeDoomed(self._failure.errno, f"a sync failed ({self._failure.strerror}): what was written since the last good one may be lost")

    def _lead(self) -> None:
        self._begun += 1
        self._changed.release()
        failure: OSError | None = OSError(errno.EIO, "the sync was interrupted")
        try:
            self._sync()
            failure = None
        except OSError as error:
            failure = error
        finally:
            self._changed.acquire()
            if failure is None:
                self._done = self._begun
            else:
                self._failure = failure
            self._changed.notify_all()


class GdsVolume:
    """A volume, read and written by cuFile. Any thread may call; each I/O is one call of cuFile, and holds its thread but not the GIL."""

    def __init__(self, gds: Gds, file: Any, sync: GroupSync) -> None:
        """See `open`."""
        self._gds = gds
        self._file = file
        self._sync = sync
        self._uses = _Uses("a volume")

    @classmethod
    def open(cls, gds: Gds, data_fd: int, synced_fd: int) -> "GdsVolume":
        """A volume over descriptors that stay the caller's, open until this is closed; KvikIO opens the file again, with O_DIRECT.

        Raises GdsUnavailable: no permission, a file system that cuFile does not take, KvikIO not set up as `configure` does.
        """
        import kvikio
        import kvikio.defaults

        setup = kvikio.defaults.get("compat_mode"), kvikio.defaults.get("gds_threshold"), kvikio.defaults.get("task_size")
        if setup != (kvikio.CompatMode.OFF, 0, gds.task_bytes):
            raise GdsUnavailable(WhyNot.UNPROVEN, f"KvikIO was set up anew after configure(): compat mode, threshold, task size are {setup}")
        gds.device.make_current()
        try:
            # Never "w", which truncates.
            file = kvikio.CuFile(f"/proc/self/fd/{data_fd}", "r+")
        except RuntimeError as error:
            raise _refused_file(error) from error
        return cls(gds, file, GroupSync(lambda: os.fdatasync(synced_fd)))

    @property
    def doomed(self) -> str:
        """Why nothing more is written, since a sync failed; empty if none did."""
        return self._sync.doomed

    def read(self, slot: StagingSlot, offset_in_slot: int, size_bytes: int, file_offset: int) -> int:
        """Read into the slot, in one I/O; the count of bytes, which is `size_bytes`. All numbers in bytes and multiples of 4 KiB.

        Raises ValueError for numbers that can't be, ShortTransfer, and OSError with the errno where KvikIO lets it through, else EIO. After an error any bytes
        may be in the slot.
        """
        return self._transfer("read", self._file.pread, slot, offset_in_slot, size_bytes, file_offset)

    def write(self, slot: StagingSlot, offset_in_slot: int, size_bytes: int, file_offset: int) -> int:
        """Write from the slot, in one I/O; otherwise as `read`. Durable after `sync`. Raises VolumeDoomed after a failed sync.

        cuFile knows nothing of streams: what shall be written must be in the slot, its copies synchronized, before this is called.
        """
        self._sync.refuse_doomed()
        return self._transfer("write", self._file.pwrite, slot, offset_in_slot, size_bytes, file_offset)

    def sync(self) -> None:
        """Return when all that was written before this call is durable. Callers of about the same time share one fdatasync. Raises VolumeDoomed."""
        with self._uses.one():
            self._sync.sync()

    def _transfer(self, verb: str, call: Callable[..., Any], slot: StagingSlot, offset_in_slot: int, size_bytes: int, file_offset: int) -> int:
        operation = f"{verb} {size_bytes} bytes at offset {file_offset}"
        if (offset_in_slot | size_bytes | file_offset) % SECTOR_BYTES or min(offset_in_slot, file_offset) < 0:
            # Others are moved too, but through host memory.
            raise ValueError(f"{operation}, {offset_in_slot} in its slot: all must be multiples of {SECTOR_BYTES}, and none negative")
        if not 0 < size_bytes <= min(self._gds.task_bytes, slot.size_bytes - offset_in_slot):
            raise ValueError(f"{operation}, {offset_in_slot} in a slot of {slot.size_bytes} bytes: at most {self._gds.task_bytes} at once, within the slot")
        with self._uses.one(), slot.using():
            self._gds.device.make_current()
            part = SimpleNamespace(__cuda_array_interface__=_array_interface(slot.address + offset_in_slot, size_bytes))
            try:
                moved_bytes = int(call(part, size_bytes, file_offset).get())
            except RuntimeError as error:
                raise _os_error(error, operation, is_read=verb == "read") from error
        if moved_bytes != size_bytes:
            raise ShortTransfer(moved_bytes, f"{operation}: cuFile moved {moved_bytes}")
        return moved_bytes

    def close(self) -> None:
        """Deregister and close KvikIO's file; the caller's descriptors stay open. May be called again. Raises ValueError while an I/O uses it."""
        if self._uses.end():
            self._gds.device.make_current()
            self._file.close()


def _text_of(error: BaseException) -> str:
    """What KvikIO says, without the place in its source."""
    return _PLACE_IN_SOURCE.sub("", str(error))


def _errno_of(error: BaseException) -> int | None:
    """What the system's own words at the end of a message mean; None if they are no such words."""
    return _ERRNO_BY_TEXT.get(str(error).rsplit(": ", 1)[-1])


def _os_error(error: RuntimeError, operation: str, *, is_read: bool) -> OSError:
    """KvikIO gives errors as text only. Of a failed read it makes "Operation not permitted" whatever errno was: it takes cuFile's -1 for an errno."""
    text, code = _text_of(error), _errno_of(error)
    if is_read and code == errno.EPERM:
        return OSError(errno.EIO, f"{operation}: cuFile gave an error, KvikIO does not say which")
    return OSError(errno.EIO if code is None else code, f"{operation}: {text}")


def _refused_file(error: RuntimeError) -> GdsUnavailable:
    text, code = _text_of(error), _errno_of(error)
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = WhyNot.PERMISSION
    elif "nvidia-fs driver is not loaded" in text:
        reason = WhyNot.DRIVER
    elif code is None or code in (errno.EINVAL, errno.EOPNOTSUPP):
        # Refused by cuFile, or not to be opened with O_DIRECT.
        reason = WhyNot.FILE_SYSTEM
    else:
        reason = WhyNot.IO_ERROR
    return GdsUnavailable(reason, f"open the volume with cuFile: {text}")

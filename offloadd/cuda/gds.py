"""Reads and writes between GPU memory and volumes through KvikIO and cuFile, with no fallback that nobody sees."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from offloadd.cuda.device import Device
from offloadd.cuda.gds_setup import SLOT_BYTES_MAX, Gds, GdsUnavailable, WhyNot, text_of
from offloadd.cuda.group_sync import GroupSync
from offloadd.cuda.memory import DeviceMemory
from offloadd.units import SECTOR_BYTES

_ERRNO_BY_TEXT = {os.strerror(code): code for code in errno.errorcode}


class ShortTransfer(OSError):
    """cuFile moved fewer bytes than asked for, or more. `moved_bytes`: what it says it moved."""

    def __init__(self, moved_bytes: int, text: str) -> None:
        super().__init__(errno.EIO, text)
        self.moved_bytes = moved_bytes


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
            raise GdsUnavailable(WhyNot.REGISTRATION, f"register {self.size_bytes} bytes on {self.device} with cuFile: {text_of(error)}") from error
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
                raise OSError(errno.EIO, f"deregister {self.size_bytes} bytes on {self.device}: {text_of(error)}") from error
            self._registered = False
        self._memory.close()


def _array_interface(address: int, size_bytes: int) -> dict[str, Any]:
    return {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}


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


def _errno_of(error: BaseException) -> int | None:
    """What the system's own words at the end of a message mean; None if they are no such words."""
    return _ERRNO_BY_TEXT.get(str(error).rsplit(": ", 1)[-1])


def _os_error(error: RuntimeError, operation: str, *, is_read: bool) -> OSError:
    """KvikIO gives errors as text only. Of a failed read it makes "Operation not permitted" whatever errno was: it takes cuFile's -1 for an errno."""
    text, code = text_of(error), _errno_of(error)
    if is_read and code == errno.EPERM:
        return OSError(errno.EIO, f"{operation}: cuFile gave an error, KvikIO does not say which")
    return OSError(errno.EIO if code is None else code, f"{operation}: {text}")


def _refused_file(error: RuntimeError) -> GdsUnavailable:
    text, code = text_of(error), _errno_of(error)
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

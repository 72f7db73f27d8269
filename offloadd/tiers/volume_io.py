"""The I/O of a volume file: descriptors with O_DIRECT where possible, one lock, full-count reads and writes over page-aligned memory.

Every byte that keeper and command line exchange with a volume passes `read_full`, `read_up_to`, `write_full` or `sync`.
"""

import errno
import fcntl
import mmap
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Buffer

from offloadd.errors import InvalidRequest, VolumeBusy, VolumeForeign
from offloadd.units import SECTOR_BYTES

#: What open or the first read answers where O_DIRECT is not supported: tmpfs before Linux 6.6, some FUSE servers, blocks longer than 4 KiB.
_NO_DIRECT_IO = (errno.EINVAL, errno.ENOTSUP)
_BUSY_POLL_S = 0.02

#: To compare with: far faster than asking each byte.
ZERO_SECTOR = bytes(SECTOR_BYTES)


@dataclass(frozen=True, slots=True)
class VolumeFile:
    """An open volume: two descriptions of one file. `data_fd` holds the lock; `synced_fd` writes with O_DSYNC.

    The lock belongs to the open file description, so it lives as long as any process that was passed `data_fd` keeps it open.
    """

    path: str
    data_fd: int
    synced_fd: int
    size_bytes: int
    #: Whether reads and writes bypass the page cache; `direct_io_note` says why not.
    direct_io: bool
    direct_io_note: str
    file_system: str

    def close(self) -> None:
        """Close both descriptors of this process."""
        os.close(self.synced_fd)
        os.close(self.data_fd)


def open_volume(path: str, *, busy_wait_s: float) -> VolumeFile:
    """Open a file or block device for reading and writing, and lock it. Never creates and never truncates.

    A lock held by somebody else is waited for up to `busy_wait_s`, then `VolumeBusy`. `VolumeForeign`: neither a regular file nor a block device.
    """
    deadline = time.monotonic() + busy_wait_s
    while True:
        locked = _open_locked(path)
        if locked is not None:
            break
        if time.monotonic() >= deadline:
            raise VolumeBusy(f"{path} is open in another process; waited {busy_wait_s:g} s for its lock")
        time.sleep(_BUSY_POLL_S)
    data_fd, direct_io, note = locked
    try:
        synced_fd = os.open(path, os.O_RDWR | os.O_DSYNC | os.O_CLOEXEC | (os.O_DIRECT if direct_io else 0))
    except BaseException:
        os.close(data_fd)
        raise
    try:
        return _describe(path, data_fd, synced_fd, direct_io, note)
    except BaseException:
        os.close(synced_fd)
        os.close(data_fd)
        raise


def adopt_volume(path: str, data_fd: int, synced_fd: int) -> VolumeFile:
    """The volume behind two descriptors of `open_volume` that came from another process; they are ours to close afterwards, also on error.

    Raises `InvalidRequest` if they are not the data and the synced descriptor of one file, `VolumeBusy` if the lock is somebody else's.
    """
    try:
        if not fcntl.fcntl(synced_fd, fcntl.F_GETFL) & os.O_DSYNC:
            raise InvalidRequest(f"the second descriptor passed for {path} was opened without O_DSYNC")
        direct_io = bool(fcntl.fcntl(data_fd, fcntl.F_GETFL) & os.O_DIRECT)
        # On the description that holds the lock this changes nothing; on any other it proves that nobody else does.
        if not _try_lock(data_fd):
            raise VolumeBusy(f"{path} is locked by another process, and not through the descriptor passed")
        return _describe(path, data_fd, synced_fd, direct_io, "" if direct_io else "the descriptors passed were opened without O_DIRECT")
    except BaseException:
        os.close(synced_fd)
        os.close(data_fd)
        raise


def open_read_only(path: str) -> tuple[int, bool]:
    """A descriptor for reading, and whether another process holds the lock. Works while a daemon has the volume open."""
    _require_kind(path, os.stat(path).st_mode)  # noqa: PTH116
    fd, _, _ = _open_checked(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return fd, True
    # Given back at once: a daemon that starts in this instant waits a moment for the lock.
    fcntl.flock(fd, fcntl.LOCK_UN)
    return fd, False


def _open_locked(path: str) -> tuple[int, bool, str] | None:
    mode = os.stat(path).st_mode  # noqa: PTH116
    _require_kind(path, mode)
    # Without O_CREAT, O_EXCL on a block device means: not while it is mounted or opened so by another, also through another device node.
    flags = os.O_RDWR | (os.O_EXCL if stat.S_ISBLK(mode) else 0)
    note = ""
    for direct in (os.O_DIRECT, 0):
        fd = -1
        try:
            fd = os.open(path, flags | direct | os.O_CLOEXEC)
            if not _try_lock(fd):
                os.close(fd)
                return None
            if direct:
                # Behind the lock: where an owner that was killed still waits for a volume that hangs, a read would hang as well.
                os.preadv(fd, [allocate(SECTOR_BYTES)], 0)
            return fd, bool(direct), note
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno == errno.EBUSY:
                return None
            if not direct or error.errno not in _NO_DIRECT_IO:
                raise
            note = _no_direct_io(path, error)
    raise AssertionError("a loop that ends by returning")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_checked(path: str, flags: int) -> tuple[int, bool, str]:
    """Open with O_DIRECT and prove it with one read; otherwise open without it and say why."""
    try:
        fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
        try:
            os.preadv(fd, [allocate(SECTOR_BYTES)], 0)
        except BaseException:
            os.close(fd)
            raise
        return fd, True, ""
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise
        return os.open(path, flags | os.O_CLOEXEC), False, _no_direct_io(path, error)


def _no_direct_io(path: str, error: OSError) -> str:
    return f"O_DIRECT does not work on {path} ({os.strerror(error.errno or 0)}): I/O passes through the page cache"


def _require_kind(path: str, mode: int) -> None:
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise VolumeForeign(f"{path} is neither a regular file nor a block device")


def _describe(path: str, data_fd: int, synced_fd: int, direct_io: bool, note: str) -> VolumeFile:
    data, synced = os.fstat(data_fd), os.fstat(synced_fd)
    _require_kind(path, data.st_mode)
    if (data.st_dev, data.st_ino) != (synced.st_dev, synced.st_ino):
        raise InvalidRequest(f"the two descriptors of {path} are of different files: inodes {data.st_ino} and {synced.st_ino}")
    return VolumeFile(
        path=path,
        data_fd=data_fd,
        synced_fd=synced_fd,
        size_bytes=size_of(data_fd),
        direct_io=direct_io,
        direct_io_note=note,
        file_system=file_system_of(data_fd),
    )


def size_of(fd: int) -> int:
    """Bytes of the file or block device (whose st_size is 0). Moves the file offset, which no positional I/O looks at."""
    return os.lseek(fd, 0, os.SEEK_END)


def file_system_of(fd: int) -> str:
    """The file system's type, "block device", or "unknown": best effort, for people only."""
    status = os.fstat(fd)
    if stat.S_ISBLK(status.st_mode):
        return "block device"
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return "unknown"
    for line in mounts:
        left, _, right = line.partition(" - ")
        if left.split()[2:3] == [device] and right:
            return right.split()[0]
    return "unknown"


def allocate(size_bytes: int) -> memoryview:
    """Zeroed memory that O_DIRECT accepts: anonymous pages, unmapped with the last reference."""
    return memoryview(mmap.mmap(-1, size_bytes))


def read_full(fd: int, buffer: Buffer, offset: int, what: str) -> None:
    """Fill the whole buffer from `offset`; OSError naming `what` otherwise, also at the end of the file."""
    view = memoryview(buffer).cast("B")
    done = read_up_to(fd, view, offset, what)
    if done != len(view):
        raise OSError(errno.EIO, f"reading {what}: {done} of {len(view)} bytes at {offset}")


def read_up_to(fd: int, buffer: Buffer, offset: int, what: str) -> int:
    """Fill the buffer as far as the file reaches; returns the bytes read. OSError naming `what`."""
    view = memoryview(buffer).cast("B")
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)  # Python repeats the call after EINTR.
        except OSError as error:
            raise OSError(error.errno, f"reading {what}: {os.strerror(error.errno or 0)} at {offset + done} after {done} of {len(view)} bytes") from error
        done += count
        # After an unaligned count O_DIRECT could not go on; regular files give one only at their end.
        if count == 0 or count % SECTOR_BYTES:
            break
    return done


def read_past_cache(fd: int, what: str) -> None:
    """Read the first sector from the device, or as near to it as may be: without O_DIRECT clean pages are dropped first. OSError naming `what`."""
    os.posix_fadvise(fd, 0, SECTOR_BYTES, os.POSIX_FADV_DONTNEED)
    read_full(fd, allocate(SECTOR_BYTES), 0, what)


def write_full(fd: int, buffer: Buffer, offset: int, what: str) -> None:
    """Write the whole buffer at `offset`; OSError naming `what` otherwise."""
    view = memoryview(buffer).cast("B")
    done = 0
    while done < len(view):
        try:
            count = os.pwritev(fd, [view[done:]], offset + done)
        except OSError as error:
            raise OSError(error.errno, f"writing {what}: {os.strerror(error.errno or 0)} at {offset + done} after {done} of {len(view)} bytes") from error
        done += count
        if done < len(view) and (count == 0 or count % SECTOR_BYTES):
            raise OSError(errno.EIO, f"writing {what}: {done} of {len(view)} bytes at {offset}")


def sync(fd: int, what: str) -> None:
    """fdatasync: everything written so far, by any descriptor of the file, is on the device. Never repeated by callers: a failed sync has lost data."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise OSError(error.errno, f"syncing {what}: {os.strerror(error.errno or 0)}") from error

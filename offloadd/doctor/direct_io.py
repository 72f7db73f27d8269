"""Which alignment O_DIRECT takes on a file: what statx says, and what reads prove."""

import ctypes
import errno
import os
from dataclasses import dataclass

from offloadd.tiers.volume_io import allocate
from offloadd.units import SECTOR_BYTES

#: linux/stat.h: the mask bit of Linux 6.1, and where `stx_dio_mem_align` and `stx_dio_offset_align` stand in the 256 bytes.
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MEMORY_ALIGN_OFFSET = 152
_AT_FDCWD = -100


@dataclass(frozen=True, slots=True)
class DirectIo:
    """`offset_bytes` is the smallest alignment of offsets and lengths that works, 0 if none up to a sector does, with `error` saying why.

    `memory_bytes` is 0 where the kernel does not tell.
    """

    offset_bytes: int
    memory_bytes: int
    error: str = ""


def probe_direct_io(path: str) -> DirectIo:
    """Read the file's first sector with O_DIRECT. Raises OSError if it can't be opened for reading at all."""
    memory_bytes, told_bytes = _dio_align(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return DirectIo(0, memory_bytes, f"open: {os.strerror(error.errno or 0)}")
    try:
        # What a kernel tells is proven once; what it does not tell is tried from the smallest logical block upwards.
        for size in (told_bytes,) if told_bytes > SECTOR_BYTES else (max(told_bytes, 512), SECTOR_BYTES):
            if _reads(fd, size):
                return DirectIo(size, memory_bytes)
    finally:
        os.close(fd)
    return DirectIo(0, memory_bytes, f"a read of {SECTOR_BYTES} bytes is refused")


def _reads(fd: int, size_bytes: int) -> bool:
    try:
        # The offset is as unaligned as this size allows: at 0 every alignment would pass.
        os.preadv(fd, [allocate(max(size_bytes, SECTOR_BYTES))[:size_bytes]], size_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    return True


def _dio_align(path: str) -> tuple[int, int]:
    """(memory, offset) alignment in bytes as statx tells them; zeros where it does not."""
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except AttributeError:
        return 0, 0
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, buffer) != 0:
        return 0, 0
    raw = buffer.raw
    if not int.from_bytes(raw[:4], "little") & _STATX_DIOALIGN:
        return 0, 0
    memory, offset = (int.from_bytes(raw[at : at + 4], "little") for at in (_MEMORY_ALIGN_OFFSET, _MEMORY_ALIGN_OFFSET + 4))
    return memory, offset

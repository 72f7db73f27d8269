"""Mappings whose end is decided by us: several memfds side by side in one range of addresses, unmapped at a known moment.

Python's own mmap object can't be closed while any array still refers to it, and it can't be placed. An engine must be told "unmapped" when nothing
is mapped any more, not when the last reference happens to go. So these are made by mmap(2) itself; whoever calls `close` proves that no copy runs.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.memory.memfd import HUGE_PAGE_BYTES
from offloadd.memory.numa import prefer_node
from offloadd.units import align_up

Bytes = npt.NDArray[np.uint8]

MADV_HUGEPAGE = mmap.MADV_HUGEPAGE
#: Allocates and maps pages without a fault for each (Linux 5.14); EINVAL before.
MADV_POPULATE_WRITE = 23
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0

# A CDLL call releases the GIL, so populating 64 MiB does not stop the other threads.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munmap.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


def _mmap(address: int | None, size_bytes: int, prot: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size_bytes, prot, flags, fd, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {size_bytes} bytes: {os.strerror(number)}")
    return int(mapped)


class Mapping:
    """Memories side by side. `offsets[i]` is where memory i begins in `bytes`, a uint8 array over the whole range.

    Each memory begins at a multiple of 2 MiB, so memories of equal size lie at equal distances: planes of one layer each, every one in a memfd of its
    own, then form one strided array. The gaps are not accessible.
    """

    def __init__(self, address: int, range_bytes: int, start: int, offsets: tuple[int, ...], used_bytes: int) -> None:
        self._address = address
        self._range_bytes = range_bytes
        self._start = start
        self._used_bytes = used_bytes
        self.offsets = offsets
        self.bytes: Bytes = np.frombuffer(_window(start, used_bytes), dtype=np.uint8)
        self.closed = False

    def advise(self, advice: int, offset_bytes: int = 0, size_bytes: int | None = None) -> bool:
        """madvise(2) over a part of the range; False when the kernel refuses. Best effort by nature: it never changes contents."""
        size = self._used_bytes - offset_bytes if size_bytes is None else size_bytes
        return bool(_libc.madvise(self._start + offset_bytes, size, advice) == 0)

    def prefer_node(self, node: int, offset_bytes: int, size_bytes: int) -> str:
        """Have pages of a part of the range that are not there yet come from a NUMA node while it has some. Returns why the kernel refused, or nothing."""
        return prefer_node(self._start + offset_bytes, size_bytes, node)

    def close(self) -> None:
        """Unmap. Arrays over the range must not be touched any more."""
        if self.closed:
            return
        self.closed = True
        self.bytes = np.empty(0, dtype=np.uint8)
        if _libc.munmap(self._address, self._range_bytes):
            number = ctypes.get_errno()
            raise OSError(number, f"munmap of {self._range_bytes} bytes: {os.strerror(number)}")


def _window(address: int, size_bytes: int) -> Any:
    return (ctypes.c_uint8 * size_bytes).from_address(address)


def _reserve(size_bytes: int) -> tuple[int, int, int]:
    """Address and length of a reserved range, and the first multiple of 2 MiB in it."""
    range_bytes = size_bytes + HUGE_PAGE_BYTES
    address = _mmap(None, range_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    return address, range_bytes, align_up(address, HUGE_PAGE_BYTES)


def map_memories(fds: Sequence[int], memory_bytes: Sequence[int]) -> Mapping:
    """Map the first `memory_bytes[i]` bytes of each memfd, shared and writable, side by side. Raises OSError; then nothing is mapped."""
    offsets: list[int] = []
    end = 0
    for size_bytes in memory_bytes:
        offsets.append(align_up(end, HUGE_PAGE_BYTES))
        end = offsets[-1] + size_bytes
    address, range_bytes, start = _reserve(align_up(end, HUGE_PAGE_BYTES))
    try:
        for fd, offset, size_bytes in zip(fds, offsets, memory_bytes, strict=True):
            _mmap(start + offset, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except BaseException:
        _libc.munmap(address, range_bytes)
        raise
    return Mapping(address, range_bytes, start, tuple(offsets), end)


def map_private(size_bytes: int) -> Mapping:
    """Private zeroed memory at a multiple of 2 MiB, on huge pages where the system has them, all of it present. Raises OSError."""
    used_bytes = align_up(size_bytes, HUGE_PAGE_BYTES)
    address, range_bytes, start = _reserve(used_bytes)
    try:
        _mmap(start, used_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)
    except BaseException:
        _libc.munmap(address, range_bytes)
        raise
    mapping = Mapping(address, range_bytes, start, (0,), size_bytes)
    mapping.advise(MADV_HUGEPAGE)
    mapping.bytes.fill(0)
    return mapping

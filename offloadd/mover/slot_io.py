"""The mover's only reads and writes of volumes: positioned, vectored, and complete or an error."""

import os

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: preadv and pwritev take at most this many buffers (Linux IOV_MAX).
BUFFERS_MAX = 1024


class ShortIoError(Exception):
    """The volume moved fewer bytes than asked for."""


def read(fd: int, buffers: list[Bytes], offset: int) -> int:
    """Fill all buffers from `offset` with one preadv; the count of bytes read. Raises `ShortIoError`, OSError."""
    wanted_bytes = sum(buffer.nbytes for buffer in buffers)
    moved_bytes = os.preadv(fd, [buffer.data for buffer in buffers], offset)
    if moved_bytes != wanted_bytes:
        raise ShortIoError(f"read {moved_bytes} bytes at offset {offset}; {wanted_bytes} were asked for")
    return moved_bytes


def write(fd: int, buffers: list[Bytes], offset: int) -> int:
    """Write all buffers at `offset` with one pwritev; the count of bytes written. Raises `ShortIoError`, OSError."""
    wanted_bytes = sum(buffer.nbytes for buffer in buffers)
    moved_bytes = os.pwritev(fd, [buffer.data for buffer in buffers], offset)
    if moved_bytes != wanted_bytes:
        raise ShortIoError(f"wrote {moved_bytes} bytes at offset {offset}; {wanted_bytes} were given")
    return moved_bytes

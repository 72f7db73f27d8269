"""Copies between engine memory and slots of ours: gather many pieces into one payload, scatter one payload into many pieces.

Engine memory comes as views [plane, block, byte] in payload order (`offloadd.memory.planes`). np.copyto of bytes releases the GIL; a memoryview slice
assignment does not, and would stop every other thread of the mover for the length of the copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.transfer.checksum import crc32c

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[Any]
Views = Sequence[Bytes]
Checksums = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Payloads:
    """Where payloads lie in memory of ours: payload i begins at `offsets[i]` in `buffer`. `stride_bytes`: the distance at which two are neighbours.

    `past_caches`: long copies may leave the caches alone: memory is all that bounds them, and nobody reads their bytes soon.
    """

    buffer: Bytes
    offsets: Indices
    stride_bytes: int
    past_caches: bool = False


@dataclass(slots=True)
class Checks:
    """CRC32Cs of payloads that are taken while these are copied, one a block.

    `checksums` is filled. With `expected`, a block that has another checksum is not scattered. `spent_ns`: the part of the time that went into checksums.
    """

    checksums: Checksums
    expected: Checksums | None = None
    spent_ns: int = 0

    @classmethod
    def of(cls, count: int) -> "Checks":
        """To be filled for so many blocks."""
        return cls(np.zeros(count, dtype=np.uint32))

    @property
    def count(self) -> int:
        """How many blocks they are for."""
        return len(self.checksums)


def payload_bytes(views: Views) -> int:
    """Bytes of one block over all views."""
    return sum(view.shape[0] * view.shape[2] for view in views)


def windows(views: Views, first: int, last: int) -> Iterator[tuple[Bytes, int]]:
    """The parts of the views that hold payload bytes `first` to `last`, each with its offset from `first`."""
    begin = 0
    for view in views:
        planes, _, piece = view.shape
        low, high = max(first - begin, 0), min(last - begin, planes * piece)
        if low < high:
            yield from ((part, begin + at - first) for part, at in _parts(view, piece, low, high))
        begin += planes * piece


def _parts(view: Bytes, piece: int, low: int, high: int) -> Iterator[tuple[Bytes, int]]:
    """A group's bytes `low` to `high`: a rest of a first piece, whole pieces, the beginning of a last one."""
    plane, at = divmod(low, piece)
    if at:
        end = min(piece, at + high - low)
        yield view[plane : plane + 1, :, at:end], low
        low += end - at
        plane += 1
    whole = (high - low) // piece
    if whole:
        yield view[plane : plane + whole], low
        low += whole * piece
        plane += whole
    if low < high:
        yield view[plane : plane + 1, :, : high - low], low


def gather(views: Views, block_indices: Indices, target: Payloads, first: int = 0, last: int | None = None) -> None:
    """Copy payload bytes `first` to `last` (default: all) of each block out of engine memory. `target.offsets[i]` is where byte `first` goes.

    Raises ValueError, before any byte moves, when a block index is not below the views' block count.
    """
    for engine, ours in _pairs(views, block_indices, target, first, last):
        np.copyto(ours, engine)


def scatter(views: Views, block_indices: Indices, source: Payloads, first: int = 0, last: int | None = None) -> None:
    """Copy payload bytes `first` to `last` (default: all) of each block into engine memory. `source.offsets[i]` is where byte `first` lies.

    Raises ValueError, before any byte moves, when a block index is not below the views' block count.
    """
    for engine, ours in _pairs(views, block_indices, source, first, last):
        np.copyto(engine, ours)


def _pairs(views: Views, block_indices: Indices, payloads: Payloads, first: int, last: int | None) -> Iterator[tuple[Bytes, Bytes]]:
    """Equally shaped [plane, block, byte] views of engine memory and of ours.

    One pair per run of neighbouring blocks and window. A run of one block is the block-by-block copy, so runs never cost more calls than blocks do; NumPy
    orders the inner loops of a pair by the strides of the target.
    """
    count = len(block_indices)
    if not count:
        return
    block_count = views[0].shape[1]
    largest = int(block_indices.max())
    if largest >= block_count:
        raise ValueError(f"block index {largest} is outside the region of {block_count} blocks")
    parts = list(windows(views, first, payload_bytes(views) if last is None else last))
    for begin, end in _runs(block_indices, payloads.offsets, payloads.stride_bytes):
        block, offset = int(block_indices[begin]), int(payloads.offsets[begin])
        for part, at in parts:
            planes, _, piece = part.shape
            ours: Bytes = np.ndarray(
                (planes, end - begin, piece),
                dtype=np.uint8,
                buffer=payloads.buffer,
                offset=offset + at,
                strides=(piece, payloads.stride_bytes, 1),
            )
            yield part[:, block : block + end - begin], ours


def _runs(block_indices: Indices, offsets: Indices, stride_bytes: int) -> Iterator[tuple[int, int]]:
    """Maximal runs in which block indices rise by one and payloads lie `stride_bytes` apart."""
    count = len(block_indices)
    if count == 1:
        yield 0, 1
        return
    apart = (np.diff(block_indices.astype(np.int64)) != 1) | (np.diff(offsets.astype(np.int64)) != stride_bytes)
    begin = 0
    for end in (np.flatnonzero(apart) + 1).tolist():
        yield begin, end
        begin = end
    yield begin, count


def block_crc(views: Views, block_index: int, first: int = 0, last: int | None = None) -> int:
    """CRC32C of payload bytes `first` to `last` (default: all) of one block, read where it lies in engine memory."""
    value = 0
    for part, _ in windows(views, first, payload_bytes(views) if last is None else last):
        for plane in range(part.shape[0]):
            value = crc32c(part[plane, block_index], value)
    return value

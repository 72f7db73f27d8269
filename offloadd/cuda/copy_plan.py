"""Which copies move some blocks: as few as can be, computed without CUDA.

Blocks whose indices and places are neighbours form a run. A run of n blocks of p pieces at equal distances is p rectangles of n rows, or n rectangles of p
rows; a rectangle is one 2D copy. Pieces that form no rectangle are single copies, which a driver takes as one batch.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.cuda.region import CudaRegion, Indices, Places

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Equal rectangles, the i-th at addresses `engine[i]` and `ours[i]`: `row_count` rows of `row_bytes`, apart by one pitch a side."""

    engine: Numbers
    ours: Numbers
    row_bytes: int
    row_count: int
    engine_pitch_bytes: int
    our_pitch_bytes: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """`rectangles`, and single copies: entry i of `engine` and `ours` (addresses) is `sizes[i]` bytes long. No two copies write the same byte."""

    rectangles: list[Rectangles]
    engine: Numbers
    ours: Numbers
    sizes: Numbers


@dataclass(slots=True)
class _Planner:
    rows_min: int
    pitch_bytes_max: int
    rectangles: list[Rectangles] = field(default_factory=list)
    singles: list[tuple[Numbers, Numbers, int]] = field(default_factory=list)

    def add(self, some: Rectangles) -> None:
        """Take rectangles as what they are best copied as."""
        pitches = (some.engine_pitch_bytes, some.our_pitch_bytes)
        if some.row_count == 1:
            self.singles.append((some.engine, some.ours, some.row_bytes))
        elif pitches == (some.row_bytes, some.row_bytes):
            self.singles.append((some.engine, some.ours, some.row_bytes * some.row_count))
        elif some.row_count >= self.rows_min and all(some.row_bytes <= pitch <= self.pitch_bytes_max for pitch in pitches):
            self.rectangles.append(some)
        else:
            rows = np.arange(some.row_count)
            engine, ours = ((addresses[:, None] + rows * pitch).ravel() for addresses, pitch in zip((some.engine, some.ours), pitches, strict=True))
            self.singles.append((engine, ours, some.row_bytes))

    def plan(self) -> CopyPlan:
        """All that was taken."""
        if not self.singles:
            none = np.empty(0, np.int64)
            return CopyPlan(self.rectangles, none, none, none)
        engine, ours = (np.concatenate([some[side] for some in self.singles]) for side in (0, 1))
        sizes = np.repeat(np.array([some[2] for some in self.singles], np.int64), [len(some[0]) for some in self.singles])
        return CopyPlan(self.rectangles, engine, ours, sizes)


def plan_copies(region: CudaRegion, block_indices: Indices, places: Places, first: int, last: int | None, *, rows_min: int, pitch_bytes_max: int) -> CopyPlan:
    """Copies of payload bytes `first` to `last` (default: all) of each block; `places.offsets[i]` is where byte `first` of block i lies.

    `rows_min`: a rectangle of fewer rows becomes single copies, as one does whose pitch is above `pitch_bytes_max`. Raises ValueError: a block outside the
    region, a window outside the payload, a place outside our memory.
    """
    end = region.payload_bytes if last is None else last
    check_move(region, block_indices, places, first, end)
    planner = _Planner(rows_min, pitch_bytes_max)
    if not len(block_indices):
        return planner.plan()
    blocks, offsets = block_indices.astype(np.int64), places.offsets.astype(np.int64) + places.address
    runs = _runs(blocks, offsets, places.stride_bytes)
    for family in _families(region, first, end):
        # Few long runs are worth a rectangle of their own for each piece; all other blocks are planned together, a block a rectangle.
        alone = np.ones(len(blocks), dtype=np.bool_)
        pieces = np.arange(family.plane_count)
        for begin, stop in runs:
            if not _is_long(family, places.stride_bytes, stop - begin, rows_min):
                continue
            alone[begin:stop] = False
            planner.add(
                Rectangles(
                    _sums(family.addresses, blocks[begin] * family.block_stride_bytes + pieces * family.plane_step_bytes),
                    _sums(family.payload_offsets, offsets[begin] + pieces * family.piece_bytes),
                    family.piece_bytes,
                    stop - begin,
                    family.block_stride_bytes,
                    places.stride_bytes,
                )
            )
        if alone.any():
            planner.add(
                Rectangles(
                    _sums(family.addresses, blocks[alone] * family.block_stride_bytes),
                    _sums(family.payload_offsets, offsets[alone]),
                    family.piece_bytes,
                    family.plane_count,
                    family.plane_step_bytes,
                    family.piece_bytes,
                )
            )
    return planner.plan()


@dataclass(frozen=True, slots=True)
class _Family:
    """Groups of planes of one shape, which are planned at once: engines with an allocation a layer have dozens."""

    plane_count: int
    plane_step_bytes: int
    block_stride_bytes: int
    piece_bytes: int
    #: Of block 0, and where it begins in what is copied of a payload; an entry a group.
    addresses: Numbers
    payload_offsets: Numbers


def _families(region: CudaRegion, first: int, last: int) -> list[_Family]:
    members: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    for group, at in region.windows(first, last):
        shape = (group.plane_count, group.plane_step_bytes, group.block_stride_bytes, group.piece_bytes)
        members.setdefault(shape, []).append((group.offset_bytes, at))
    return [_Family(*shape, *np.array(places, np.int64).T) for shape, places in members.items()]


def _sums(some: Numbers, others: Numbers) -> Numbers:
    """Each of `some` plus each of `others`."""
    return (some[:, None] + others).ravel()


def _is_long(group: _Family, stride_bytes: int, run: int, rows_min: int) -> bool:
    """Whether a run of blocks is better cut by pieces than by blocks: that makes fewer copies, or longer ones where neighbours touch on both sides.

    A run below `rows_min` would only be single copies again, and those are planned faster all at once.
    """
    touch = group.block_stride_bytes == stride_bytes == group.piece_bytes
    return run > group.plane_count and (run >= rows_min or touch)


def _runs(blocks: Numbers, offsets: Numbers, stride_bytes: int) -> list[tuple[int, int]]:
    """Maximal runs of more than one block in which block indices rise by one and payloads lie `stride_bytes` apart."""
    apart = (np.diff(blocks) != 1) | (np.diff(offsets) != stride_bytes)
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(blocks)]
    return [(begin, stop) for begin, stop in pairwise(edges) if stop - begin > 1]


def check_move(region: CudaRegion, block_indices: Indices, places: Places, first: int, last: int) -> None:
    """Raise ValueError for a block outside the region, a window outside the payload, or a place outside our memory."""
    if len(block_indices) != len(places.offsets):
        raise ValueError(f"{len(block_indices)} blocks can't go to {len(places.offsets)} places")
    if not 0 <= first < last <= region.payload_bytes:
        raise ValueError(f"payload bytes {first} to {last} are no part of a payload of {region.payload_bytes} bytes")
    if not len(block_indices):
        return
    smallest, largest = _limits(block_indices)
    if smallest < 0 or largest >= region.block_count:
        raise ValueError(f"block index {smallest if smallest < 0 else largest} is outside the region of {region.block_count} blocks")
    lowest, highest = _limits(places.offsets)
    if lowest < 0 or highest + last - first > places.size_bytes:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"a payload of {last - first} bytes at offset {wrong} is outside our memory of {places.size_bytes} bytes")


def _limits(values: npt.NDArray[Any]) -> tuple[int, int]:
    return int(values.min()), int(values.max())

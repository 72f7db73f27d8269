"""Views of engine memory by block: planes that lie regularly become one array [plane, block, byte].

A region may have hundreds of planes (K and V of each layer). One NumPy copy over a merged view moves all of them, where one copy a plane would
spend more time in Python than in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offloadd.model.region import Layout

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PlaneGroup:
    """`plane_count` pieces of `piece_bytes`, consecutive in the payload.

    Piece p of block b begins at `offset_bytes + p * plane_step_bytes + b * block_stride_bytes`.
    """

    offset_bytes: int
    plane_count: int
    plane_step_bytes: int
    block_stride_bytes: int
    piece_bytes: int


def merge_planes(layout: Layout, memory_offsets: Sequence[int]) -> list[PlaneGroup]:
    """The layout's planes in payload order, merged. `memory_offsets[i]`: where memory i begins in the buffer that all memories share.

    First, planes that touch each other in every block become one longer piece; then pieces of equal length and stride at equal distances become one group.
    """
    pieces: list[PlaneGroup] = []
    for plane in layout.planes:
        offset = memory_offsets[plane.memory] + plane.offset_bytes
        last = pieces[-1] if pieces else None
        if last is not None and last.block_stride_bytes == plane.block_stride_bytes and last.offset_bytes + last.piece_bytes == offset:
            pieces[-1] = PlaneGroup(last.offset_bytes, 1, 0, last.block_stride_bytes, last.piece_bytes + plane.block_bytes)
        else:
            pieces.append(PlaneGroup(offset, 1, 0, plane.block_stride_bytes, plane.block_bytes))
    groups: list[PlaneGroup] = []
    for piece in pieces:
        last = groups[-1] if groups else None
        if last is not None and _continues(last, piece):
            step = piece.offset_bytes - last.offset_bytes if last.plane_count == 1 else last.plane_step_bytes
            groups[-1] = PlaneGroup(last.offset_bytes, last.plane_count + 1, step, last.block_stride_bytes, last.piece_bytes)
        else:
            groups.append(piece)
    return groups


def _continues(group: PlaneGroup, piece: PlaneGroup) -> bool:
    if group.block_stride_bytes != piece.block_stride_bytes or group.piece_bytes != piece.piece_bytes:
        return False
    return group.plane_count == 1 or piece.offset_bytes == group.offset_bytes + group.plane_count * group.plane_step_bytes


def plane_views(buffer: Bytes, layout: Layout, memory_offsets: Sequence[int]) -> tuple[Bytes, ...]:
    """One writable view of shape (planes, blocks, bytes) per group, in payload order. NumPy refuses (ValueError) a view that leaves the buffer."""
    return tuple(
        np.ndarray(
            (group.plane_count, layout.block_count, group.piece_bytes),
            dtype=np.uint8,
            buffer=buffer,
            offset=group.offset_bytes,
            strides=(group.plane_step_bytes, group.block_stride_bytes, 1),
        )
        for group in merge_planes(layout, memory_offsets)
    )

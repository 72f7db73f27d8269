"""Engine memory on a GPU by block: groups of planes at device addresses, and where payloads lie on our side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol

import numpy.typing as npt

from offloadd.errors import InvalidRequest
from offloadd.memory.planes import PlaneGroup, merge_planes
from offloadd.model.region import Layout, validate_layout

Indices = npt.NDArray[Any]


class Memory(Protocol):
    """Memory that a GPU reaches: `DeviceMemory`, `IpcMemory`, `VmmMemory`, or a part of one."""

    @property
    def address(self) -> int:
        """Where it begins, in this process."""

    @property
    def size_bytes(self) -> int:
        """What is really there, by the driver."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A stretch of device memory: what a client calls a memory when it is one tensor inside an allocation."""

    address: int
    size_bytes: int

    @classmethod
    def of(cls, memory: Memory, offset_bytes: int, size_bytes: int) -> "MemoryPart":
        """`size_bytes` of `memory` from `offset_bytes` on. Raises InvalidRequest unless they lie inside of what is really there."""
        if offset_bytes < 0 or size_bytes < 1 or offset_bytes + size_bytes > memory.size_bytes:
            raise InvalidRequest(f"memory of {size_bytes} bytes at offset {offset_bytes} is outside its allocation of {memory.size_bytes} bytes")
        return cls(memory.address + offset_bytes, size_bytes)


@dataclass(frozen=True)
class CudaRegion:
    """One region as copy engines see it: `groups` in payload order, whose offsets are addresses."""

    groups: tuple[PlaneGroup, ...]
    block_count: int
    payload_bytes: int

    @cached_property
    def _hash(self) -> int:
        return hash((self.groups, self.block_count, self.payload_bytes))

    def __hash__(self) -> int:
        # Kept: what is known of a region is looked up for each slice, and a region of 80 allocations would take 0.1 ms to hash each time.
        return self._hash

    @classmethod
    def over(cls, layout: Layout, memories: Sequence[Memory], *, planes_max: int) -> "CudaRegion":
        """A region whose planes lie in `memories`. Raises InvalidRequest unless every block of every plane lies inside its memory."""
        validate_layout(layout, tuple(memory.size_bytes for memory in memories), planes_max=planes_max)
        addresses = [memory.address for memory in memories]
        groups: list[PlaneGroup] = []
        # Memory by memory: a copy may not reach over the end of an allocation, also where the next one happens to lie at the right distance.
        for _, planes in groupby(layout.planes, key=lambda plane: plane.memory):
            groups += merge_planes(Layout(layout.block_count, tuple(planes)), addresses)
        return cls(tuple(groups), layout.block_count, layout.payload_bytes)

    def windows(self, first: int, last: int) -> Iterator[tuple[PlaneGroup, int]]:
        """The parts of the groups that hold payload bytes `first` to `last`, each with its offset from `first`."""
        begin = 0
        for group in self.groups:
            end = begin + group.plane_count * group.piece_bytes
            low, high = max(first, begin), min(last, end)
            while low < high:
                part = _part(group, low - begin, high - begin)
                yield part, low - first
                low += part.plane_count * part.piece_bytes
            begin = end


def _part(group: PlaneGroup, low: int, high: int) -> PlaneGroup:
    """As much of a group's bytes `low` to `high` as is one group: a rest of a piece, whole pieces, or the beginning of one."""
    if low == 0 and high == group.plane_count * group.piece_bytes:
        return group
    plane, at = divmod(low, group.piece_bytes)
    whole = (high - low) // group.piece_bytes
    address = group.offset_bytes + plane * group.plane_step_bytes + at
    if at or not whole:
        return replace(group, offset_bytes=address, plane_count=1, piece_bytes=min(group.piece_bytes - at, high - low))
    return replace(group, offset_bytes=address, plane_count=whole)


@dataclass(frozen=True, slots=True)
class Places:
    """Where payloads lie on our side: payload i begins `offsets[i]` bytes behind `address`, in memory of `size_bytes`.

    `stride_bytes`: the distance at which two are neighbours. `on_device`: memory of the GPU, else page-locked memory of the host.
    """

    address: int
    size_bytes: int
    offsets: Indices
    stride_bytes: int
    on_device: bool

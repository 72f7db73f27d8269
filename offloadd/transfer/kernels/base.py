"""The contract of the kernels: what they are told by address, and what they promise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from offloadd.memory.planes import PlaneGroup, merge_planes
from offloadd.model.region import Layout
from offloadd.units import GIB

#: `struct Plane` of copy.cu: block b's piece begins at `base + b * block_stride_bytes`, is `block_bytes` long and lies at `payload_begin` in the payload.
PLANE_DTYPE = np.dtype([("base", "<u8"), ("block_stride_bytes", "<u8"), ("block_bytes", "<u8"), ("payload_begin", "<u8")])

#: Longest payload of a checksum. Long blocks are checked in chunks of 4 MiB, so nothing comes near it; the kernel's table of pieces ends there.
PAYLOAD_BYTES_MAX = GIB


#: Assumed when launches are cut and nothing was measured, in bytes of payload: about half of what an A100 can copy (1.6 TB/s, reads and writes together). Too
#: high a figure makes launches longer than LAUNCH_S_MAX, too low a one makes more of them. Not measured yet.
COPY_BYTES_PER_S = 400e9


@dataclass(frozen=True, slots=True)
class Region:
    """Engine memory as kernels see it. `planes` is the address of `plane_count` entries of PLANE_DTYPE in the device's memory, made by `plane_table`."""

    planes: int
    plane_count: int
    block_count: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some blocks of a region, by arrays of `count` entries in the device's memory.

    `indices`: address of uint32 block indices. `good`: address of uint8 flags; blocks whose flag is 0 are left alone. `offsets`: address of uint64 distances of
    payloads from the first slot's payload, for slots that lie anywhere (those of a gather may not overlap); 0 where slots have one stride.
    """

    count: int
    indices: int
    good: int
    offsets: int = 0


@dataclass(frozen=True, slots=True)
class Slots:
    """Payload i begins at `base + i * stride_bytes + payload_offset_bytes`."""

    base: int
    stride_bytes: int
    payload_offset_bytes: int = 0

    @property
    def first_payload(self) -> int:
        """Address of payload 0."""
        return self.base + self.payload_offset_bytes


class DeviceKernels(Protocol):
    """Work on memory that one device reaches, all of it named by address. Any thread may call; no call allocates, copies to the host or waits.

    On a GPU a call returns when its launches are queued on `stream` (a CUstream handle; 0 is the default stream): memory that it names must stay as it is
    until the stream has come past. The NumPy twin works at once and takes the stream as said: whatever the stream waits for must have happened.
    ValueError, before anything moves: a number that the host knows is out of range. What only the device knows (an index outside the region) clears a flag.
    """

    def gather(
        self,
        region: Region,
        blocks: Blocks,
        slots: Slots,
        *,
        first: int = 0,
        last: int | None = None,
        bytes_per_s: float = COPY_BYTES_PER_S,
        stream: int = 0,
    ) -> None:
        """Copy payload bytes `first` to `last` (default: all) of every good block to its slot, byte `first` to the beginning of the payload.

        `bytes_per_s`: what is cut into launches is assumed to move so fast, so that none is long; a measured rate of the same shape is best.
        Afterwards `good[i]` is 0 as well where `indices[i]` is not below the region's block count; nothing was copied for it.
        """

    def scatter(
        self,
        region: Region,
        blocks: Blocks,
        slots: Slots,
        *,
        first: int = 0,
        last: int | None = None,
        bytes_per_s: float = COPY_BYTES_PER_S,
        stream: int = 0,
    ) -> None:
        """The way back, for good blocks only. The flags may come from a `verify` on the same stream: the host need not look at them in between."""

    def checksums(self, slots: Slots, count: int, payload_bytes: int, payload_bytes_max: int, crcs: int, *, stream: int = 0) -> None:
        """Write the CRC32C of payloads 0 to `count` - 1 to the uint32 array at `crcs`, which lies in memory of the device itself.

        `payload_bytes` is the address of uint64 lengths, none above `payload_bytes_max`: the checksum of a longer payload may be wrong.
        """

    def verify(self, crcs: int, expected: int, good: int, count: int, *, stream: int = 0) -> None:
        """Clear `good[i]` (uint8) where `crcs[i]` is not `expected[i]` (uint32): a flag that was 0 before stays 0."""


def plane_table(layout: Layout, memory_addresses: Sequence[int]) -> npt.NDArray[Any]:
    """The table of a region, for upload: PLANE_DTYPE entries in payload order, planes that touch each other in every block made one.

    `memory_addresses[i]` is where memory i of the layout is mapped on the device.
    """
    return group_table(merge_planes(layout, memory_addresses))


def group_table(groups: Sequence[PlaneGroup]) -> npt.NDArray[Any]:
    """As `plane_table`, of planes that were merged already and whose offsets are addresses."""
    planes = [
        (group.offset_bytes + number * group.plane_step_bytes, group.block_stride_bytes, group.piece_bytes)
        for group in groups
        for number in range(group.plane_count)
    ]
    table = np.zeros(len(planes), dtype=PLANE_DTYPE)
    for entry, begin, plane in zip(table, np.cumsum([0] + [plane[2] for plane in planes]).tolist(), planes, strict=False):
        entry["base"], entry["block_stride_bytes"], entry["block_bytes"] = plane
        entry["payload_begin"] = begin
    return table


def checked_window(region: Region, blocks: Blocks, slots: Slots, first: int, last: int | None) -> int:
    """`last`, or the payload's end. Raises ValueError unless the window lies in the payload and slots can hold it without touching each other."""
    end = region.payload_bytes if last is None else last
    if blocks.count < 0:
        raise ValueError(f"{blocks.count} blocks can't be moved; at least 0 are needed")
    if region.plane_count < 1 or region.block_count < 1:
        raise ValueError(f"region has {region.plane_count} planes and {region.block_count} blocks; at least 1 of each is needed")
    if not 0 <= first < end <= region.payload_bytes:
        raise ValueError(f"payload bytes {first} to {end} are no part of a payload of {region.payload_bytes} bytes")
    if blocks.count > 1 and not blocks.offsets and slots.stride_bytes < end - first:
        raise ValueError(f"slots of {slots.stride_bytes} bytes can't take {end - first} payload bytes each")
    return end


def check_lengths(count: int, payload_bytes_max: int) -> None:
    """Raise ValueError unless checksums of `count` payloads of at most that length can be computed."""
    if count < 0:
        raise ValueError(f"{count} payloads can't be checked; at least 0 are needed")
    if not 0 <= payload_bytes_max <= PAYLOAD_BYTES_MAX:
        raise ValueError(f"payloads of {payload_bytes_max} bytes can't be checked in one piece; the limit is {PAYLOAD_BYTES_MAX}")

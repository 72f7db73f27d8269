"""The NumPy twin of the kernels: the same contract over addresses of host memory."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.transfer import gather as host
from offloadd.transfer.checksum import crc32c
from offloadd.transfer.kernels.base import COPY_BYTES_PER_S, PLANE_DTYPE, Blocks, Region, Slots, check_lengths, checked_window

Bytes = npt.NDArray[np.uint8]


class HostKernels:
    """`DeviceKernels` on the CPU, by the copies and the checksum that host engines use. Works at once, whatever the stream."""

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
        """Region → slots; see `DeviceKernels`."""
        end = checked_window(region, blocks, slots, first, last)
        chosen, indices = _good_blocks(region, blocks)
        host.gather(_views(region), indices, _payloads(slots, blocks, chosen, end - first), first, end)

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
        """Slots → region, good blocks only; see `DeviceKernels`."""
        end = checked_window(region, blocks, slots, first, last)
        chosen, indices = _good_blocks(region, blocks)
        host.scatter(_views(region), indices, _payloads(slots, blocks, chosen, end - first), first, end)

    def checksums(self, slots: Slots, count: int, payload_bytes: int, payload_bytes_max: int, crcs: int, *, stream: int = 0) -> None:
        """CRC32C of each payload; see `DeviceKernels`."""
        check_lengths(count, payload_bytes_max)
        results = _array(crcs, count, np.uint32)
        for number, size_bytes in enumerate(_array(payload_bytes, count, np.uint64).tolist()):
            results[number] = crc32c(_array(slots.first_payload + number * slots.stride_bytes, size_bytes, np.uint8))

    def verify(self, crcs: int, expected: int, good: int, count: int, *, stream: int = 0) -> None:
        """Clear the flags of wrong payloads; see `DeviceKernels`."""
        check_lengths(count, 0)
        wrong = _array(crcs, count, np.uint32) != _array(expected, count, np.uint32)
        _array(good, count, np.uint8)[wrong] = 0


def _array(address: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`count` entries of memory at `address`, not owned."""
    size_bytes = count * np.dtype(dtype).itemsize
    return np.ndarray((count,), dtype=dtype, buffer=memoryview((ctypes.c_uint8 * size_bytes).from_address(address)))


def _good_blocks(region: Region, blocks: Blocks) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint32]]:
    """Positions and indices of the blocks to move; clears the flags of those outside the region."""
    indices = _array(blocks.indices, blocks.count, np.uint32)
    good = _array(blocks.good, blocks.count, np.uint8)
    good[indices >= region.block_count] = 0
    chosen = np.flatnonzero(good)
    return chosen, indices[chosen]


def _views(region: Region) -> list[Bytes]:
    """One view [1, block, byte] a plane."""
    views = []
    for base, stride, piece, _ in _array(region.planes, region.plane_count, PLANE_DTYPE).tolist():
        extent = _array(base, (region.block_count - 1) * stride + piece, np.uint8)
        views.append(np.ndarray((1, region.block_count, piece), dtype=np.uint8, buffer=extent, strides=(0, stride, 1)))
    return views


def _payloads(slots: Slots, blocks: Blocks, chosen: npt.NDArray[np.intp], window_bytes: int) -> host.Payloads:
    if blocks.offsets:
        offsets = _array(blocks.offsets, blocks.count, np.uint64).astype(np.int64)
        return host.Payloads(_array(slots.first_payload, int(offsets.max(initial=0)) + window_bytes, np.uint8), offsets[chosen], window_bytes)
    extent = max(blocks.count - 1, 0) * slots.stride_bytes + window_bytes
    return host.Payloads(_array(slots.first_payload, extent, np.uint8), chosen * slots.stride_bytes, slots.stride_bytes)

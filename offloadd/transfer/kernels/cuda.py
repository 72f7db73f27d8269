"""The kernels on a GPU: what is launched, with which grid and arguments. Who launches is a `Launcher`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from offloadd.transfer.kernels.base import COPY_BYTES_PER_S, Blocks, Region, Slots, check_lengths, checked_window
from offloadd.transfer.kernels.crc_tables import crc_tables
from offloadd.transfer.kernels.plan import plan_launches
from offloadd.transfer.kernels.source import COPY_THREADS, COPY_TILE_BYTES, CRC_PIECE_BYTES, CRC_THREADS, CRC_WORD_BYTES, FLAT_THREADS

#: The least that the checksum is meant to reach; see crc32c.cu.
CRC_BYTES_PER_S = 200e9


class Launcher(Protocol):
    """One GPU with the kernels of source.py compiled for it."""

    def upload(self, values: npt.NDArray[np.uint32]) -> int:
        """Address of a copy of `values` in the GPU's memory, there before any later launch and as long as the launcher."""

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, arguments: Sequence[int], stream: int) -> None:
        """Queue `kernel` on `stream`. Every argument is passed as 8 bytes. Raises CudaError when the driver refuses it."""


class CudaKernels:
    """`DeviceKernels` by launches of copy.cu and crc32c.cu."""

    def __init__(self, launcher: Launcher, *, crc_bytes_per_s: float = CRC_BYTES_PER_S) -> None:
        self._launcher = launcher
        self._crc_bytes_per_s = crc_bytes_per_s
        self._tables = launcher.upload(crc_tables())

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
        self._move("gather", region, blocks, slots, first, last, bytes_per_s, stream)

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
        self._move("scatter", region, blocks, slots, first, last, bytes_per_s, stream)

    def _move(self, kernel: str, region: Region, blocks: Blocks, slots: Slots, first: int, last: int | None, bytes_per_s: float, stream: int) -> None:
        end = checked_window(region, blocks, slots, first, last)
        arguments = [region.planes, region.plane_count, region.block_count, blocks.indices, blocks.good]
        arguments += [slots.first_payload, slots.stride_bytes, blocks.offsets, first, end]
        for part in plan_launches(blocks.count, -(-(end - first) // COPY_TILE_BYTES), COPY_TILE_BYTES, bytes_per_s=bytes_per_s):
            grid = (part.tile_count, part.payload_count)
            self._launcher.launch(kernel, grid, COPY_THREADS, [*arguments, part.first_payload, part.first_tile], stream)

    def checksums(self, slots: Slots, count: int, payload_bytes: int, payload_bytes_max: int, crcs: int, *, stream: int = 0) -> None:
        """CRC32C of each payload; see `DeviceKernels`."""
        check_lengths(count, payload_bytes_max)
        if not count:
            return
        self._launcher.launch("crc32c_begin", _flat(count), FLAT_THREADS, [crcs, count], stream)
        # Words of a payload that begins in the last byte of its first word; one shorter than 4 bytes takes 4.
        words = -(-(CRC_WORD_BYTES - 1 + max(payload_bytes_max, 4)) // CRC_WORD_BYTES)
        pieces = -(-words * CRC_WORD_BYTES // CRC_PIECE_BYTES)
        arguments = [slots.first_payload, slots.stride_bytes, payload_bytes, self._tables, crcs]
        for part in plan_launches(count, pieces, CRC_PIECE_BYTES, bytes_per_s=self._crc_bytes_per_s):
            grid = (part.tile_count, part.payload_count)
            self._launcher.launch("crc32c_pieces", grid, CRC_THREADS, [*arguments, part.first_payload, part.first_tile], stream)

    def verify(self, crcs: int, expected: int, good: int, count: int, *, stream: int = 0) -> None:
        """Clear the flags of wrong payloads; see `DeviceKernels`."""
        check_lengths(count, 0)
        if count:
            self._launcher.launch("crc32c_verify", _flat(count), FLAT_THREADS, [crcs, expected, good, count], stream)


def _flat(count: int) -> tuple[int, int]:
    """The grid of a kernel with one thread per payload."""
    return -(-count // FLAT_THREADS), 1

"""Gather and scatter by kernels: `Copies` as the copy engines make them, but every piece is read and written by the cores of the GPU.

A kernel reaches page-locked memory of the host as it does the GPU's own (zero copy), so one launch moves pieces that would be a copy each for a copy engine.
"""

import sys
import threading
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.cuda.copy_plan import check_move
from offloadd.cuda.device import Device
from offloadd.cuda.memory import DeviceMemory, HostRegistration, is_reached
from offloadd.cuda.plain import copy
from offloadd.cuda.region import CudaRegion, Indices, Places
from offloadd.cuda.streams import Stream
from offloadd.memory.mapping import map_private
from offloadd.transfer.kernels.base import COPY_BYTES_PER_S, Blocks, DeviceKernels, Region, Slots, group_table
from offloadd.units import KIB

#: Assumed for places on the host until the rate was measured: a little less than PCIe 3.0 with 16 lanes gives, the slowest way to a GPU that is worth having.
HOST_COPY_BYTES_PER_S = 10e9
#: What a thread can tell its kernels of one call: 32 bytes a plane and 13 a block, so 1,024 planes and 2,500 blocks. A job has at most some 700 blocks.
TABLE_BYTES = 64 * KIB
_BLOCK_BYTES = 8 + 4 + 1


class _Table:
    """A thread's room for planes, offsets, indices and flags: written on the host, read by kernels on the GPU. Held as long as the process."""

    def __init__(self, device: Device) -> None:
        """Raises OSError; nothing is held then."""
        with ExitStack() as held:
            self.host = map_private(TABLE_BYTES)
            held.callback(self.host.close)
            held.callback(HostRegistration.register(device, self.host.bytes.ctypes.data, TABLE_BYTES).close)
            self.memory = DeviceMemory.allocate(device, TABLE_BYTES)
            held.pop_all()


class KernelCopies:
    """See `Copies`. Only for moves that `takes` takes."""

    def __init__(self, device: Device, kernels: DeviceKernels) -> None:
        """`kernels`: compiled for `device`."""
        self._device = device
        self._kernels = kernels
        self._local = threading.local()

    def takes(self, region: CudaRegion, count: int, places: Places) -> bool:
        """Whether kernels can make this move of `count` blocks in this thread.

        Not if its table is too long, or there is no memory for one, or the driver says that the GPU does not reach the places.
        """
        if _table_bytes(region, count) > TABLE_BYTES or self._table() is None:
            return False
        return places.on_device or all(is_reached(self._device, address) for address in (places.address, places.address + places.size_bytes - 1))

    def gather(
        self, region: CudaRegion, block_indices: Indices, target: Places, stream: Stream, *, first: int = 0, last: int | None = None, bytes_per_s: float = 0.0
    ) -> None:
        """See `Copies`. `bytes_per_s`: the measured rate of such moves, by which launches are cut; 0 if it was not measured."""
        self._queue(self._kernels.gather, region, block_indices, target, stream, first, last, bytes_per_s)

    def scatter(
        self, region: CudaRegion, block_indices: Indices, source: Places, stream: Stream, *, first: int = 0, last: int | None = None, bytes_per_s: float = 0.0
    ) -> None:
        """See `Copies` and `gather`."""
        self._queue(self._kernels.scatter, region, block_indices, source, stream, first, last, bytes_per_s)

    def _queue(
        self, move: Any, region: CudaRegion, block_indices: Indices, places: Places, stream: Stream, first: int, last: int | None, bytes_per_s: float
    ) -> None:
        check_move(region, block_indices, places, first, region.payload_bytes if last is None else last)
        count = len(block_indices)
        if not count:
            return
        planes = _planes(region)
        table = self._table()
        assert table is not None and _table_bytes(region, count) <= TABLE_BYTES
        ends = np.cumsum([planes.nbytes, 8 * count, 4 * count, count]).tolist()
        filled = table.host.bytes[: ends[3]]
        filled[: ends[0]] = planes.view(np.uint8)
        filled[ends[0] : ends[1]].view("<u8")[:] = places.offsets
        filled[ends[1] : ends[2]].view("<u4")[:] = block_indices
        filled[ends[2] :] = 1
        address = table.memory.address
        copy(address, filled.ctypes.data, filled.nbytes, stream)
        move(
            Region(address, len(planes), region.block_count, region.payload_bytes),
            Blocks(count, indices=address + ends[1], good=address + ends[2], offsets=address + ends[0]),
            Slots(places.address, places.stride_bytes),
            first=first,
            last=last,
            bytes_per_s=bytes_per_s or (COPY_BYTES_PER_S if places.on_device else HOST_COPY_BYTES_PER_S),
            stream=int(stream.handle),
        )

    def _table(self) -> _Table | None:
        """The thread's, made at its first call; None if that failed."""
        if not hasattr(self._local, "table"):
            try:
                self._local.table = _Table(self._device)
            except OSError as error:
                self._local.table = None
                print(f"mover: a thread goes without kernels: {error}", file=sys.stderr, flush=True)
        table: _Table | None = self._local.table
        return table


def _table_bytes(region: CudaRegion, count: int) -> int:
    return _planes(region).nbytes + _BLOCK_BYTES * count


@lru_cache(maxsize=256)
def _planes(region: CudaRegion) -> npt.NDArray[Any]:
    """Of a region; making it costs as much as the copy of a short slice."""
    return group_table(region.groups)

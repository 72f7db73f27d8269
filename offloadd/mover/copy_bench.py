"""How fast copies of one shape are, over memory of our own: engine memory is never read or written to find it out."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

import numpy as np

from offloadd.cuda.device import Device
from offloadd.cuda.memory import DeviceMemory, HostRegistration
from offloadd.cuda.region import CudaRegion, Indices, Places
from offloadd.cuda.sample import SAMPLE_BLOCKS_MAX, SAMPLE_BYTES, SAMPLE_EXTENT_BYTES
from offloadd.cuda.streams import Stream
from offloadd.memory.mapping import map_private
from offloadd.units import SECTOR_BYTES, align_up

#: Slots are whole sectors.
PLACES_BYTES = SAMPLE_BYTES + SAMPLE_BLOCKS_MAX * SECTOR_BYTES
#: Rounds whose shortest counts: others of the machine, and a mover's threads, only ever make one longer.
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """Moves that are made alike. `sample`: of `sample_of`, equal for regions of one shape. `out`: gather, else scatter. `on_device`: places on the GPU."""

    sample: CudaRegion
    out: bool
    on_device: bool

    @property
    def name(self) -> str:
        """For people."""
        return f"{'gather to' if self.out else 'scatter from'} {'the GPU' if self.on_device else 'the host'}"


#: Queue this move on this stream: a gather or scatter of some `Copies`.
Move = Callable[[CudaRegion, Indices, Places, Stream], None]


class CopyBench:
    """Some 26 MiB of a GPU and 5 MiB of page-locked host memory, held for the life of the mover: giving it back would wait for all work of the device."""

    def __init__(self, device: Device, copying: Callable[[], AbstractContextManager[Stream]]) -> None:
        """`copying`: the calling thread's stream, whose work has ended at the block's end. Raises OSError without the memory; nothing is held then."""
        self._copying = copying
        with ExitStack() as held:
            self._engine = DeviceMemory.allocate(device, SAMPLE_EXTENT_BYTES)
            held.callback(self._engine.close)
            self._slots = DeviceMemory.allocate(device, PLACES_BYTES)
            held.callback(self._slots.close)
            self._pages = map_private(align_up(PLACES_BYTES, SECTOR_BYTES))
            held.callback(self._pages.close)
            HostRegistration.register(device, self._pages.bytes.ctypes.data, self._pages.bytes.nbytes)
            held.pop_all()

    def move_of(self, case: Case) -> tuple[CudaRegion, Indices, Places]:
        """The sample laid over this memory, and its blocks in an order in which none are neighbours, as those of a used cache are."""
        groups = tuple(replace(group, offset_bytes=group.offset_bytes + self._engine.address) for group in case.sample.groups)
        count, stride = case.sample.block_count, align_up(case.sample.payload_bytes, SECTOR_BYTES)
        address = self._slots.address if case.on_device else self._pages.bytes.ctypes.data
        places = Places(address, PLACES_BYTES, np.arange(count) * stride, stride, on_device=case.on_device)
        return CudaRegion(groups, count, case.sample.payload_bytes), np.arange(count, dtype=np.uint32)[::-1], places

    def rates(self, case: Case, moves: Sequence[Move]) -> list[float]:
        """Payload bytes a second of each, queuing and waiting included: that is what a slice pays. In turn, after a round that does not count."""
        arguments = self.move_of(case)
        best = [float("inf")] * len(moves)
        for number in range(ROUNDS + 1):
            for index, move in enumerate(moves):
                begin = time.perf_counter()
                with self._copying() as stream:
                    move(*arguments, stream)
                if number:
                    best[index] = min(best[index], time.perf_counter() - begin)
        return [case.sample.payload_bytes * case.sample.block_count / seconds for seconds in best]

"""Copies between engine memory and memory of ours that is not page-locked: through page-locked memory of the calling thread's.

What a driver makes of a copy whose memory is being page-locked meanwhile, or is so in part, is nowhere said. So it never sees such memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.memory.mapping import Bytes
from offloadd.transfer.gather import Payloads
from offloadd.units import align_up

Indices = npt.NDArray[Any]
#: `MappedRegion.gather` or `MappedRegion.scatter`: to or from page-locked memory.
Copy = Callable[[Indices, Payloads, int, int], None]

#: `gather_through` or `scatter_through`.
Through = Callable[[Bytes, Copy, Indices, Payloads, int, int], None]

#: Places in the page-locked memory begin at multiples of it, as slots do for the widest vectors of a kernel.
_ALIGNMENT_BYTES = 256


def gather_through(scratch: Bytes, gather: Copy, block_indices: Indices, target: Payloads, first: int, last: int) -> None:
    """Payload bytes `first` to `last` of each block to its place."""
    for chosen, begin, end in _steps(len(block_indices), first, last, scratch.nbytes):
        places = _places(scratch, block_indices[chosen], end - begin)
        gather(block_indices[chosen], places, begin, end)
        for ours, theirs in _pairs(places, target, chosen, begin - first, end - begin):
            np.copyto(theirs, ours)


def scatter_through(scratch: Bytes, scatter: Copy, block_indices: Indices, source: Payloads, first: int, last: int) -> None:
    """Payload bytes `first` to `last` of each block from its place."""
    for chosen, begin, end in _steps(len(block_indices), first, last, scratch.nbytes):
        places = _places(scratch, block_indices[chosen], end - begin)
        for ours, theirs in _pairs(places, source, chosen, begin - first, end - begin):
            np.copyto(ours, theirs)
        scatter(block_indices[chosen], places, begin, end)


def _steps(count: int, first: int, last: int, room_bytes: int) -> Iterator[tuple[slice, int, int]]:
    """Blocks, and which bytes of theirs: as many whole ones as there is room for, or pieces of one."""
    together = room_bytes // align_up(last - first, _ALIGNMENT_BYTES)
    if together:
        yield from ((slice(number, number + together), first, last) for number in range(0, count, together))
        return
    for number in range(count):
        yield from ((slice(number, number + 1), begin, min(begin + room_bytes, last)) for begin in range(first, last, room_bytes))


def _places(scratch: Bytes, block_indices: Indices, size_bytes: int) -> Payloads:
    stride = align_up(size_bytes, _ALIGNMENT_BYTES)
    return Payloads(scratch, np.arange(len(block_indices), dtype=np.int64) * stride, stride)


def _pairs(places: Payloads, others: Payloads, chosen: slice, shift_bytes: int, size_bytes: int) -> Iterator[tuple[Bytes, Bytes]]:
    for place, offset in zip(places.offsets.tolist(), others.offsets[chosen].tolist(), strict=True):
        at = int(offset) + shift_bytes
        yield places.buffer[place : place + size_bytes], others.buffer[at : at + size_bytes]

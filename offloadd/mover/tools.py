"""What a worker thread works with, and the copies between a slice's blocks and memory of ours."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from offloadd.memory.mapping import Bytes
from offloadd.model.enums import Reason
from offloadd.mover.arena import Arena
from offloadd.mover.device import Bench, EventNotOpenedError, MappedRegion, MoverDevice
from offloadd.mover.engine_memory import EngineMemory
from offloadd.mover.messages import LaneAnswer, Operation
from offloadd.mover.slices import Slice
from offloadd.mover.volume import Volume
from offloadd.transfer.checksum import crc32c
from offloadd.transfer.gather import Checks, Payloads

Indices = npt.NDArray[np.intp]


class Memories:
    """The memories that all lanes share, and the device that engines' lie in. `arena` is None until it is mapped. `settle`: see `EngineMemory`."""

    def __init__(self, device: MoverDevice, settle: Callable[[], None] = lambda: None) -> None:
        self.device = device
        self.engine = EngineMemory(settle)
        self.arena: Arena | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """One thread's tools in a lane that goes by `path`. `bench` is its own; `volume` and `bench` are None in the arena's lane.

    `send` raises OSError when the front is gone.
    """

    memories: Memories
    path: str
    bench: Bench | None
    volume: Volume | None
    send: Callable[[LaneAnswer], None]

    @property
    def staging(self) -> Bytes:
        """The thread's staging slot in memory of the host; ValueError for a volume job in the arena's lane."""
        if self.bench is None:
            raise ValueError("a volume job came to a lane without staging slots")
        return self.bench.bytes

    def the_volume(self) -> Volume:
        """The lane's volume; ValueError for a volume job in the arena's lane."""
        if self.volume is None:
            raise ValueError("a volume job came to a lane without a volume")
        return self.volume

    def read(self, piece: Slice, buffers: list[Bytes], offset: int) -> None:
        """Fill all buffers from the volume in one I/O of the slice. Raises as `Volume.read`."""
        piece.spent_on_io(self.the_volume().read(buffers, offset, lambda: self.called_off(piece)))

    def write(self, piece: Slice, buffers: list[Bytes], offset: int) -> None:
        """Write all buffers to the volume in one I/O of the slice. Raises as `Volume.write`."""
        piece.spent_on_io(self.the_volume().write(buffers, offset, lambda: self.called_off(piece), durable=piece.job.durable))

    def called_off(self, piece: Slice) -> Reason:
        """Why no I/O of the slice may begin any more; NONE if one may. An evict that was to be copied only is written however late: it may have been answered
        STORED at its COPIED. One that was not is fenced."""
        if piece.expired() and (piece.operation != Operation.EVICT or piece.job.durable):
            return Reason.DEADLINE
        return Reason.CANCELLED if self.memories.engine.fenced(piece.job.move) else Reason.NONE

    def the_arena(self) -> Arena:
        """The arena; ValueError when it is not mapped."""
        if self.memories.arena is None:
            raise ValueError("an arena job came before the arena was mapped")
        return self.memories.arena


Regions = dict[int, MappedRegion]


def may_begin(engine: EngineMemory, pieces: Sequence[Slice]) -> bool:
    """Whether the slices of a job need not wait (any more): the engine's event or flag has come, or their own end has (deadline, fence), or it can't be told.

    Holds the region only while it asks: behind an engine that never comes, neither a fence nor an unmap may wait.
    """
    first = pieces[0]
    if not first.job.after_event or first.expired():
        return True
    try:
        with engine.borrow(first.job.move, first.regions) as regions:
            return regions is None or all(region.has_come(first.job.after_event) for region in regions.values())
    except (EventNotOpenedError, OSError, ValueError) as error:
        for piece in pieces:
            piece.failure = error
        return True


def gather_blocks(piece: Slice, regions: Regions, target: Payloads, first: int = 0, last: int | None = None, *, checks: Checks | None = None) -> None:
    """Copy payload bytes `first` to `last` (default: all) of every block to its place. `checks`: one a block; only if all regions can.

    Raises ValueError for a block that its region does not have.
    """
    for region, mine in by_region(piece, regions, np.arange(len(piece.records))):
        places = replace(target, offsets=target.offsets[mine])
        with _part(checks, mine) as part:
            region.gather(piece.records["block_index"][mine], places, first, last, part)


def scatter_blocks(
    piece: Slice, regions: Regions, source: Payloads, chosen: Indices, first: int = 0, last: int | None = None, *, checks: Checks | None = None
) -> None:
    """Copy payload bytes `first` to `last` (default: all) of the chosen blocks from their places. `checks`: one a chosen block; only if all regions can.

    Raises ValueError for a block that its region does not have.
    """
    for region, mine in by_region(piece, regions, chosen):
        places = replace(source, offsets=source.offsets[mine])
        with _part(checks, np.searchsorted(chosen, mine)) as part:
            region.scatter(piece.records["block_index"][mine], places, first, last, part)


@contextmanager
def _part(checks: Checks | None, mine: Indices) -> Iterator[Checks | None]:
    """The checks of some blocks, in their order; what is found in them at the end is entered into the whole."""
    if checks is None or mine.size == checks.count:
        yield checks
        return
    part = Checks(checks.checksums[mine], None if checks.expected is None else checks.expected[mine])
    yield part
    checks.checksums[mine] = part.checksums
    checks.spent_ns += part.spent_ns


def by_region(piece: Slice, regions: Regions, chosen: Indices) -> list[tuple[MappedRegion, Indices]]:
    """The chosen blocks, region by region. Raises ValueError for a block whose length is not that of its region."""
    pairs = []
    for number, region in regions.items():
        mine = chosen if len(regions) == 1 else chosen[piece.records["region"][chosen] == number]
        strange = np.flatnonzero(piece.records["payload_bytes"][mine] != region.payload_bytes)
        if strange.size:
            announced = int(piece.records["payload_bytes"][mine[strange[0]]])
            raise ValueError(f"a block of region {number} has payload_bytes {announced}; the region's blocks have {region.payload_bytes}")
        pairs.append((region, mine))
    return pairs


def differs_in_engine(piece: Slice, regions: Regions, index: int, ours: Bytes, first: int = 0, last: int | None = None) -> bool:
    """Whether payload bytes `first` to `last` of a block differ, where they lie in engine memory, from `ours`."""
    record = piece.records[index]
    return regions[int(record["region"])].block_crc(int(record["block_index"]), first, last) != crc32c(ours)

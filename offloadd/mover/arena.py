"""The arena as a mover sees it: one shared mapping, each part of it on a NUMA node, populated in the background."""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from offloadd.errors import InvalidRequest
from offloadd.memory.mapping import MADV_HUGEPAGE, MADV_POPULATE_WRITE, Bytes, Mapping, map_memories
from offloadd.memory.topology import UNKNOWN_NODE
from offloadd.model.slots import Records
from offloadd.mover.messages import ArenaPart
from offloadd.units import GIB, MIB, SECTOR_BYTES, align_up

#: A step long enough to be cheap and short enough that the kernel's lock on the mappings is given up in between.
POPULATE_STEP_BYTES = 64 * MIB
#: What is page-locked by one call at most, as far as slabs allow: the call holds locks of the driver and of the process until all of its pages are there.
CHUNK_BYTES_MAX = GIB


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of the arena that is page-locked as a whole. It holds whole slabs, so no slot lies in two."""

    node: int
    offset_bytes: int
    size_bytes: int


class Arena:
    """Slots in it begin at multiples of 4 KiB and are as long as their payload, rounded up to whole sectors."""

    def __init__(self, mapping: Mapping, chunks: tuple[Chunk, ...]) -> None:
        self._mapping = mapping
        #: All of the arena, in its order.
        self.chunks = chunks

    @property
    def bytes(self) -> Bytes:
        """All of it, as uint8."""
        return self._mapping.bytes

    def check(self, records: Records) -> None:
        """Raise ValueError unless every block's slot lies inside the arena at a multiple of 4 KiB."""
        if (records["arena_offset"] % SECTOR_BYTES).any():
            raise ValueError(f"an arena offset is not a multiple of {SECTOR_BYTES}")
        end = max(int(offset) + align_up(int(size), SECTOR_BYTES) for offset, size in zip(records["arena_offset"], records["payload_bytes"], strict=True))
        if end > self.bytes.size:
            raise ValueError(f"an arena slot ends at byte {end}; the arena has {self.bytes.size}")

    def slot(self, offset: int, payload_bytes: int) -> Bytes:
        """One slot's bytes, padding included."""
        return self.bytes[offset : offset + align_up(payload_bytes, SECTOR_BYTES)]

    def populate(self) -> None:
        """Have every page present. Best effort: a kernel that does not know the request leaves the faults to the copies."""
        size = self.bytes.size
        for offset in range(0, size, POPULATE_STEP_BYTES):
            if not self._mapping.advise(MADV_POPULATE_WRITE, offset, min(POPULATE_STEP_BYTES, size - offset)):
                return


def map_arena(fd: int, arena_bytes: int, *, huge_pages: bool, slab_bytes: int = CHUNK_BYTES_MAX, parts: Sequence[ArenaPart] = ()) -> Arena:
    """Map the arena, have the pages of each part come from its node, and begin to populate it in a thread of its own. Raises OSError, InvalidRequest."""
    chunks = cut_chunks(arena_bytes, slab_bytes, parts)
    mapping = map_memories([fd], [arena_bytes])
    if huge_pages:
        mapping.advise(MADV_HUGEPAGE)
    # Before the first page is there: those that are would stay where they are.
    _place(mapping, parts)
    arena = Arena(mapping, chunks)
    threading.Thread(target=arena.populate, name="arena-populate", daemon=True).start()
    return arena


def cut_chunks(arena_bytes: int, slab_bytes: int, parts: Sequence[ArenaPart]) -> tuple[Chunk, ...]:
    """The arena in chunks of whole slabs, each on one node. Raises InvalidRequest if the parts are not the whole arena, or cut a slab."""
    whole = sum(part.size_bytes for part in parts)
    if parts and (whole != arena_bytes or any(part.size_bytes < 1 or part.size_bytes % slab_bytes for part in parts)):
        sizes = ", ".join(str(part.size_bytes) for part in parts)
        raise InvalidRequest(f"the arena's parts have {sizes} bytes; together they must have {arena_bytes}, and each whole slabs of {slab_bytes}")
    chunk_bytes = max(1, CHUNK_BYTES_MAX // slab_bytes) * slab_bytes
    chunks: list[Chunk] = []
    start = 0
    for part in parts or (ArenaPart(UNKNOWN_NODE, arena_bytes),):
        stop = start + part.size_bytes
        chunks += [Chunk(part.node, offset, min(chunk_bytes, stop - offset)) for offset in range(start, stop, chunk_bytes)]
        start = stop
    return tuple(chunks)


def _place(mapping: Mapping, parts: Sequence[ArenaPart]) -> None:
    start = 0
    refusals = []
    for part in parts:
        refusals.append(mapping.prefer_node(part.node, start, part.size_bytes))
        start += part.size_bytes
    if why := "; ".join(filter(None, refusals)):
        print(f"mover: parts of the arena may lie on other NUMA nodes than they should: {why}", file=sys.stderr, flush=True)

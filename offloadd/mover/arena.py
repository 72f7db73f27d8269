"""The arena as a mover sees it: one shared mapping, populated in the background."""

import threading

from offloadd.memory.mapping import MADV_HUGEPAGE, MADV_POPULATE_WRITE, Bytes, Mapping, map_memories
from offloadd.model.slots import Records
from offloadd.units import MIB, SECTOR_BYTES, align_up

#: A step long enough to be cheap and short enough that the kernel's lock on the mappings is given up in between.
POPULATE_STEP_BYTES = 64 * MIB


class Arena:
    """Slots in it begin at multiples of 4 KiB and are as long as their payload, rounded up to whole sectors."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping

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


def map_arena(fd: int, arena_bytes: int, *, huge_pages: bool) -> Arena:
    """Map the arena and begin to populate it in a thread of its own. Raises OSError."""
    mapping = map_memories([fd], [arena_bytes])
    if huge_pages:
        mapping.advise(MADV_HUGEPAGE)
    arena = Arena(mapping)
    threading.Thread(target=arena.populate, name="arena-populate", daemon=True).start()
    return arena

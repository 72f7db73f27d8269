"""One slab of a tier: its state, and which row of the index each of its slots holds.

What a search over all slabs looks at lies in columns: a 30 TB volume has 30,000 slabs, and a request can't walk as many objects.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint32]

#: In `Slab.rows`: nothing here / handed out, its block not published yet. Otherwise the row of the block index.
FREE = 0
RESERVED = 0xFFFFFFFF


class SlabState(IntEnum):
    """See the drawing at the top of `pool`."""

    UNCUT = 0
    PREPARING = 1
    OPEN = 2
    CLOSING = 3
    CLOSED = 4
    SCANNING = 5


class SlabColumns:
    """One value a slab, by slab index. `slot_bytes` is 0 for a slab that is not cut."""

    __slots__ = ("free_count", "node", "reserved_count", "shunned_until", "slot_bytes", "slot_count", "state", "used_tick")

    def __init__(self, slab_count: int) -> None:
        self.state = np.zeros(slab_count, dtype=np.uint8)
        self.slot_bytes = np.zeros(slab_count, dtype=np.int64)
        self.slot_count = np.zeros(slab_count, dtype=np.int64)
        self.free_count = np.zeros(slab_count, dtype=np.int64)
        self.reserved_count = np.zeros(slab_count, dtype=np.int64)
        #: NUMA node whose memory the slab lies in; all of them 0 where there is nothing to choose.
        self.node = np.zeros(slab_count, dtype=np.int16)
        #: Tick of the last use: the measure of coldness between slot sizes.
        self.used_tick = np.zeros(slab_count, dtype=np.int64)
        #: Tick before which nobody asks again to open it.
        self.shunned_until = np.zeros(slab_count, dtype=np.int64)

    def cut_as(self, slot_bytes: int) -> npt.NDArray[np.bool_]:
        """Which slabs are cut into slots of this size."""
        return np.asarray(self.slot_bytes == slot_bytes)


@dataclass(slots=True, eq=False)
class Slab:
    """One slab. `generations[slot]` is the last generation handed out; it rises with each use of the slot."""

    index: int
    columns: SlabColumns = field(repr=False)
    nonce: bytes = b""
    rows: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.uint32), repr=False)
    generations: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.uint32), repr=False)
    #: Where the search for free slots and the CLOCK hand go on.
    cursor: int = 0
    hand: int = 0

    def cut(self, *, slot_bytes: int, slot_count: int, nonce: bytes) -> None:
        """Forget every slot and start with equal free ones."""
        self.columns.slot_bytes[self.index] = slot_bytes
        self.columns.slot_count[self.index] = slot_count
        self.columns.shunned_until[self.index] = 0
        self.free_count = slot_count
        self.reserved_count = 0
        self.nonce = nonce
        self.rows = np.zeros(slot_count, dtype=np.uint32)
        self.generations = np.zeros(slot_count, dtype=np.uint32)
        self.cursor = 0
        self.hand = 0

    def uncut(self) -> None:
        """It has no slots any more."""
        self.cut(slot_bytes=0, slot_count=0, nonce=b"")
        self.state = SlabState.UNCUT

    @property
    def state(self) -> SlabState:
        """Where it is in its life."""
        return SlabState(self.columns.state[self.index])

    @state.setter
    def state(self, state: SlabState) -> None:
        self.columns.state[self.index] = state

    @property
    def slot_bytes(self) -> int:
        """Size of its slots, 0 while it is not cut."""
        return int(self.columns.slot_bytes[self.index])

    @property
    def slot_count(self) -> int:
        """How many slots it has."""
        return int(self.columns.slot_count[self.index])

    @property
    def node(self) -> int:
        """NUMA node whose memory it lies in."""
        return int(self.columns.node[self.index])

    @property
    def free_count(self) -> int:
        """Slots that hold nothing."""
        return int(self.columns.free_count[self.index])

    @free_count.setter
    def free_count(self, count: int) -> None:
        self.columns.free_count[self.index] = count

    @property
    def reserved_count(self) -> int:
        """Slots that are handed out and not published yet."""
        return int(self.columns.reserved_count[self.index])

    @reserved_count.setter
    def reserved_count(self, count: int) -> None:
        self.columns.reserved_count[self.index] = count

    @property
    def used_tick(self) -> int:
        """Tick of the last use."""
        return int(self.columns.used_tick[self.index])

    @used_tick.setter
    def used_tick(self, tick: int) -> None:
        self.columns.used_tick[self.index] = tick

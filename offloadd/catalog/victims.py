"""Which blocks lose their slots: a search over the slabs of one slot size by CLOCK, in slot order.

Neighbours were written by one request, age together, and are reclaimed together, which keeps allocations contiguous. Each node has a CLOCK hand of its own.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from offloadd.catalog.reservation import Shortage
from offloadd.catalog.ring import Ring
from offloadd.catalog.slab import FREE, RESERVED, Rows, Slab, SlabColumns, SlabState

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
#: Takes these slots of a slab, whose blocks lose them.
Take = Callable[[Slab, Rows], None]

#: Slots that the CLOCK hand looks at in one vectorised step, and steps in one sweep beside those
#: that twice the slots wanted take: bounds the pause where most blocks are kept or in use (0.5 ms).
CLOCK_WINDOW = 512
CLOCK_STEPS_MAX = 16
#: Sweeps in one reservation after the first one, each over one slab that is known to hold something to reclaim.
SWEEPS_MAX = 8
#: Slabs that are looked into before all rows are gone through: 20 µs each against 3 to 9 ms at a million blocks.
NEAR_SLABS = 16
#: In place of a node: none is nearer than another.
ANY_NODE = -1
#: A remote slab that was left alone so many times as long as the coldest local one is reclaimed first. 1 would send half of all evicts to the other node where
#: both are equally busy; without an end, the memory of a node whose GPUs are idle would be lost to the others.
REMOTE_AGE_RATIO = 4


class VictimSearch:
    """The search of one pool. See `Pool` for `protected`, `reclaimable` and `referenced`; `rings` by slot size and node, the pool's own; `wish`: have the slab
    opened."""

    def __init__(
        self,
        *,
        columns: SlabColumns,
        slabs: Sequence[Slab],
        rings: Mapping[tuple[int, int], Ring],
        nodes: tuple[int, ...],
        protected: Callable[[Rows], Mask],
        reclaimable: Callable[[], Counts],
        referenced: npt.NDArray[np.uint8],
        wish: Callable[[Slab], None],
    ) -> None:
        self._columns = columns
        self._slabs = slabs
        self._rings = rings
        self._nodes = nodes
        self._protected = protected
        self._reclaimable = reclaimable
        self._referenced = referenced
        self._wish = wish
        self._tick = 0

    def find(self, slot_bytes: int, count: int, node: int, tick: int, take: Take) -> tuple[int, Shortage]:
        """Take up to `count` victims' slots, near ones first; how many. Fewer: a slab must be opened first, or nothing more may be reclaimed (FULL)."""
        self._tick = tick
        got = 0
        #: Those in which the hand and a look around it did not find enough, and there may be more.
        unsure: list[Ring] = []
        for ring in self._rings_of(slot_bytes, node):
            more, shortage = self._sweep(ring, count - got, take, steps=CLOCK_STEPS_MAX + 2 * count // CLOCK_WINDOW)
            got += more
            if shortage is None:
                # The hand found too little in the slots that it may pass in one go: look where there is something, be it warm. Nearly always that is in one
                # of the next slabs.
                more, shortage = self._search_in(self._near(ring), ring, count - got, take)
                got += more
                unsure.append(ring)
            if shortage != Shortage.FULL:
                return got, shortage
        more, shortage = self._search(unsure, count - got, take)
        return got + more, shortage

    def _rings_of(self, slot_bytes: int, node: int) -> list[Ring]:
        """The rings of this slot size in the order in which they are swept: the node's own first; else those whose hands are at the coldest slabs."""
        if not self._nodes:
            ring = self._rings.get((slot_bytes, 0))
            return [] if ring is None else [ring]
        rings = [ring for (size, _), ring in self._rings.items() if size == slot_bytes]
        if node in self._nodes and len(rings) > 1:
            node = self._node_to_reclaim_from(slot_bytes, node)
        return sorted(rings, key=lambda ring: (ring.at_hand.node != node, ring.at_hand.used_tick))

    def _node_to_reclaim_from(self, slot_bytes: int, node: int) -> int:
        """The node asked for, unless a slab elsewhere is much colder than every slab there."""
        columns = self._columns
        mine = columns.cut_as(slot_bytes)
        local, remote = np.flatnonzero(mine & (columns.node == node)), np.flatnonzero(mine & (columns.node != node))
        if not local.shape[0] or not remote.shape[0]:
            return node
        coldest = self._slabs[int(remote[np.argmin(columns.used_tick[remote])])]
        local_age = self._tick - int(columns.used_tick[local].min())
        if self._tick - coldest.used_tick <= REMOTE_AGE_RATIO * max(1, local_age):
            return node
        if self._protected(live_rows(coldest)).all():
            # What must stay is in use: the next reservation looks at another slab.
            coldest.used_tick = self._tick
            return node
        return coldest.node

    def _search(self, rings: Sequence[Ring], count: int, take: Take) -> tuple[int, Shortage]:
        """Only where the next slabs hold nothing are all rows gone through, and then few of them may be reclaimed."""
        got = 0
        if not rings:
            return 0, Shortage.FULL
        by_slab = self._reclaimable()
        for ring in rings:
            usable = set(np.flatnonzero((by_slab > 0) & self._columns.cut_as(ring.at_hand.slot_bytes) & self._reachable()).tolist())
            more, shortage = self._search_in(usable, ring, count - got, take)
            got += more
            if shortage != Shortage.FULL:
                return got, shortage
        return got, Shortage.FULL

    def _near(self, ring: Ring) -> set[int]:
        """Those of the next slabs that hold something that may be reclaimed, by index."""
        reachable = self._reachable()
        return {slab.index for slab in ring.next(NEAR_SLABS) if reachable[slab.index] and not self._protected(live_rows(slab)).all()}

    def _search_in(self, usable: set[int], ring: Ring, count: int, take: Take) -> tuple[int, Shortage]:
        got = 0
        for _ in range(SWEEPS_MAX):
            slab = ring.jump(usable)
            if slab is None:
                return got, Shortage.FULL
            usable.discard(slab.index)
            live = live_rows(slab)
            self._referenced[live[~self._protected(live)]] = 0
            more, shortage = self._sweep(ring, count - got, take, steps=-(-slab.slot_count // CLOCK_WINDOW))
            got += more
            if shortage is not None and shortage != Shortage.FULL:
                return got, shortage
        return got, Shortage.FULL

    def _reachable(self) -> Mask:
        """Slabs in which victims may be picked: open ones, and those that could be opened."""
        columns = self._columns
        return np.asarray((columns.state == SlabState.OPEN) | ((columns.state == SlabState.CLOSED) & (columns.shunned_until <= self._tick)))

    def _sweep(self, ring: Ring, count: int, take: Take, *, steps: int) -> tuple[int, Shortage | None]:
        """Advance the CLOCK hand until `count` victims are found, a slab must be opened, two turns found nothing more (FULL), or `steps` are over (None)."""
        got = 0
        # In the second turn everything is cold that may be reclaimed at all.
        mine = self._columns.cut_as(ring.at_hand.slot_bytes)
        if self._nodes:
            mine &= self._columns.node == ring.at_hand.node
        slots_left = 2 * int(self._columns.slot_count[mine].sum()) + CLOCK_WINDOW
        for _ in range(steps):
            if slots_left <= 0:
                return got, Shortage.FULL
            slab = ring.at_hand
            state, slot_count = slab.state, slab.slot_count
            if state != SlabState.OPEN and (state != SlabState.CLOSED or self._columns.shunned_until[slab.index] > self._tick):
                slots_left -= slot_count - slab.hand
                ring.step()
                continue
            start = slab.hand
            stop = min(start + CLOCK_WINDOW, slot_count)
            window = slab.rows[start:stop]
            live = np.flatnonzero((window != FREE) & (window != RESERVED))
            rows = window[live]
            reclaimable = ~self._protected(rows)
            cold = reclaimable & (self._referenced[rows] == 0)
            found = live[cold][: count - got]
            if found.shape[0] and state == SlabState.CLOSED:
                self._wish(slab)
                return got, Shortage.OPENING
            # The hand stops behind the last victim, so that what lies beyond keeps its second chance for the next call.
            passed = int(found[-1]) + 1 if found.shape[0] == count - got else stop - start
            self._referenced[rows[reclaimable & (live < passed)]] = 0
            slab.hand = start + passed
            slots_left -= passed
            if found.shape[0]:
                take(slab, (found + start).astype(np.uint32))
                got += found.shape[0]
            if slab.hand >= slot_count:
                ring.step()
            if got == count:
                return got, Shortage.NONE
        return got, None


def live_rows(slab: Slab) -> Rows:
    """The rows of a slab's blocks."""
    rows: Rows = slab.rows[(slab.rows != FREE) & (slab.rows != RESERVED)]
    return rows

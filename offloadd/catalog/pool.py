"""The slots of one tier: slabs cut into equal slots, which are free, and which block is reclaimed next.

A slab's life (arena slabs skip the keeper: `instant`):

    UNCUT ──want cut──▶ PREPARING ──ready──▶ OPEN ──close──▶ CLOSING ──closed──▶ CLOSED ──want open──▶ PREPARING
      ▲                     │ failed                                                │
      └─────────────────────┘            SCANNING ──recovered──▶ OPEN (dirty) or CLOSED

Only OPEN slabs are written, so only they have to be scanned after a crash. Victims are found by CLOCK (`victims`); between slot sizes the coldest slab decides,
by the tick of its last use.

The slabs of an arena may lie on several NUMA nodes. Who names a node gets, in this order: free slots there, free slots elsewhere, victims' slots there,
victims' elsewhere: a remote slot costs time, a victim that need not have gone costs its block.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.catalog.reservation import Reservation, Shortage, Wish
from offloadd.catalog.ring import Ring
from offloadd.catalog.slab import FREE, RESERVED, Rows, Slab, SlabColumns, SlabState
from offloadd.catalog.victims import ANY_NODE, VictimSearch

__all__ = ["Pool", "Reservation", "Shortage", "Slab", "SlabState", "Wish"]

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

#: Cold slabs of other sizes that one reservation looks at before it gives up: bounds the pause when all of them are kept.
RECUT_CANDIDATES = 16
#: Ticks for which a slab that could not be opened is left alone: a sick one must not have every evict wait for it.
SHUN_TICKS = 64


class Pool:
    """Slots of one tier. Pure; owned by the event-loop thread.

    `protected(rows) -> mask` tells which rows may not lose their slot here; `reclaimable() -> counts` how many may, by slab: a pass over all rows, asked for
    only where the hand finds none nearby. `referenced` is a uint8 column by row: set by use, cleared by the passing hand.
    `slot_count_for(slot_bytes)` tells how many slots a slab yields. `instant`: slabs are cut without asking anybody (the arena). `nodes`: the NUMA node of each
    slab, for an arena that lies on several.
    """

    def __init__(
        self,
        *,
        slab_count: int,
        slot_count_for: Callable[[int], int],
        protected: Callable[[Rows], Mask],
        reclaimable: Callable[[], Counts],
        referenced: npt.NDArray[np.uint8],
        open_slabs_max: int,
        instant: bool = False,
        nodes: Sequence[int] = (),
    ) -> None:
        assert instant or not nodes, "slabs that a keeper cuts have no node"
        self._columns = SlabColumns(slab_count)
        #: Nodes that slabs lie on, where there are several.
        self.nodes: tuple[int, ...] = tuple(sorted(set(nodes))) if len(set(nodes)) > 1 else ()
        if self.nodes:
            self._columns.node[:] = nodes
        self.slabs = [Slab(index, self._columns) for index in range(slab_count)]
        self._slot_count_for = slot_count_for
        self._protected = protected
        self._open_slabs_max = open_slabs_max
        self._instant = instant
        #: By slot size and node.
        self._rings: dict[tuple[int, int], Ring] = {}
        #: Indexes of the slabs without slots, in the order in which they are cut: the nodes in turn.
        self._uncut = OrderedDict.fromkeys(_in_turn(self._columns.node))
        self._wishes: list[Wish] = []
        self._search = VictimSearch(
            columns=self._columns,
            slabs=self.slabs,
            rings=self._rings,
            nodes=self.nodes,
            protected=protected,
            reclaimable=reclaimable,
            referenced=referenced,
            wish=lambda slab: self._wish(slab, 0),
        )
        self._tick = 0
        self.used_slots = 0
        self.used_bytes = 0

    # -- handing out -----------------------------------------------------------------------------------------------------------------

    def reserve(self, slot_bytes: int, count: int, node: int = ANY_NODE) -> Reservation:
        """Hand out up to `count` slots of `slot_bytes`: free ones first, then victims'; those on `node` first. Each is published or abandoned exactly once.

        Fewer come back when a slab must be opened first (look at `take_wishes`) or nothing may be reclaimed; `shortage` tells which.
        """
        self._tick += 1
        taken: list[tuple[Slab, Rows]] = []
        victims: list[Rows] = []
        missing = count
        shortage = Shortage.NONE
        if node in self.nodes:
            missing -= self._take_local(slot_bytes, missing, taken, node)
        while missing > 0:
            missing -= self._take_free(slot_bytes, missing, taken)
            if missing == 0:
                break
            grown, shortage = self._grow(slot_bytes, victims, node)
            if grown:
                continue
            if shortage == Shortage.NONE:
                got, shortage = self._take_victims(slot_bytes, missing, taken, victims, node)
                missing -= got
            if shortage != Shortage.NONE:
                break
        self._look_ahead(slot_bytes)
        return self._reservation(taken, victims, shortage if missing else Shortage.NONE)

    def _reservation(self, taken: list[tuple[Slab, Rows]], victims: list[Rows], shortage: Shortage) -> Reservation:
        slabs, generations = [], []
        for slab, slots in taken:
            slab.used_tick = self._tick
            slab.generations[slots] += 1
            slabs.append(np.full(slots.shape[0], slab.index, dtype=np.uint32))
            generations.append(slab.generations[slots])
        return Reservation(
            slabs=_join(slabs),
            slots=_join([slots for _, slots in taken]),
            generations=_join(generations),
            victims=_join(victims),
            shortage=shortage,
        )

    def _take_local(self, slot_bytes: int, count: int, taken: list[tuple[Slab, Rows]], node: int) -> int:
        """Free slots of a node's slabs, those that are not cut yet included."""
        columns = self._columns
        got = self._take_free(slot_bytes, count, taken, node)
        while got < count and self._slot_count_for(slot_bytes) > 0:
            uncut = np.flatnonzero((columns.state == SlabState.UNCUT) & (columns.node == node))
            if not uncut.shape[0]:
                break
            slab = self.slabs[uncut[0]]
            del self._uncut[slab.index]
            self._cut(slab, slot_bytes)
            got += self._take_free(slot_bytes, count - got, taken, node)
        return got

    def _take_free(self, slot_bytes: int, count: int, taken: list[tuple[Slab, Rows]], node: int = ANY_NODE) -> int:
        columns = self._columns
        got = 0
        usable = columns.cut_as(slot_bytes) & (columns.state == SlabState.OPEN) & (columns.free_count > 0)
        if node != ANY_NODE:
            usable &= columns.node == node
        for index in np.flatnonzero(usable):
            slab = self.slabs[index]
            free = np.flatnonzero(slab.rows == FREE).astype(np.uint32)
            # Next-fit from the cursor, so that one request's slots are neighbours and travel in one I/O.
            start = int(np.searchsorted(free, slab.cursor))
            chosen = np.concatenate((free[start:], free[:start]))[: count - got]
            self._mark_reserved(slab, chosen)
            slab.free_count -= chosen.shape[0]
            slab.cursor = (int(chosen[-1]) + 1) % slab.slot_count
            taken.append((slab, chosen))
            got += chosen.shape[0]
            if got == count:
                break
        return got

    def _mark_reserved(self, slab: Slab, slots: Rows) -> None:
        slab.rows[slots] = RESERVED
        slab.reserved_count += slots.shape[0]
        self.used_slots += slots.shape[0]
        self.used_bytes += slots.shape[0] * slab.slot_bytes

    def _grow(self, slot_bytes: int, victims: list[Rows], node: int) -> tuple[bool, Shortage]:
        """Try to get room without picking victims one by one. (True, NONE): look for free slots again."""
        if self._slot_count_for(slot_bytes) < 1:
            return False, Shortage.TOO_LARGE
        columns = self._columns
        mine = columns.cut_as(slot_bytes)
        if (mine & (columns.state == SlabState.PREPARING)).any():
            return False, Shortage.OPENING
        # A closed slab with an eighth of its slots free is room that costs one sector write; fewer are left for the CLOCK hand to find.
        if self._open_roomiest(mine, columns.slot_count >> 3):
            return False, Shortage.OPENING
        if self._uncut:
            return self._cut(self._next_uncut(), slot_bytes)
        coldest = self._coldest_foreign(mine, node)
        if coldest is None:
            return False, Shortage.NONE
        victims.append(self._empty(coldest))
        return self._cut(coldest, slot_bytes)

    def _open_roomiest(self, mine: Mask, free_min: Counts) -> bool:
        """Ask for the closed slab with the most free slots, if one has at least `free_min` and one."""
        columns = self._columns
        roomy = mine & (columns.state == SlabState.CLOSED) & (columns.free_count >= np.maximum(free_min, 1)) & (columns.shunned_until <= self._tick)
        if not roomy.any():
            return False
        self._wish(self.slabs[int(np.argmax(np.where(roomy, columns.free_count, -1)))], 0)
        return True

    def _next_uncut(self) -> Slab:
        return self.slabs[self._uncut.popitem(last=False)[0]]

    def _cut(self, slab: Slab, slot_bytes: int) -> tuple[bool, Shortage]:
        slab.cut(slot_bytes=slot_bytes, slot_count=self._slot_count_for(slot_bytes), nonce=b"")
        self._rings.setdefault((slot_bytes, slab.node), Ring()).add(slab)
        if self._instant:
            slab.state = SlabState.OPEN
            slab.used_tick = self._tick
            return True, Shortage.NONE
        self._wish(slab, slot_bytes)
        return False, Shortage.OPENING

    def _wish(self, slab: Slab, slot_bytes: int) -> None:
        slab.state = SlabState.PREPARING
        slab.used_tick = self._tick
        self._wishes.append(Wish(slab.index, slot_bytes))

    def _coldest_foreign(self, mine: Mask, node: int) -> Slab | None:
        """The slab of another slot size to re-cut: colder than every slab of this size, and with nothing in it that must stay; on this node if one is."""
        columns = self._columns
        foreign = ~mine & ((columns.state == SlabState.OPEN) | (columns.state == SlabState.CLOSED)) & (columns.reserved_count == 0)
        if mine.any():
            foreign &= columns.used_tick < columns.used_tick[mine].min()
        candidates = np.flatnonzero(foreign)
        if candidates.shape[0] > RECUT_CANDIDATES:
            candidates = candidates[np.argpartition(columns.used_tick[candidates], RECUT_CANDIDATES)[:RECUT_CANDIDATES]]
        order: list[int] = candidates[np.lexsort((columns.used_tick[candidates], columns.node[candidates] != node))].tolist()
        for index in order:
            slab = self.slabs[index]
            if not np.any(self._protected(slab.rows[slab.rows != FREE])):
                return slab
            # What must stay is in use: the next reservation looks at other slabs, or a few old keeps would hide all the cold ones behind them.
            slab.used_tick = self._tick
        return None

    def _empty(self, slab: Slab) -> Rows:
        """The slab has no slots any more; returns the rows that it held."""
        rows: Rows = slab.rows[slab.rows != FREE]
        self.used_slots -= rows.shape[0]
        self.used_bytes -= rows.shape[0] * slab.slot_bytes
        name = (slab.slot_bytes, slab.node)
        self._rings[name].remove(slab)
        if not self._rings[name]:
            del self._rings[name]
        slab.uncut()
        return rows

    # -- reclaiming ------------------------------------------------------------------------------------------------------------------

    def _take_victims(self, slot_bytes: int, count: int, taken: list[tuple[Slab, Rows]], victims: list[Rows], node: int = ANY_NODE) -> tuple[int, Shortage]:
        """Reclaim up to `count` slots, near ones first. Fewer: a slab must be opened first, or nothing may be reclaimed."""

        def take(slab: Slab, slots: Rows) -> None:
            victims.append(slab.rows[slots])
            self.used_slots -= slots.shape[0]
            self.used_bytes -= slots.shape[0] * slab.slot_bytes
            self._mark_reserved(slab, slots)
            taken.append((slab, slots))

        got, shortage = self._search.find(slot_bytes, count, node, self._tick, take)
        if shortage != Shortage.FULL:
            return got, shortage
        mine = self._columns.cut_as(slot_bytes)
        # The free slots of closed slabs that are else full of what must stay.
        if mine.any() and self._open_roomiest(mine, np.zeros(1, dtype=np.int64)):
            return got, Shortage.OPENING
        # A slab that a keeper works on may have room when it is done: no reason to refuse anybody yet.
        busy = np.isin(self._columns.state, (SlabState.PREPARING, SlabState.CLOSING, SlabState.SCANNING))
        return got, Shortage.OPENING if busy.any() else Shortage.FULL

    def _look_ahead(self, slot_bytes: int) -> None:
        """Ask for the next slab while a quarter of one is still free, so that evicts seldom wait for a keeper."""
        if self._instant or not self._uncut:
            return
        columns = self._columns
        mine = columns.cut_as(slot_bytes)
        if not mine.any() or (mine & (columns.state == SlabState.PREPARING)).any():
            return
        free = int(columns.free_count[mine & (columns.state == SlabState.OPEN)].sum())
        if free * 4 < self._slot_count_for(slot_bytes):
            self._cut(self._next_uncut(), slot_bytes)

    def prepare(self, slot_bytes: int) -> None:
        """Ask for a first slab of this size if there is none and one is uncut: called when a region is registered, before its first evict."""
        if not self._instant and self._uncut and (slot_bytes, 0) not in self._rings and self._slot_count_for(slot_bytes) > 0:
            self._cut(self._next_uncut(), slot_bytes)

    # -- taking back -----------------------------------------------------------------------------------------------------------------

    def publish(self, slabs: Rows, slots: Rows, rows: Rows) -> None:
        """Reserved slots now hold the blocks of these rows."""
        for slab, chosen, index in self._by_slab(slabs, slots):
            assert (slab.rows[chosen] == RESERVED).all(), "publishing a slot that is not reserved"
            slab.rows[chosen] = rows[index]
            slab.reserved_count -= chosen.shape[0]

    def free(self, slabs: Rows, slots: Rows) -> None:
        """Reserved or published slots are empty again."""
        for slab, chosen, _ in self._by_slab(slabs, slots):
            old = slab.rows[chosen]
            assert (old != FREE).all(), "freeing a free slot"
            slab.reserved_count -= int((old == RESERVED).sum())
            slab.rows[chosen] = FREE
            slab.free_count += chosen.shape[0]
            self.used_slots -= chosen.shape[0]
            self.used_bytes -= chosen.shape[0] * slab.slot_bytes

    def touch(self, slabs: Rows) -> None:
        """These slabs were used now."""
        self._tick += 1
        self._columns.used_tick[slabs] = self._tick

    def _by_slab(self, slabs: Rows, slots: Rows) -> list[tuple[Slab, Rows, npt.NDArray[np.intp]]]:
        if slabs.shape[0] == 0:
            return []
        # One sort instead of a pass for each slab: the blocks of a dropped namespace lie in many.
        order = np.argsort(slabs, kind="stable")
        indexes, firsts = np.unique(slabs[order], return_index=True)
        stops = [*firsts[1:].tolist(), slabs.shape[0]]
        parts = []
        for index, first, stop in zip(indexes.tolist(), firsts.tolist(), stops, strict=True):
            where = order[first:stop]
            parts.append((self.slabs[index], slots[where], where))
        return parts

    def reclaim(self, slot_bytes: int, count: int) -> Rows:
        """Free the slots of up to `count` blocks, of this slot size if there are any, as `reserve` would pick them; returns their rows.

        For an index that is full though the tier is not: the blocks used least must go all the same.
        """
        self._tick += 1
        taken: list[tuple[Slab, Rows]] = []
        victims: list[Rows] = []
        got = 0
        sizes = dict.fromkeys(size for size, _ in self._rings)
        for size in [slot_bytes] if slot_bytes in sizes else list(sizes):
            got += self._take_victims(size, count - got, taken, victims)[0]
            if got == count:
                break
        for slab, slots in taken:
            self.free(np.full(slots.shape[0], slab.index, dtype=np.uint32), slots)
        return _join(victims)

    @property
    def reserved_count(self) -> int:
        """Slots handed out whose blocks are not published yet."""
        return int(self._columns.reserved_count.sum())

    # -- what the owner of the slabs says --------------------------------------------------------------------------------------------

    def take_wishes(self) -> list[Wish]:
        """The slabs to cut or open since the last call."""
        wishes, self._wishes = self._wishes, []
        return wishes

    def ready(self, slab_index: int, nonce: bytes) -> None:
        """The keeper has cut or opened the slab."""
        slab = self.slabs[slab_index]
        assert slab.state == SlabState.PREPARING, slab.state
        slab.state = SlabState.OPEN
        slab.nonce = nonce

    def failed(self, slab_index: int, *, cut: bool) -> None:
        """The keeper could not cut or open the slab. One that could not be cut is uncut again, last in turn; one that could not be opened stays closed, and
        is left alone for a while.
        """
        slab = self.slabs[slab_index]
        assert slab.state == SlabState.PREPARING, slab.state
        if not cut:
            slab.state = SlabState.CLOSED
            self._columns.shunned_until[slab_index] = self._tick + SHUN_TICKS
            return
        self._empty(slab)
        self._uncut[slab_index] = None

    def adopt(self, slab_index: int, *, slot_bytes: int, slot_count: int, nonce: bytes) -> None:
        """A slab found on the volume; unusable until `recovered`."""
        slab = self.slabs[slab_index]
        del self._uncut[slab_index]
        slab.cut(slot_bytes=slot_bytes, slot_count=slot_count, nonce=nonce)
        slab.state = SlabState.SCANNING
        slab.used_tick = 0
        self._rings.setdefault((slot_bytes, slab.node), Ring()).add(slab)

    def recover(self, slab_index: int, slots: Rows, rows: Rows) -> None:
        """Slots of a scanned slab hold these rows."""
        slab = self.slabs[slab_index]
        assert slab.state == SlabState.SCANNING, slab.state
        assert (slab.rows[slots] == FREE).all(), "recovering a slot that was told already"
        slab.rows[slots] = rows
        slab.free_count -= slots.shape[0]
        self.used_slots += slots.shape[0]
        self.used_bytes += slots.shape[0] * slab.slot_bytes

    def recovered(self, slab_index: int, *, dirty: bool) -> None:
        """The slab has been told whole. A dirty one is open already: its dirty bit stands on the volume."""
        self.slabs[slab_index].state = SlabState.OPEN if dirty else SlabState.CLOSED

    def next_to_close(self) -> Slab | None:
        """The slab to close when more than `open_slabs_max` are open: the one unused longest that has no write in flight and no free slots, if any."""
        opened = self.open_slabs()
        if self._instant or len(opened) <= self._open_slabs_max:
            return None
        idle = [slab for slab in opened if slab.reserved_count == 0]
        return min(idle, key=lambda slab: (slab.free_count * 4 >= slab.slot_count, slab.used_tick), default=None)

    def closing(self, slab: Slab) -> None:
        """No slot of it is handed out until `closed`."""
        assert slab.state == SlabState.OPEN and slab.reserved_count == 0
        slab.state = SlabState.CLOSING

    def closed(self, slab_index: int, *, clean: bool) -> None:
        """The keeper wrote the summary (clean), or failed to. Then the volume may say that it is dirty, or clean: it is opened again before it is written to,
        and left alone for a while."""
        slab = self.slabs[slab_index]
        assert slab.state == SlabState.CLOSING, slab.state
        slab.state = SlabState.CLOSED
        if not clean:
            self._columns.shunned_until[slab_index] = self._tick + SHUN_TICKS

    def open_slabs(self) -> list[Slab]:
        """Slabs that would be scanned after a crash."""
        return [self.slabs[index] for index in np.flatnonzero(self._columns.state == SlabState.OPEN)]

    @property
    def cut_count(self) -> int:
        """Slabs that are cut into slots."""
        return len(self.slabs) - len(self._uncut)

    def bytes_by_node(self) -> list[tuple[int, int, int]]:
        """(node, slabs, bytes in slots that hold blocks) of each of `nodes`."""
        columns = self._columns
        used = (columns.slot_count - columns.free_count) * columns.slot_bytes
        return [(node, int((columns.node == node).sum()), int(used[columns.node == node].sum())) for node in self.nodes]

    def remote_count(self, slabs: Rows, node: int) -> int:
        """How many of these slots' slabs lie on another node than this one, where there is a choice."""
        return int((self._columns.node[slabs] != node).sum()) if node in self.nodes else 0

    @property
    def bytes_allocated(self) -> int:
        """Memory of the per-slot arrays."""
        return sum(slab.rows.nbytes + slab.generations.nbytes for slab in self.slabs)

    def check(self) -> None:
        """Assert every invariant."""
        used = used_bytes = 0
        for slab in self.slabs:
            if slab.state == SlabState.UNCUT:
                assert slab.index in self._uncut and slab.slot_bytes == 0
                continue
            assert slab.index not in self._uncut and slab in self._rings[slab.slot_bytes, slab.node]
            assert slab.rows.shape[0] == slab.slot_count and slab.hand < slab.slot_count
            assert slab.reserved_count == 0 or slab.state == SlabState.OPEN, "a slot is to be written in a slab that is not open"
            assert slab.free_count == int((slab.rows == FREE).sum())
            assert slab.reserved_count == int((slab.rows == RESERVED).sum())
            used += slab.slot_count - slab.free_count
            used_bytes += (slab.slot_count - slab.free_count) * slab.slot_bytes
        assert used == self.used_slots and used_bytes == self.used_bytes, (used, self.used_slots)
        assert sum(len(ring) for ring in self._rings.values()) == self.cut_count


def _in_turn(nodes: npt.NDArray[np.int16]) -> list[int]:
    """Indexes of all slabs, one of each node in turn."""
    turns = np.zeros(nodes.shape[0], dtype=np.int64)
    for node in np.unique(nodes):
        turns[nodes == node] = np.arange(int((nodes == node).sum()))
    order: list[int] = np.argsort(turns, kind="stable").tolist()
    return order


def _join(parts: list[Any]) -> Rows:
    if not parts:
        return np.zeros(0, dtype=np.uint32)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

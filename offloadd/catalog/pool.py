"""The slots of one tier: slabs cut into equal slots, which are free, and which block is reclaimed next.

A slab's life (arena slabs skip the keeper: `instant`):

    UNCUT ──want cut──▶ PREPARING ──ready──▶ OPEN ──close──▶ CLOSING ──closed──▶ CLOSED ──want open──▶ PREPARING
      ▲                     │ failed                                                │
      └─────────────────────┘            SCANNING ──recovered──▶ OPEN (dirty) or CLOSED

Only OPEN slabs are written, so only they have to be scanned after a crash. Victims are picked by CLOCK in slot order: neighbours were written by one request,
age together, and are reclaimed together, which keeps allocations contiguous. Between slot sizes the coldest slab decides, by the tick of its last use.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]

#: In `Slab.rows`: nothing here / handed out, its block not published yet. Otherwise the row of the block index.
FREE = 0
RESERVED = 0xFFFFFFFF

#: Slots that the CLOCK hand looks at in one vectorised step.
CLOCK_WINDOW = 512
#: Cold slabs of other sizes that one reservation looks at before it gives up: bounds the pause when all of them are kept.
RECUT_CANDIDATES = 16


class SlabState(IntEnum):
    """See the drawing at the top of the module."""

    UNCUT = 0
    PREPARING = 1
    OPEN = 2
    CLOSING = 3
    CLOSED = 4
    SCANNING = 5


@dataclass(slots=True)
class Slab:
    """One slab. `generations[slot]` is the last generation handed out; it rises with each use of the slot."""

    index: int
    state: SlabState = SlabState.UNCUT
    slot_bytes: int = 0
    slot_count: int = 0
    nonce: bytes = b""
    rows: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.uint32))
    generations: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.uint32))
    free_count: int = 0
    reserved_count: int = 0
    #: Where the search for free slots and the CLOCK hand go on.
    cursor: int = 0
    hand: int = 0
    #: Tick of the last use: the measure of coldness between slot sizes.
    used_tick: int = 0

    def cut(self, *, slot_bytes: int, slot_count: int, nonce: bytes) -> None:
        """Forget every slot and start with equal free ones."""
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self.nonce = nonce
        self.rows = np.zeros(slot_count, dtype=np.uint32)
        self.generations = np.zeros(slot_count, dtype=np.uint32)
        self.free_count = slot_count
        self.reserved_count = 0
        self.cursor = 0
        self.hand = 0


class Shortage(IntEnum):
    """Why a reservation got fewer slots than asked for."""

    NONE = 0
    #: A slab is being opened or cut; ask again when it is ready.
    OPENING = 1
    #: Nothing may be reclaimed.
    FULL = 2
    #: No slab can hold a slot of this size.
    TOO_LARGE = 3


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots handed out, equal-length arrays, in allocation order; and the rows whose blocks lost their slot for it."""

    slabs: Rows
    slots: Rows
    generations: Rows
    victims: Rows
    shortage: Shortage

    def __len__(self) -> int:
        return int(self.slabs.shape[0])


@dataclass(frozen=True, slots=True)
class Wish:
    """What the owner of the slabs is asked to do: cut (slot_bytes > 0) or open the slab."""

    slab: int
    slot_bytes: int


class Pool:
    """Slots of one tier. Pure; owned by the event-loop thread.

    `protected(rows) -> mask` tells which rows may not lose their slot here. `referenced` is a uint8 column by row: set by use, cleared by the passing hand.
    `slot_count_for(slot_bytes)` tells how many slots a slab yields. `instant`: slabs are cut without asking anybody (the arena).
    """

    def __init__(
        self,
        *,
        slab_count: int,
        slot_count_for: Callable[[int], int],
        protected: Callable[[Rows], Mask],
        referenced: npt.NDArray[np.uint8],
        open_slabs_max: int,
        instant: bool = False,
    ) -> None:
        self.slabs = [Slab(index) for index in range(slab_count)]
        self._slot_count_for = slot_count_for
        self._protected = protected
        self._referenced = referenced
        self._open_slabs_max = open_slabs_max
        self._instant = instant
        #: Slabs by slot size, in the order in which the CLOCK hand visits them.
        self._rings: dict[int, list[Slab]] = {}
        self._ring_hands: dict[int, int] = {}
        self._uncut = list(range(slab_count - 1, -1, -1))
        self._wishes: list[Wish] = []
        self._tick = 0
        self.used_slots = 0
        self.used_bytes = 0

    # -- handing out -----------------------------------------------------------------------------------------------------------------

    def reserve(self, slot_bytes: int, count: int) -> Reservation:
        """Hand out up to `count` slots of `slot_bytes`: free ones first, then victims'. Every slot handed out is published or abandoned exactly once.

        Fewer come back when a slab must be opened first (look at `take_wishes`) or nothing may be reclaimed; `shortage` tells which.
        """
        self._tick += 1
        taken: list[tuple[Slab, Rows]] = []
        victims: list[Rows] = []
        missing = count
        shortage = Shortage.NONE
        while missing > 0:
            missing -= self._take_free(slot_bytes, missing, taken)
            if missing == 0:
                break
            grown, shortage = self._grow(slot_bytes, victims)
            if grown:
                continue
            if shortage == Shortage.NONE:
                got, shortage = self._take_victims(slot_bytes, missing, taken, victims)
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

    def _take_free(self, slot_bytes: int, count: int, taken: list[tuple[Slab, Rows]]) -> int:
        got = 0
        for slab in self._rings.get(slot_bytes, ()):
            if slab.state != SlabState.OPEN or slab.free_count == 0:
                continue
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

    def _grow(self, slot_bytes: int, victims: list[Rows]) -> tuple[bool, Shortage]:
        """Try to get room without picking victims one by one. (True, NONE): look for free slots again."""
        if self._slot_count_for(slot_bytes) < 1:
            return False, Shortage.TOO_LARGE
        ring = self._rings.get(slot_bytes, [])
        if any(slab.state == SlabState.PREPARING for slab in ring):
            return False, Shortage.OPENING
        # A closed slab with an eighth of its slots free is room that costs one sector write; fewer are left for the CLOCK hand to find.
        roomy = [slab for slab in ring if slab.state == SlabState.CLOSED and slab.free_count * 8 >= slab.slot_count]
        if roomy:
            self._wish(max(roomy, key=lambda slab: slab.free_count), 0)
            return False, Shortage.OPENING
        if self._uncut:
            return self._cut(self.slabs[self._uncut.pop()], slot_bytes)
        coldest = self._coldest_foreign(slot_bytes, ring)
        if coldest is None:
            return False, Shortage.NONE
        victims.append(self._empty(coldest))
        return self._cut(coldest, slot_bytes)

    def _cut(self, slab: Slab, slot_bytes: int) -> tuple[bool, Shortage]:
        self._rings.setdefault(slot_bytes, []).append(slab)
        slab.cut(slot_bytes=slot_bytes, slot_count=self._slot_count_for(slot_bytes), nonce=b"")
        if self._instant:
            slab.state = SlabState.OPEN
            return True, Shortage.NONE
        self._wish(slab, slot_bytes)
        return False, Shortage.OPENING

    def _wish(self, slab: Slab, slot_bytes: int) -> None:
        slab.state = SlabState.PREPARING
        slab.used_tick = self._tick
        self._wishes.append(Wish(slab.index, slot_bytes))

    def _coldest_foreign(self, slot_bytes: int, ring: list[Slab]) -> Slab | None:
        """The slab of another slot size to re-cut: colder than every slab of this size, and with nothing in it that must stay."""
        own = min((slab.used_tick for slab in ring), default=self._tick)
        foreign = [
            slab
            for size, slabs in self._rings.items()
            if size != slot_bytes
            for slab in slabs
            if slab.state in (SlabState.OPEN, SlabState.CLOSED) and slab.reserved_count == 0 and (not ring or slab.used_tick < own)
        ]
        for slab in sorted(foreign, key=lambda slab: slab.used_tick)[:RECUT_CANDIDATES]:
            rows = slab.rows[slab.rows != FREE]
            if not self._protected(rows).any():
                return slab
        return None

    def _empty(self, slab: Slab) -> Rows:
        rows: Rows = slab.rows[slab.rows != FREE]
        self.used_slots -= rows.shape[0]
        self.used_bytes -= rows.shape[0] * slab.slot_bytes
        self._rings[slab.slot_bytes].remove(slab)
        if not self._rings[slab.slot_bytes]:
            del self._rings[slab.slot_bytes]
        slab.state = SlabState.UNCUT
        return rows

    def _take_victims(self, slot_bytes: int, count: int, taken: list[tuple[Slab, Rows]], victims: list[Rows]) -> tuple[int, Shortage]:
        """Advance the CLOCK hand until `count` victims are found, a slab must be opened, or two turns found nothing more."""
        ring = self._rings.get(slot_bytes, [])
        if not ring:
            return 0, Shortage.FULL
        got = 0
        slots_left = 2 * sum(slab.slot_count for slab in ring) + CLOCK_WINDOW
        while slots_left > 0:
            position = self._ring_hands.get(slot_bytes, 0) % len(ring)
            slab = ring[position]
            if slab.state not in (SlabState.OPEN, SlabState.CLOSED) or slab.hand >= slab.slot_count:
                slots_left -= max(0, slab.slot_count - slab.hand)
                slab.hand = 0
                self._ring_hands[slot_bytes] = position + 1
                slots_left -= 1
                continue
            start = slab.hand
            stop = min(start + CLOCK_WINDOW, slab.slot_count)
            window = slab.rows[start:stop]
            live = np.flatnonzero((window != FREE) & (window != RESERVED))
            rows = window[live]
            reclaimable = ~self._protected(rows)
            cold = reclaimable & (self._referenced[rows] == 0)
            found = live[cold][: count - got]
            if found.shape[0] and slab.state == SlabState.CLOSED:
                self._wish(slab, 0)
                return got, Shortage.OPENING
            # The hand stops behind the last victim, so that what lies beyond keeps its second chance for the next call.
            passed = int(found[-1]) + 1 if found.shape[0] == count - got else stop - start
            self._referenced[rows[reclaimable & (live < passed)]] = 0
            slab.hand = start + passed
            slots_left -= passed
            if found.shape[0]:
                slots = (found + start).astype(np.uint32)
                victims.append(slab.rows[slots].copy())
                self.used_slots -= slots.shape[0]
                self.used_bytes -= slots.shape[0] * slab.slot_bytes
                self._mark_reserved(slab, slots)
                taken.append((slab, slots))
                got += slots.shape[0]
                if got == count:
                    return got, Shortage.NONE
        if any(slab.state in (SlabState.PREPARING, SlabState.CLOSING) for slab in ring):
            return got, Shortage.OPENING
        return got, Shortage.FULL

    def _look_ahead(self, slot_bytes: int) -> None:
        """Ask for the next slab while a quarter of one is still free, so that evicts seldom wait for a keeper."""
        if self._instant or not self._uncut:
            return
        ring = self._rings.get(slot_bytes, [])
        if not ring or any(slab.state == SlabState.PREPARING for slab in ring):
            return
        free = sum(slab.free_count for slab in ring if slab.state == SlabState.OPEN)
        if free * 4 < ring[0].slot_count:
            self._cut(self.slabs[self._uncut.pop()], slot_bytes)

    def prepare(self, slot_bytes: int) -> None:
        """Ask for a first slab of this size if there is none and one is uncut: called when a region is registered, before its first evict."""
        if not self._instant and self._uncut and slot_bytes not in self._rings and self._slot_count_for(slot_bytes) > 0:
            self._cut(self.slabs[self._uncut.pop()], slot_bytes)

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
        for index in np.unique(slabs):
            self.slabs[index].used_tick = self._tick

    def _by_slab(self, slabs: Rows, slots: Rows) -> list[tuple[Slab, Rows, npt.NDArray[np.intp]]]:
        parts = []
        for index in np.unique(slabs):
            where = np.flatnonzero(slabs == index)
            parts.append((self.slabs[int(index)], slots[where], where))
        return parts

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
        """The keeper could not cut or open the slab. One that could not be cut is uncut again, last in turn; one that could not be opened stays closed."""
        slab = self.slabs[slab_index]
        assert slab.state == SlabState.PREPARING, slab.state
        if not cut:
            slab.state = SlabState.CLOSED
            return
        self._empty(slab)
        self._uncut.insert(0, slab_index)

    def adopt(self, slab_index: int, *, slot_bytes: int, slot_count: int, nonce: bytes) -> None:
        """A slab found on the volume; unusable until `recovered`."""
        slab = self.slabs[slab_index]
        self._uncut.remove(slab_index)
        slab.cut(slot_bytes=slot_bytes, slot_count=slot_count, nonce=nonce)
        slab.state = SlabState.SCANNING
        self._rings.setdefault(slot_bytes, []).append(slab)
        slab.used_tick = 0

    def recover(self, slab_index: int, slots: Rows, rows: Rows) -> None:
        """Slots of a scanned slab hold these rows."""
        slab = self.slabs[slab_index]
        assert slab.state == SlabState.SCANNING, slab.state
        slab.rows[slots] = rows
        slab.free_count -= slots.shape[0]
        self.used_slots += slots.shape[0]
        self.used_bytes += slots.shape[0] * slab.slot_bytes

    def recovered(self, slab_index: int, *, dirty: bool) -> None:
        """The slab has been told whole. A dirty one is open already: its dirty bit stands on the volume."""
        self.slabs[slab_index].state = SlabState.OPEN if dirty else SlabState.CLOSED

    def next_to_close(self) -> Slab | None:
        """The slab to close when more than `open_slabs_max` are open: the one unused longest that has no write in flight and no free slots, if any."""
        opened = [slab for slab in self.slabs if slab.state == SlabState.OPEN]
        if self._instant or len(opened) <= self._open_slabs_max:
            return None
        idle = [slab for slab in opened if slab.reserved_count == 0]
        return min(idle, key=lambda slab: (slab.free_count * 4 >= slab.slot_count, slab.used_tick), default=None)

    def closing(self, slab: Slab) -> None:
        """No slot of it is handed out until `closed`."""
        assert slab.state == SlabState.OPEN and slab.reserved_count == 0
        slab.state = SlabState.CLOSING

    def closed(self, slab_index: int, *, clean: bool) -> None:
        """The keeper wrote the summary (clean), or failed to: then it is still dirty, thus open."""
        slab = self.slabs[slab_index]
        assert slab.state == SlabState.CLOSING, slab.state
        slab.state = SlabState.CLOSED if clean else SlabState.OPEN

    def open_slabs(self) -> list[Slab]:
        """Slabs that would be scanned after a crash."""
        return [slab for slab in self.slabs if slab.state == SlabState.OPEN]

    @property
    def cut_count(self) -> int:
        """Slabs that are cut into slots."""
        return len(self.slabs) - len(self._uncut)

    @property
    def bytes_allocated(self) -> int:
        """Memory of the per-slot arrays."""
        return sum(slab.rows.nbytes + slab.generations.nbytes for slab in self.slabs)

    def check(self) -> None:
        """Assert every invariant."""
        used = used_bytes = 0
        for slab in self.slabs:
            if slab.state == SlabState.UNCUT:
                assert slab.index in self._uncut
                continue
            assert slab in self._rings[slab.slot_bytes]
            assert slab.free_count == int((slab.rows == FREE).sum())
            assert slab.reserved_count == int((slab.rows == RESERVED).sum())
            used += slab.slot_count - slab.free_count
            used_bytes += (slab.slot_count - slab.free_count) * slab.slot_bytes
        assert used == self.used_slots and used_bytes == self.used_bytes, (used, self.used_slots)
        assert sum(len(ring) for ring in self._rings.values()) == self.cut_count


def _join(parts: list[Any]) -> Rows:
    if not parts:
        return np.zeros(0, dtype=np.uint32)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

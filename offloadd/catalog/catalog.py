"""Which block is where: a state machine without I/O, clocks or threads.

A block is a row of the index with up to two copies, one in the arena and one on a volume:

    (absent) ──publish──▶ resident ──reclaim, drop, data loss──▶ (absent)
                            │ pin / unpin: a move reads it; nothing of it is reclaimed meanwhile
                            └ doomed: dropped while pinned; invisible, and gone with its last pin

Whatever `reserve_*` hands out is published or freed exactly once; whatever `plan_restore` pins is unpinned exactly once. A block becomes visible when it is
published, after its bytes are in place, so a failed evict never is.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.catalog.holds import RECOVERED, Holds
from offloadd.catalog.index import BlockIndex
from offloadd.catalog.pool import Pool, Reservation
from offloadd.catalog.victims import ANY_NODE, Counts
from offloadd.model.enums import Tier
from offloadd.model.slots import FLAG_KEEP

Rows = npt.NDArray[np.uint32]
Keys = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

#: Bits of the `flags` column. FLAG_KEEP (1) is the slot header's bit.
FLAG_DURABLE = 2
FLAG_DOOMED = 4


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a restore reads each block: equal-length arrays in the order of the keys. `rows` is 0 for a block that is not there.

    `volume` is -1 where the arena copy is read.
    """

    rows: Rows
    volume: npt.NDArray[np.int16]
    slab: Rows
    slot: Rows
    payload_bytes: Rows
    checksum: Rows


class Catalog:
    """The state of all tiers. Owned by the event-loop thread.

    `capacity`: blocks in the index. `make_arena(protected, referenced)` and `make_volume` build the pools over the catalog's own columns.
    `on_event(stored, tier, keys)` hears of every copy that appears (True) or goes (False).
    """

    def __init__(self, *, capacity: int, on_event: Callable[[bool, Tier, Keys], None] | None = None) -> None:
        self.index = BlockIndex(capacity=capacity)
        self._arena_slab = self.index.column(np.uint32)
        self._arena_slot = self.index.column(np.uint32)
        #: 1: there is a copy in the arena.
        self._in_arena = self.index.column(np.uint8)
        #: 0: no copy on a volume, else 1 + its ordinal.
        self._volume = self.index.column(np.uint8)
        self._volume_slab = self.index.column(np.uint32)
        self._volume_slot = self.index.column(np.uint32)
        self._payload_bytes = self.index.column(np.uint32)
        self._checksum = self.index.column(np.uint32)
        self._namespace = self.index.column(np.uint16)
        self._flags = self.index.column(np.uint8)
        # As wide as it must be: a count that wrapped to 0 would give away a slot that is being read.
        self._pins = self.index.column(np.uint32)
        self._hold_counts = self.index.column(np.uint16)
        self._arena_referenced = self.index.column(np.uint8)
        self._volume_referenced = self.index.column(np.uint8)
        self.holds = Holds(self._hold_counts)
        #: Slots (volume, slab, slot) by row of copies that were replaced while a move read them: free with the row's last pin.
        self._retired: dict[int, tuple[int, int, int]] = {}
        self.arena: Pool | None = None
        self.volumes: list[Pool] = []
        self._on_event = on_event or (lambda stored, tier, keys: None)

    # -- tiers -----------------------------------------------------------------------------------------------------------------------

    def add_arena(self, *, slab_count: int, slot_count_for: Callable[[int], int], nodes: Sequence[int] = ()) -> Pool:
        """The arena: its slabs are cut at once. `nodes`: the NUMA node of each slab, where it lies on several."""
        self.arena = Pool(
            slab_count=slab_count,
            slot_count_for=slot_count_for,
            protected=self._arena_protected,
            reclaimable=lambda: self._reclaimable(self._in_arena > 0, self._arena_slab, slab_count, held=self._volume > 0),
            referenced=self._arena_referenced,
            open_slabs_max=slab_count,
            instant=True,
            nodes=nodes,
        )
        return self.arena

    def add_volume(self, *, slab_count: int, slot_count_for: Callable[[int], int], open_slabs_max: int) -> int:
        """A further volume; returns its ordinal."""
        ordinal = len(self.volumes)
        self.volumes.append(
            Pool(
                slab_count=slab_count,
                slot_count_for=slot_count_for,
                protected=self._volume_protected,
                reclaimable=lambda: self._reclaimable(self._volume == ordinal + 1, self._volume_slab, slab_count),
                referenced=self._volume_referenced,
                open_slabs_max=open_slabs_max,
            )
        )
        return ordinal

    def _arena_protected(self, rows: Rows) -> Mask:
        # A held block with a copy on a volume may lose the one in the arena: it can still be restored.
        protected: Mask = (self._pins[rows] > 0) | ((self._hold_counts[rows] > 0) & (self._volume[rows] == 0))
        return protected

    def _volume_protected(self, rows: Rows) -> Mask:
        protected: Mask = (self._pins[rows] > 0) | (self._hold_counts[rows] > 0)
        return protected

    def _reclaimable(self, present: Mask, slabs: Rows, slab_count: int, *, held: Mask | bool = False) -> Counts:
        """How many of the present rows may lose this copy, by slab; held ones only where `held`. A pass over all rows: 3 ms at a million."""
        rows = np.flatnonzero(present & (self._pins == 0) & ((self._hold_counts == 0) | held))
        return np.bincount(slabs[rows], minlength=slab_count).astype(np.int64, copy=False)

    # -- evict -----------------------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Keys) -> Rows:
        """Rows of the keys, 0 where there is no visible block."""
        rows: Rows = self.index.lookup(keys)
        doomed = (self._flags[rows] & FLAG_DOOMED) != 0
        if doomed.any():
            rows = np.where(doomed, 0, rows).astype(np.uint32)
        return rows

    def stored_as(self, rows: Rows, *, tier: Tier, durable: bool) -> Mask:
        """Which rows need not be stored again for this tier and durability (row 0: False)."""
        on_volume = (self._volume[rows] > 0) & (((self._flags[rows] & FLAG_DURABLE) != 0) | (not durable))
        in_arena = self._in_arena[rows] > 0
        if durable or tier == Tier.VOLUME:
            present = on_volume
        elif tier == Tier.ARENA:
            present = in_arena
        else:
            present = on_volume | in_arena
        return np.asarray(present & (rows > 0))

    def reserve_arena(self, slot_bytes: int, count: int, node: int = ANY_NODE) -> Reservation:
        """Slots in the arena, on this NUMA node first; the victims' arena copies are gone."""
        assert self.arena is not None
        if short := self._rows_short(count):
            self._lose_arena(self.arena.reclaim(slot_bytes, short))
        reservation = self.arena.reserve(slot_bytes, count, node)
        self._lose_arena(reservation.victims)
        return reservation

    def reserve_volume(self, volume: int, slot_bytes: int, count: int) -> Reservation:
        """Slots on a volume; the victims' volume copies are gone."""
        if short := self._rows_short(count):
            self._lose_volume(self.volumes[volume].reclaim(slot_bytes, short))
        reservation = self.volumes[volume].reserve(slot_bytes, count)
        self._lose_volume(reservation.victims)
        return reservation

    def _rows_short(self, count: int) -> int:
        """How many rows the index lacks for `count` more blocks beside those that are being written."""
        room = self.index.capacity - len(self.index)
        if room >= self.index.capacity >> 3 and room >= 2 * count:
            return 0
        pools = [*self.volumes, *([self.arena] if self.arena is not None else [])]
        return max(0, count - room + sum(pool.reserved_count for pool in pools))

    def publish_arena(self, keys: Keys, slabs: Rows, slots: Rows, checksums: Rows, *, payload_bytes: int, namespace: int, keep: bool) -> tuple[Rows, Mask]:
        """Blocks whose bytes are in these arena slots become visible. Returns their rows and which were there already (their slots are free again).

        Row 0: the index is full, or the namespace was dropped meanwhile; the slot is free again.
        """
        assert self.arena is not None
        rows, distinct = self._rows_for(keys, payload_bytes=payload_bytes, namespace=namespace, keep=keep)
        use = (rows > 0) & (self._in_arena[rows] == 0) & distinct
        self.arena.free(slabs[~use], slots[~use])
        chosen = rows[use]
        self._arena_slab[chosen] = slabs[use]
        self._arena_slot[chosen] = slots[use]
        self._in_arena[chosen] = 1
        self._checksum[chosen] = checksums[use]
        self.arena.publish(slabs[use], slots[use], chosen)
        if chosen.shape[0]:
            self._on_event(True, Tier.ARENA, keys[use])
        return rows, (rows > 0) & ~use

    def publish_volume(
        self, volume: int, keys: Keys, slabs: Rows, slots: Rows, *, payload_bytes: int, namespace: int, keep: bool, durable: bool
    ) -> tuple[Rows, Mask]:
        """As `publish_arena`; the checksum stands in the slot's own header. A durable copy takes the place of one not synced, even while it is read."""
        pool = self.volumes[volume]
        rows, distinct = self._rows_for(keys, payload_bytes=payload_bytes, namespace=namespace, keep=keep)
        absent = self._volume[rows] == 0
        replace = ~absent & ((self._flags[rows] & FLAG_DURABLE) == 0) & distinct & durable
        self._give_up_slots(rows[replace])
        use = (rows > 0) & ((absent & distinct) | replace)
        pool.free(slabs[~use], slots[~use])
        chosen = rows[use]
        self._volume[chosen] = volume + 1
        self._volume_slab[chosen] = slabs[use]
        self._volume_slot[chosen] = slots[use]
        if durable:
            self._flags[chosen] |= FLAG_DURABLE
        pool.publish(slabs[use], slots[use], chosen)
        if (use & absent).any():
            self._on_event(True, Tier.VOLUME, keys[use & absent])
        return rows, (rows > 0) & ~use

    def _give_up_slots(self, rows: Rows) -> None:
        """Another volume copy takes the place of these rows': free its slot, or leave that to the last pin."""
        busy = self._pins[rows] > 0
        self._free_volume_slots(rows[~busy])
        for row in rows[busy].tolist():
            self._retired[row] = (int(self._volume[row]) - 1, int(self._volume_slab[row]), int(self._volume_slot[row]))

    def _rows_for(self, keys: Keys, *, payload_bytes: int, namespace: int, keep: bool) -> tuple[Rows, Mask]:
        """Rows of the keys, new ones inserted; 0 for those that can't be (index full, doomed). And which keys stand there for the first time."""
        rows: Rows = self.index.lookup(keys).copy()
        distinct = _first_of_each(keys)
        fresh = np.flatnonzero((rows == 0) & distinct)[: self.index.capacity - len(self.index)]
        if fresh.shape[0]:
            inserted = self.index.insert(keys[fresh])
            self._payload_bytes[inserted] = payload_bytes
            self._namespace[inserted] = namespace
            self._flags[inserted] = 0
            rows[fresh] = inserted
        if not distinct.all():
            rows[~distinct] = self.index.lookup(keys[~distinct])
        rows[(self._flags[rows] & FLAG_DOOMED) != 0] = 0
        if keep:
            self._flags[rows[rows > 0]] |= FLAG_KEEP
        return rows, distinct

    def free_reserved(self, volume: int, slabs: Rows, slots: Rows) -> None:
        """Reserved slots whose move failed are empty again. `volume` -1: the arena."""
        pool = self.arena if volume < 0 else self.volumes[volume]
        assert pool is not None
        pool.free(slabs, slots)

    # -- restore ---------------------------------------------------------------------------------------------------------------------

    def plan_restore(self, keys: Keys, *, from_volume: bool = False, avoid: Collection[int] = ()) -> Sources:
        """Pin what is there and say where to read it: the arena copy if there is one, else the volume's; with `from_volume` the other way round, save of
        the volumes in `avoid`."""
        rows = self.lookup(keys)
        self.pin(rows)
        from_arena: Mask = self._in_arena[rows] > 0
        if from_volume:
            from_arena &= (self._volume[rows] == 0) | self._on_volumes(rows, avoid)
        return self._sources(rows, from_arena)

    def mark_used(self, sources: Sources) -> None:
        """These copies are being read: a second chance when the hand passes, and their slabs are warm. Not a part of `plan_restore`: no read waits for it."""
        rows = sources.rows
        live = rows > 0
        from_arena = live & (sources.volume < 0)
        self._arena_referenced[rows[from_arena]] = 1
        self._volume_referenced[rows[live & ~from_arena]] = 1
        if self.arena is not None and from_arena.any():
            self.arena.touch(sources.slab[from_arena])
        for volume, pool in enumerate(self.volumes):
            mine = live & (sources.volume == volume)
            if mine.any():
                pool.touch(sources.slab[mine])

    def volume_sources(self, rows: Rows) -> Sources:
        """The volume copies of pinned rows (row 0 where there is none): a second chance when the arena copy failed its checksum."""
        usable = np.where(self._volume[rows] > 0, rows, 0).astype(np.uint32)
        return self._sources(usable, np.zeros(rows.shape[0], dtype=np.bool_))

    def arena_sources(self, rows: Rows) -> Sources:
        """The arena copies of pinned rows (row 0 where there is none)."""
        usable = np.where(self._in_arena[rows] > 0, rows, 0).astype(np.uint32)
        return self._sources(usable, np.ones(rows.shape[0], dtype=np.bool_))

    def _sources(self, rows: Rows, from_arena: Mask) -> Sources:
        # Nearly always all are in one tier; and a restore of one block waits for every pass of this.
        if not from_arena.any():
            volume = self._volume[rows].astype(np.int16)
            volume -= 1
            return Sources(rows, volume, self._volume_slab[rows], self._volume_slot[rows], self._payload_bytes[rows], self._checksum[rows])
        return Sources(
            rows=rows,
            volume=np.where(from_arena, -1, self._volume[rows].astype(np.int16) - 1).astype(np.int16),
            slab=np.where(from_arena, self._arena_slab[rows], self._volume_slab[rows]).astype(np.uint32),
            slot=np.where(from_arena, self._arena_slot[rows], self._volume_slot[rows]).astype(np.uint32),
            payload_bytes=self._payload_bytes[rows],
            checksum=self._checksum[rows],
        )

    def pin(self, rows: Rows) -> None:
        """A move uses these rows (0 is ignored; a row may stand twice)."""
        np.add.at(self._pins, rows[rows > 0], 1)

    def unpin(self, rows: Rows) -> None:
        """The move is over; doomed rows without a pin go."""
        live = rows[rows > 0]
        assert (self._pins[live] > 0).all(), "unpinning a row that is not pinned"
        np.subtract.at(self._pins, live, 1)
        if self._retired:
            for row in set(live[self._pins[live] == 0].tolist()) & self._retired.keys():
                volume, slab, slot = self._retired.pop(row)
                self.volumes[volume].free(np.array([slab], dtype=np.uint32), np.array([slot], dtype=np.uint32))
        doomed = ((self._flags[live] & FLAG_DOOMED) != 0) & (self._pins[live] == 0)
        if doomed.any():
            self._delete(np.unique(live[doomed]))

    def lose(self, rows: Rows, *, volume: bool) -> None:
        """These copies turned out bad. While another move still pins the block all of it becomes invisible and goes later."""
        # Two moves may have found the same copy bad, and the block is gone with the first one's word or with the last pin.
        live = np.unique(rows[(self._volume[rows] if volume else self._in_arena[rows]) > 0])
        busy = self._pins[live] > 0
        self._flags[live[busy]] |= FLAG_DOOMED
        if volume:
            self._free_volume_slots(live[~busy])
            self._lose_volume(live[~busy])
        else:
            self._free_arena_slots(live[~busy])
            self._lose_arena(live[~busy])

    # -- going away ------------------------------------------------------------------------------------------------------------------

    def _lose_arena(self, rows: Rows) -> None:
        """The arena copies are gone (their slots are somebody else's already)."""
        if rows.shape[0] == 0:
            return
        self._on_event(False, Tier.ARENA, self.index.keys_of(rows))
        self._in_arena[rows] = 0
        self._arena_referenced[rows] = 0
        self._forget_absent(rows)

    def _lose_volume(self, rows: Rows) -> None:
        if rows.shape[0] == 0:
            return
        self._on_event(False, Tier.VOLUME, self.index.keys_of(rows))
        self._volume[rows] = 0
        self._volume_referenced[rows] = 0
        self._flags[rows] &= ~np.uint8(FLAG_DURABLE)
        self._forget_absent(rows)

    def _forget_absent(self, rows: Rows) -> None:
        absent = rows[(self._in_arena[rows] == 0) & (self._volume[rows] == 0)]
        if absent.shape[0]:
            self.holds.forget(absent)
            self._arena_referenced[absent] = 0
            self._volume_referenced[absent] = 0
            self._flags[absent] = 0
            self.index.delete(absent)

    def _free_arena_slots(self, rows: Rows) -> None:
        held = rows[self._in_arena[rows] > 0]
        if held.shape[0] and self.arena is not None:
            self.arena.free(self._arena_slab[held], self._arena_slot[held])

    def _free_volume_slots(self, rows: Rows) -> None:
        for volume in np.unique(self._volume[rows]):
            if volume:
                mine = rows[self._volume[rows] == volume]
                self.volumes[int(volume) - 1].free(self._volume_slab[mine], self._volume_slot[mine])

    def _delete(self, rows: Rows) -> None:
        in_arena, on_volume = rows[self._in_arena[rows] > 0], rows[self._volume[rows] > 0]
        self._free_arena_slots(in_arena)
        self._free_volume_slots(on_volume)
        if on_volume.shape[0]:
            self._on_event(False, Tier.VOLUME, self.index.keys_of(on_volume))
            self._volume[on_volume] = 0
        if in_arena.shape[0]:
            self._on_event(False, Tier.ARENA, self.index.keys_of(in_arena))
            self._in_arena[in_arena] = 0
        self._forget_absent(rows)

    def drop(self, rows: Rows) -> int:
        """Make blocks invisible now and free them as soon as no move pins them; returns how many."""
        live = np.unique(rows[rows > 0])
        self._flags[live] |= FLAG_DOOMED
        self._delete(live[self._pins[live] == 0])
        return int(live.shape[0])

    def rows_of_namespace(self, namespace: int) -> Rows:
        """Every visible row of a namespace."""
        present = (self._namespace == namespace) & ((self._in_arena > 0) | (self._volume > 0)) & ((self._flags & FLAG_DOOMED) == 0)
        return np.flatnonzero(present).astype(np.uint32)

    def drop_volume(self, volume: int, *, count_max: int = 4096) -> int:
        """A volume is gone: up to `count_max` of its copies are lost, pinned ones become invisible and go later. Returns how many; call it until it is 0."""
        there = (self._volume == volume + 1) & ((self._flags & FLAG_DOOMED) == 0)
        rows = np.flatnonzero(there)[:count_max].astype(np.uint32)
        self.lose(rows, volume=True)
        return int(rows.shape[0])

    # -- recovery and summaries ------------------------------------------------------------------------------------------------------

    def recover(
        self, volume: int, slab: int, slots: Rows, keys: Keys, *, payload_bytes: npt.NDArray[Any], namespaces: npt.NDArray[Any], kept: Mask, keep_until_s: float
    ) -> int:
        """Blocks found on a volume become visible; returns how many.

        A key that is there already keeps its first copy: both name the same content.
        """
        known = self.index.lookup(keys)
        doomed = (self._flags[known] & FLAG_DOOMED) != 0
        use = _first_of_each(keys) & (self._volume[known] == 0) & ~doomed
        fresh = np.flatnonzero(use & (known == 0))
        room = self.index.capacity - len(self.index)
        use[fresh[room:]] = False
        rows = known.copy()
        rows[fresh[:room]] = self.index.insert(keys[fresh[:room]])
        chosen = rows[use]
        self._volume[chosen] = volume + 1
        self._volume_slab[chosen] = slab
        self._volume_slot[chosen] = slots[use]
        self._payload_bytes[chosen] = payload_bytes[use]
        self._namespace[chosen] = namespaces[use]
        self._flags[chosen] = np.where(kept[use], FLAG_KEEP, 0) | FLAG_DURABLE
        self.volumes[volume].recover(slab, slots[use], chosen)
        # Whichever of its copies says so, the block is kept.
        held = np.unique(np.where(doomed, 0, self.index.lookup(keys))[kept]).astype(np.uint32)
        held = held[held > 0]
        if held.shape[0]:
            self.holds.hold(RECOVERED, held, keep_until_s)
        if chosen.shape[0]:
            self._on_event(True, Tier.VOLUME, keys[use])
        return int(chosen.shape[0])

    def describe(self, rows: Rows) -> tuple[Keys, Rows, npt.NDArray[np.uint16], Rows]:
        """Keys, payload bytes, namespaces and keep flags (0 or FLAG_KEEP, by present holds) of rows: what a slab's summary tells."""
        kept = np.where(self._hold_counts[rows] > 0, FLAG_KEEP, 0).astype(np.uint32)
        return self.index.keys_of(rows), self._payload_bytes[rows], self._namespace[rows], kept

    def arena_only(self, *, held: bool) -> Rows:
        """Rows whose only copy is in the arena (and that are held, if asked): what a drain spills."""
        alone = (self._in_arena > 0) & (self._volume == 0) & ((self._flags & FLAG_DOOMED) == 0)
        return np.flatnonzero(alone & ((self._hold_counts > 0) | (not held))).astype(np.uint32)

    def only_on(self, rows: Rows, volumes: Collection[int]) -> Mask:
        """Which rows have their only copy on one of these volumes."""
        only: Mask = (self._in_arena[rows] == 0) & self._on_volumes(rows, volumes)
        return only

    def _on_volumes(self, rows: Rows, volumes: Collection[int]) -> Mask:
        return np.isin(self._volume[rows], [volume + 1 for volume in volumes])

    def tiers_of(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Tier that a restore would read from, by row: 0 none, else a `Tier`."""
        tiers = np.where(self._in_arena[rows] > 0, int(Tier.ARENA), np.where(self._volume[rows] > 0, int(Tier.VOLUME), 0))
        return np.where(rows > 0, tiers, 0).astype(np.uint8)

    def touch(self, rows: Rows) -> None:
        """Somebody asked for these rows: a second chance when the hand passes."""
        live = rows[rows > 0]
        self._arena_referenced[live] = 1
        self._volume_referenced[live] = 1

    def payloads_of(self, rows: Rows) -> Rows:
        """Payload bytes by row (0 for row 0)."""
        return self._payload_bytes[rows]

    def namespaces_of(self, rows: Rows) -> npt.NDArray[np.uint16]:
        """Namespace numbers by row."""
        return self._namespace[rows]

    @property
    def block_count(self) -> int:
        """Blocks in the index."""
        return len(self.index)

    def bytes_per_block(self) -> float:
        """Index memory by block of capacity, the pools' per-slot arrays excluded."""
        return self.index.bytes_per_block()

    def check(self) -> None:
        """Assert every invariant: each copy's slot points back to its row, and each slot to a row with that copy."""
        self.index.check()
        self.holds.check()
        rows = np.flatnonzero((self._in_arena > 0) | (self._volume > 0)).astype(np.uint32)
        assert rows.shape[0] == len(self.index), (rows.shape[0], len(self.index))
        if self.arena is not None:
            self.arena.check()
            reserved = sum(slab.reserved_count for slab in self.arena.slabs)
            assert self.arena.used_slots == int((self._in_arena > 0).sum()) + reserved, "a slot of the arena has no row"
            for row in rows[self._in_arena[rows] > 0]:
                assert self.arena.slabs[self._arena_slab[row]].rows[self._arena_slot[row]] == row
        for volume, pool in enumerate(self.volumes):
            pool.check()
            reserved = sum(slab.reserved_count for slab in pool.slabs)
            retired = [(row, slab, slot) for row, (number, slab, slot) in self._retired.items() if number == volume]
            assert pool.used_slots == int((self._volume == volume + 1).sum()) + reserved + len(retired), "a slot of a volume has no row"
            for row, slab, slot in retired:
                assert self._pins[row] and pool.slabs[slab].rows[slot] == row
            for row in rows[self._volume[rows] == volume + 1]:
                assert pool.slabs[self._volume_slab[row]].rows[self._volume_slot[row]] == row
        absent = np.ones(self.index.capacity + 1, dtype=np.bool_)
        absent[rows] = False
        for column in (self._pins, self._hold_counts, self._flags, self._arena_referenced, self._volume_referenced):
            assert not column[absent].any(), "a row without a block carries something over"
        assert not ((self._flags & FLAG_DOOMED) != 0)[self._pins == 0].any(), "a doomed row without a pin is still there"


def _first_of_each(keys: Keys) -> Mask:
    """Which keys stand in the array for the first time."""
    count = keys.shape[0]
    packed = np.ascontiguousarray(keys)
    # All first words differing settles it for digests, at a tenth of what sorting whole keys takes.
    if np.unique(packed.view(np.uint64)[::4]).shape[0] == count:
        return np.ones(count, dtype=np.bool_)
    _, first = np.unique(packed.view("S32"), return_index=True)
    distinct = np.zeros(count, dtype=np.bool_)
    distinct[first] = True
    return distinct

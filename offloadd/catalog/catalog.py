"""Which block is where: a state machine without I/O, clocks or threads.

A block is a row of the index with up to two copies, one in the arena and one on a volume:

    (absent) ──publish──▶ resident ──reclaim, drop, data loss──▶ (absent)
                            │ pin / unpin: a move reads it; nothing of it is reclaimed meanwhile
                            └ doomed: dropped while pinned; invisible, and gone with its last pin

Whatever `reserve_*` hands out is published or freed exactly once; whatever `plan_restore` pins is unpinned exactly once. A block becomes visible when it is
published, after its bytes are in place, so a failed evict never is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.catalog.holds import RECOVERED, Holds
from offloadd.catalog.index import BlockIndex, IndexFull
from offloadd.catalog.pool import Pool, Reservation
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
        self._pins = self.index.column(np.uint16)
        self._hold_counts = self.index.column(np.uint16)
        self._arena_referenced = self.index.column(np.uint8)
        self._volume_referenced = self.index.column(np.uint8)
        self.holds = Holds(self._hold_counts)
        self.arena: Pool | None = None
        self.volumes: list[Pool] = []
        self._on_event = on_event or (lambda stored, tier, keys: None)

    # -- tiers -----------------------------------------------------------------------------------------------------------------------

    def add_arena(self, *, slab_count: int, slot_count_for: Callable[[int], int]) -> Pool:
        """The arena: its slabs are cut at once."""
        self.arena = Pool(
            slab_count=slab_count,
            slot_count_for=slot_count_for,
            protected=self._arena_protected,
            referenced=self._arena_referenced,
            open_slabs_max=slab_count,
            instant=True,
        )
        return self.arena

    def add_volume(self, *, slab_count: int, slot_count_for: Callable[[int], int], open_slabs_max: int) -> int:
        """A further volume; returns its ordinal."""
        self.volumes.append(
            Pool(
                slab_count=slab_count,
                slot_count_for=slot_count_for,
                protected=self._volume_protected,
                referenced=self._volume_referenced,
                open_slabs_max=open_slabs_max,
            )
        )
        return len(self.volumes) - 1

    def _arena_protected(self, rows: Rows) -> Mask:
        # A held block with a copy on a volume may lose the one in the arena: it can still be restored.
        protected: Mask = (self._pins[rows] > 0) | ((self._hold_counts[rows] > 0) & (self._volume[rows] == 0))
        return protected

    def _volume_protected(self, rows: Rows) -> Mask:
        protected: Mask = (self._pins[rows] > 0) | (self._hold_counts[rows] > 0)
        return protected

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

    def reserve_arena(self, slot_bytes: int, count: int) -> Reservation:
        """Slots in the arena; the victims' arena copies are gone."""
        assert self.arena is not None
        reservation = self.arena.reserve(slot_bytes, count)
        self._lose_arena(reservation.victims)
        return reservation

    def reserve_volume(self, volume: int, slot_bytes: int, count: int) -> Reservation:
        """Slots on a volume; the victims' volume copies are gone."""
        reservation = self.volumes[volume].reserve(slot_bytes, count)
        self._lose_volume(reservation.victims)
        return reservation

    def publish_arena(self, keys: Keys, slabs: Rows, slots: Rows, checksums: Rows, *, payload_bytes: int, namespace: int, keep: bool) -> tuple[Rows, Mask]:
        """Blocks whose bytes are in these arena slots become visible. Returns their rows and which were there already (their slots are free again).

        Row 0: the index is full, or the namespace was dropped meanwhile; the slot is free again.
        """
        assert self.arena is not None
        rows, fresh = self._rows_for(keys, payload_bytes=payload_bytes, namespace=namespace, keep=keep)
        known = np.asarray(self._in_arena[rows] > 0) & (rows > 0)
        use = (rows > 0) & ~known
        self.arena.free(slabs[~use], slots[~use])
        chosen = rows[use]
        self._arena_slab[chosen] = slabs[use]
        self._arena_slot[chosen] = slots[use]
        self._in_arena[chosen] = 1
        self._checksum[chosen] = checksums[use]
        self.arena.publish(slabs[use], slots[use], chosen)
        if chosen.shape[0]:
            self._on_event(True, Tier.ARENA, keys[use])
        return rows, known & ~fresh

    def publish_volume(
        self, volume: int, keys: Keys, slabs: Rows, slots: Rows, *, payload_bytes: int, namespace: int, keep: bool, durable: bool
    ) -> tuple[Rows, Mask]:
        """As `publish_arena`. A durable copy takes the place of one that was not synced. The checksum stands in the slot's own header."""
        pool = self.volumes[volume]
        rows, fresh = self._rows_for(keys, payload_bytes=payload_bytes, namespace=namespace, keep=keep)
        known = np.asarray(self._volume[rows] > 0) & (rows > 0)
        if durable:
            replace = known & ((self._flags[rows] & FLAG_DURABLE) == 0) & (self._pins[rows] == 0)
            self._free_volume_slots(rows[replace])
            known = known & ~replace
        use = (rows > 0) & ~known
        pool.free(slabs[~use], slots[~use])
        chosen = rows[use]
        self._volume[chosen] = volume + 1
        self._volume_slab[chosen] = slabs[use]
        self._volume_slot[chosen] = slots[use]
        if durable:
            self._flags[chosen] |= FLAG_DURABLE
        else:
            self._flags[chosen] &= ~np.uint8(FLAG_DURABLE)
        pool.publish(slabs[use], slots[use], chosen)
        if chosen.shape[0]:
            self._on_event(True, Tier.VOLUME, keys[use])
        return rows, known & ~fresh

    def _rows_for(self, keys: Keys, *, payload_bytes: int, namespace: int, keep: bool) -> tuple[Rows, Mask]:
        """Rows of the keys, new ones inserted; 0 for those that can't be (index full, doomed). And which are new."""
        rows: Rows = self.index.lookup(keys).copy()
        fresh = rows == 0
        if fresh.any():
            try:
                inserted = self.index.insert(keys[fresh])
            except IndexFull:
                inserted = np.zeros(int(fresh.sum()), dtype=np.uint32)
            live = inserted[inserted > 0]
            self._payload_bytes[live] = payload_bytes
            self._namespace[live] = namespace
            self._flags[live] = 0
            rows[fresh] = inserted
        rows[(self._flags[rows] & FLAG_DOOMED) != 0] = 0
        if keep:
            self._flags[rows[rows > 0]] |= FLAG_KEEP
        return rows, fresh

    def free_reserved(self, volume: int, slabs: Rows, slots: Rows) -> None:
        """Reserved slots whose move failed are empty again. `volume` -1: the arena."""
        pool = self.arena if volume < 0 else self.volumes[volume]
        assert pool is not None
        pool.free(slabs, slots)

    # -- restore ---------------------------------------------------------------------------------------------------------------------

    def plan_restore(self, keys: Keys) -> Sources:
        """Pin what is there and say where to read it: the arena copy if there is one, else the volume's."""
        rows = self.lookup(keys)
        self.pin(rows)
        sources = self._sources(rows, np.asarray(self._in_arena[rows] > 0))
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
        return sources

    def volume_sources(self, rows: Rows) -> Sources:
        """The volume copies of pinned rows (row 0 where there is none): a second chance when the arena copy failed its checksum."""
        usable = np.where(self._volume[rows] > 0, rows, 0).astype(np.uint32)
        return self._sources(usable, np.zeros(rows.shape[0], dtype=np.bool_))

    def arena_sources(self, rows: Rows) -> Sources:
        """The arena copies of pinned rows (row 0 where there is none)."""
        usable = np.where(self._in_arena[rows] > 0, rows, 0).astype(np.uint32)
        return self._sources(usable, np.ones(rows.shape[0], dtype=np.bool_))

    def _sources(self, rows: Rows, from_arena: Mask) -> Sources:
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
        np.subtract.at(self._pins, live, 1)
        doomed = np.unique(live[((self._flags[live] & FLAG_DOOMED) != 0) & (self._pins[live] == 0)])
        if doomed.shape[0]:
            self._delete(doomed)

    def lose(self, rows: Rows, *, volume: bool) -> None:
        """These copies turned out bad. While another move still pins the block all of it becomes invisible and goes later."""
        live = np.unique(rows[rows > 0])
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
        self._forget_absent(rows)

    def _lose_volume(self, rows: Rows) -> None:
        if rows.shape[0] == 0:
            return
        self._on_event(False, Tier.VOLUME, self.index.keys_of(rows))
        self._volume[rows] = 0
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

    def drop_volume(self, volume: int) -> int:
        """A volume is gone: its copies are lost. Pinned ones become invisible and go later. Returns how many."""
        rows = np.flatnonzero(self._volume == volume + 1).astype(np.uint32)
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
        _, first = np.unique(keys.view("S32"), return_index=True)
        distinct = np.zeros(keys.shape[0], dtype=np.bool_)
        distinct[first] = True
        use = distinct & (self._volume[known] == 0)
        room = self.index.capacity - len(self.index)
        if int(use.sum()) > room:
            use[np.flatnonzero(use)[room:]] = False
        fresh = use & (known == 0)
        rows = known.copy()
        rows[fresh] = self.index.insert(keys[fresh])
        chosen = rows[use]
        self._volume[chosen] = volume + 1
        self._volume_slab[chosen] = slab
        self._volume_slot[chosen] = slots[use]
        self._payload_bytes[chosen] = payload_bytes[use]
        self._namespace[chosen] = namespaces[use]
        self._flags[chosen] = np.where(kept[use], FLAG_KEEP, 0) | FLAG_DURABLE
        self.volumes[volume].recover(slab, slots[use], chosen)
        held = rows[use & kept]
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
            for row in rows[self._in_arena[rows] > 0]:
                assert self.arena.slabs[self._arena_slab[row]].rows[self._arena_slot[row]] == row
        for volume, pool in enumerate(self.volumes):
            pool.check()
            for row in rows[self._volume[rows] == volume + 1]:
                assert pool.slabs[self._volume_slab[row]].rows[self._volume_slot[row]] == row
        assert not self._pins[0] and not self._volume[0] and not self._in_arena[0]

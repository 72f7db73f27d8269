"""A catalog over tiny tiers, and a keeper that does what it is asked to."""

from dataclasses import dataclass, field
from itertools import count as numbers
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.catalog.catalog import Catalog
from offloadd.catalog.index import Keys, keys_array
from offloadd.catalog.pool import Pool, Reservation, Shortage
from offloadd.model.enums import Tier

Rows = npt.NDArray[np.uint32]

#: Slot sizes in a slab of 32 bytes: 8 small slots or 4 large ones.
SLAB_BYTES = 32
SMALL, LARGE, HUGE = 4, 8, 64
ARENA = -1


def key(number: int) -> bytes:
    """The key of block `number`."""
    return number.to_bytes(4, "little") * 8


def keys_of(*blocks: int) -> Keys:
    return keys_array([key(block) for block in blocks])


def rows_array(*rows: int) -> Rows:
    return np.array(rows, dtype=np.uint32)


@dataclass
class World:
    """`store` evicts blocks; `answer` is the keeper. Volumes have the ordinals 0, 1, ..."""

    capacity: int = 200
    arena_slabs: int = 0
    #: The node of each slab of an arena that lies on several; instead of `arena_slabs`.
    arena_nodes: tuple[int, ...] = ()
    volume_slabs: tuple[int, ...] = (2,)
    open_slabs_max: int = 8
    slab_bytes: int = SLAB_BYTES
    catalog: Catalog = field(init=False)
    events: list[tuple[bool, Tier, bytes]] = field(default_factory=list)
    _nonces: Any = field(default_factory=lambda: numbers(1))

    def __post_init__(self) -> None:
        self.catalog = Catalog(capacity=self.capacity, on_event=self._on_event)
        if slab_count := len(self.arena_nodes) or self.arena_slabs:
            self.catalog.add_arena(slab_count=slab_count, slot_count_for=self.slot_count, nodes=self.arena_nodes)
        for slab_count in self.volume_slabs:
            self.catalog.add_volume(slab_count=slab_count, slot_count_for=self.slot_count, open_slabs_max=self.open_slabs_max)

    def _on_event(self, stored: bool, tier: Tier, keys: Keys) -> None:
        self.events += [(stored, tier, one.tobytes()) for one in keys]

    def read(self, keys: Keys) -> None:
        """A whole restore of these blocks."""
        sources = self.catalog.plan_restore(keys)
        self.catalog.mark_used(sources)
        self.catalog.unpin(sources.rows)

    def slot_count(self, slot_bytes: int) -> int:
        return self.slab_bytes // slot_bytes

    def pool(self, volume: int = 0) -> Pool:
        pool = self.catalog.arena if volume == ARENA else self.catalog.volumes[volume]
        assert pool is not None
        return pool

    def nonce(self) -> bytes:
        return int(next(self._nonces)).to_bytes(16, "little")

    def answer(self, volume: int = 0) -> list[int]:
        """Cut and open what the pool wished for; returns which slabs."""
        pool = self.pool(volume)
        wishes = pool.take_wishes()
        for wish in wishes:
            pool.ready(wish.slab, self.nonce() if wish.slot_bytes else pool.slabs[wish.slab].nonce)
        return [wish.slab for wish in wishes]

    def ask(self, count: int, slot_bytes: int = SMALL, volume: int = 0) -> Reservation:
        """One reservation."""
        if volume == ARENA:
            return self.catalog.reserve_arena(slot_bytes, count)
        return self.catalog.reserve_volume(volume, slot_bytes, count)

    def reserve(self, count: int, slot_bytes: int = SMALL, volume: int = 0) -> list[tuple[int, int]]:
        """(slab, slot) of all `count` slots; the keeper answers at once."""
        places: list[tuple[int, int]] = []
        while len(places) < count:
            got = self.ask(count - len(places), slot_bytes, volume)
            places += zip(got.slabs.tolist(), got.slots.tolist(), strict=True)
            if volume != ARENA:
                self.answer(volume)
            assert got.shortage in (Shortage.NONE, Shortage.OPENING), (got.shortage, len(places), count)
        return places

    def publish(self, blocks: list[int], places: list[tuple[int, int]], volume: int = 0, *, durable: bool = False, namespace: int = 1) -> Rows:
        slabs, slots = (rows_array(*(place[part] for place in places)) for part in (0, 1))
        keys = keys_of(*blocks)
        if volume == ARENA:
            return self.catalog.publish_arena(keys, slabs, slots, rows_array(*blocks), payload_bytes=4, namespace=namespace, keep=False)[0]
        return self.catalog.publish_volume(volume, keys, slabs, slots, payload_bytes=4, namespace=namespace, keep=False, durable=durable)[0]

    def store(self, blocks: range | list[int], slot_bytes: int = SMALL, volume: int = 0, *, durable: bool = False) -> Rows:
        """Evict these blocks: their rows."""
        return self.publish(list(blocks), self.reserve(len(blocks), slot_bytes, volume), volume, durable=durable)

    def rows(self, *blocks: int) -> Rows:
        return self.catalog.lookup(keys_of(*blocks))

    def found(self, blocks: range | list[int]) -> list[int]:
        """Which of the blocks are there."""
        return [block for block in blocks if self.rows(block)[0]]

    def close_all(self, volume: int = 0) -> None:
        """Close every open slab."""
        pool = self.pool(volume)
        for slab in pool.open_slabs():
            pool.closing(slab)
            pool.closed(slab.index, clean=True)

    def place(self, block: int, volume: int = 0) -> tuple[int, int]:
        """(slab, slot) of a block's copy."""
        sources = self.catalog.arena_sources(self.rows(block)) if volume == ARENA else self.catalog.volume_sources(self.rows(block))
        assert sources.rows[0] and (volume == ARENA or sources.volume[0] == volume)
        return int(sources.slab[0]), int(sources.slot[0])

"""The catalog against a plain model: whatever is asked in whatever order, no block is lost that must stay, and no slot is given twice."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from offloadd.catalog.holds import RECOVERED
from offloadd.catalog.pool import Shortage, SlabState, Wish
from offloadd.model.enums import Tier

from .world import ARENA, LARGE, SMALL, World, key, keys_of, rows_array

#: Blocks 0..19 are small, 20..29 large. A block's namespace is its number's last bit.
BLOCKS = list(range(30))
SMALL_BLOCKS, LARGE_BLOCKS = 20, 30
CAPACITY = 26

TIERS = st.sampled_from([ARENA, 0, 1])
SIZES = st.sampled_from([SMALL, SMALL, LARGE])
HOLDERS = st.integers(1, 3)
SOME = st.lists(st.sampled_from(BLOCKS), max_size=8)


def blocks_of(slot_bytes: int) -> "st.SearchStrategy[int]":
    return st.integers(0, SMALL_BLOCKS - 1) if slot_bytes == SMALL else st.integers(SMALL_BLOCKS, LARGE_BLOCKS - 1)


@dataclass
class Block:
    """What the model knows of a block. `arena` is (slab, slot), `volume` is (volume, slab, slot)."""

    row: int
    arena: tuple[int, int] | None = None
    volume: tuple[int, int, int] | None = None
    durable: bool = False
    doomed: bool = False
    pins: int = 0
    holds: dict[int, float] = field(default_factory=dict)
    retired: list[tuple[int, int, int]] = field(default_factory=list)

    def copy_in(self, tier: int) -> bool:
        return self.arena is not None if tier == ARENA else self.volume is not None and self.volume[0] == tier

    def must_stay(self, tier: int) -> bool:
        return self.pins > 0 or (bool(self.holds) and (tier != ARENA or self.volume is None))


@dataclass(eq=False)
class Slots:
    """A reservation that is not settled yet."""

    tier: int
    slot_bytes: int
    places: list[tuple[int, int]]


@dataclass(eq=False)
class Reading:
    """A restore under way: the blocks that it pins, and where and under which generation and nonce each is read."""

    blocks: list[int]
    places: list[tuple[int, int, int, int, int, bytes]]


class CatalogBesideModel(RuleBasedStateMachine):
    reservations = Bundle("reservations")
    readings = Bundle("readings")
    wishes = Bundle("wishes")

    @initialize(open_max=st.integers(1, 3), adopted=st.lists(SIZES, max_size=2))
    def start(self, open_max: int, adopted: list[int]) -> None:
        self.world = World(capacity=CAPACITY, arena_slabs=2, volume_slabs=(3, 2), open_slabs_max=open_max)
        self.catalog = self.world.catalog
        self.blocks: dict[int, Block] = {}
        self.now_s = 0.0
        #: (tier, slab, slot) of everything handed out and not settled.
        self.reserved: set[tuple[int, int, int]] = set()
        self.reading: list[Reading] = []
        self.generations: dict[tuple[int, int, int, bytes], int] = {}
        self.told: dict[int, int] = {}
        for slab, slot_bytes in enumerate(adopted):
            self.world.pool(1).adopt(slab, slot_bytes=slot_bytes, slot_count=self.world.slot_count(slot_bytes), nonce=self.world.nonce())
            self.told[slab] = 0

    # -- the model ---------------------------------------------------------------------------------------------------------------------

    def by_row(self, row: int) -> tuple[int, Block]:
        return next((number, block) for number, block in self.blocks.items() if block.row == row)

    def forget_absent(self, number: int) -> None:
        block = self.blocks[number]
        if block.arena is None and block.volume is None:
            assert block.pins == 0
            del self.blocks[number]

    def take_victims(self, tier: int, victims: list[int]) -> None:
        assert len(set(victims)) == len(victims)
        for row in victims:
            number, block = self.by_row(row)
            assert block.copy_in(tier), "a victim had no copy there"
            assert not block.must_stay(tier), f"block {number} was reclaimed: {block}"
            if tier == ARENA:
                block.arena = None
            else:
                block.volume = None
            self.forget_absent(number)

    def enter(self, number: int, tier: int, place: tuple[int, int], *, durable: bool, row: int) -> None:
        """The model's publication of one block; `row` is what the catalog answered."""
        block = self.blocks.get(number)
        if block is not None and block.doomed:
            assert row == 0
            return
        if block is None:
            if len(self.blocks) == CAPACITY:
                assert row == 0
                return
            assert row not in [other.row for other in self.blocks.values()]
            block = self.blocks[number] = Block(row)
        assert row == block.row > 0
        if tier == ARENA:
            block.arena = block.arena or place
            return
        if block.volume is not None:
            if block.durable or not durable:
                return
            if block.pins:
                block.retired.append(block.volume)
        block.volume = (tier, *place)
        block.durable = durable

    def drop(self, number: int) -> None:
        block = self.blocks[number]
        block.doomed = True
        if block.pins == 0:
            del self.blocks[number]

    # -- slots -------------------------------------------------------------------------------------------------------------------------

    def ask(self, tier: int, slot_bytes: int, count: int) -> list[tuple[int, int]]:
        got = self.world.ask(count, slot_bytes, tier)
        pool = self.world.pool(tier)
        self.take_victims(tier, got.victims.tolist())
        places = list(zip(got.slabs.tolist(), got.slots.tolist(), strict=True))
        occupied = self.occupied(tier)
        for (slab, slot), generation in zip(places, got.generations.tolist(), strict=True):
            assert (tier, slab, slot) not in self.reserved | occupied, "a slot was given twice"
            assert pool.slabs[slab].state == SlabState.OPEN and pool.slabs[slab].slot_bytes == slot_bytes
            self.reserved.add((tier, slab, slot))
            if tier != ARENA:
                name = (tier, slab, slot, pool.slabs[slab].nonce)
                assert generation > self.generations.get(name, 0), "the generation did not rise"
                self.generations[name] = generation
        assert (got.shortage == Shortage.NONE) == (len(places) == count)
        states = [slab.state for slab in pool.slabs]
        if got.shortage == Shortage.OPENING:
            assert {SlabState.PREPARING, SlabState.CLOSING, SlabState.SCANNING} & set(states)
        if got.shortage == Shortage.FULL:
            assert SlabState.UNCUT not in states
            for slab in pool.slabs:
                if slab.slot_bytes == slot_bytes and slab.state == SlabState.OPEN:
                    assert slab.free_count == 0
                    for row in set(slab.rows.tolist()) - {0, 0xFFFFFFFF}:
                        assert self.by_row(row)[1].must_stay(tier), "FULL, though something could be reclaimed"
        return places

    def occupied(self, tier: int) -> set[tuple[int, int, int]]:
        here: set[tuple[int, int, int]] = set()
        for block in self.blocks.values():
            if tier == ARENA and block.arena is not None:
                here.add((ARENA, *block.arena))
            here |= {place for place in [block.volume, *block.retired] if place is not None and place[0] == tier}
        return here

    @rule(target=reservations, tier=TIERS, slot_bytes=SIZES, count=st.integers(1, 9))
    def reserve(self, tier: int, slot_bytes: int, count: int) -> Any:
        places = self.ask(tier, slot_bytes, count)
        return Slots(tier, slot_bytes, places) if places else multiple()

    @rule(slots=consumes(reservations), data=st.data(), durable=st.booleans())
    def publish(self, slots: Slots, data: st.DataObject, durable: bool) -> None:
        good = data.draw(st.integers(0, len(slots.places)))
        blocks = data.draw(st.lists(blocks_of(slots.slot_bytes), min_size=good, max_size=good))
        self.free_places(slots.tier, slots.places[good:])
        # As the front does: one publication for each namespace.
        for namespace in (0, 1):
            mine = [index for index, block in enumerate(blocks) if block % 2 == namespace]
            if mine:
                self.publish_as([blocks[index] for index in mine], slots.tier, [slots.places[index] for index in mine], durable, namespace)

    def publish_as(self, blocks: list[int], tier: int, places: list[tuple[int, int]], durable: bool, namespace: int) -> None:
        rows = self.world.publish(blocks, places, tier, durable=durable, namespace=namespace)
        for number, place, row in zip(blocks, places, rows.tolist(), strict=True):
            self.reserved.remove((tier, *place))
            self.enter(number, tier, place, durable=durable, row=row)

    @rule(slots=consumes(reservations))
    def fail(self, slots: Slots) -> None:
        self.free_places(slots.tier, slots.places)

    def free_places(self, tier: int, places: list[tuple[int, int]]) -> None:
        self.catalog.free_reserved(tier, rows_array(*(slab for slab, _ in places)), rows_array(*(slot for _, slot in places)))
        self.reserved -= {(tier, *place) for place in places}

    @rule(volume=st.integers(0, 1))
    def spill(self, volume: int) -> None:
        waiting = [number for number, block in self.blocks.items() if block.arena and not block.volume and not block.doomed and number < SMALL_BLOCKS][:4]
        rows = self.world.rows(*waiting)
        self.catalog.pin(rows)
        for number in waiting:
            self.blocks[number].pins += 1
        places = self.ask(volume, SMALL, len(waiting))
        for number, place in zip(waiting, places, strict=False):
            self.publish_as([number], volume, [place], False, number % 2)
        self.unpin(waiting)

    # -- reading -----------------------------------------------------------------------------------------------------------------------

    @rule(target=readings, blocks=SOME)
    def plan(self, blocks: list[int]) -> Any:
        sources = self.catalog.plan_restore(keys_of(*blocks))
        self.catalog.mark_used(sources)
        places = []
        for number, row, volume, slab, slot in zip(
            blocks, sources.rows.tolist(), sources.volume.tolist(), sources.slab.tolist(), sources.slot.tolist(), strict=True
        ):
            block = self.blocks.get(number)
            if block is None or block.doomed:
                assert row == 0
                continue
            assert row == block.row
            assert (slab, slot) == block.arena if volume == ARENA else (volume, slab, slot) == block.volume
            block.pins += 1
            held = self.world.pool(volume).slabs[slab]
            places.append((row, volume, slab, slot, int(held.generations[slot]), held.nonce))
        reading = Reading([number for number, row in zip(blocks, sources.rows.tolist(), strict=True) if row], places)
        self.reading.append(reading)
        return reading

    def unpin(self, blocks: list[int]) -> None:
        self.catalog.unpin(rows_array(*(self.blocks[number].row for number in blocks)))
        for number in blocks:
            self.blocks[number].pins -= 1
        for number in set(blocks):
            if self.blocks[number].pins == 0:
                self.blocks[number].retired.clear()
                if self.blocks[number].doomed:
                    del self.blocks[number]

    @rule(reading=consumes(readings), data=st.data())
    def finish(self, reading: Reading, data: st.DataObject) -> None:
        """Unpin, and lose the copies that were bad, as the front does."""
        self.reading.remove(reading)
        self.unpin(reading.blocks)
        bad = data.draw(st.lists(st.sampled_from(reading.blocks), max_size=2)) if reading.blocks else []
        for volume in (False, True):
            mine = [(number, row) for number, (row, at, *_) in zip(reading.blocks, reading.places, strict=True) if number in bad and (at >= 0) == volume]
            self.catalog.lose(rows_array(*(row for _, row in mine)), volume=volume)
            for number in {number for number, _ in mine} & self.blocks.keys():
                block = self.blocks[number]
                if (block.volume if volume else block.arena) is None:
                    continue
                if block.pins:
                    block.doomed = True
                elif volume:
                    block.volume = None
                else:
                    block.arena = None
                self.forget_absent(number) if not block.doomed else None

    @rule(blocks=SOME)
    def touch(self, blocks: list[int]) -> None:
        self.catalog.touch(self.world.rows(*blocks))

    # -- holds -------------------------------------------------------------------------------------------------------------------------

    def live(self, blocks: list[int]) -> list[int]:
        return [number for number in blocks if number in self.blocks and not self.blocks[number].doomed]

    @rule(holder=HOLDERS, blocks=SOME, ttl_s=st.integers(0, 20))
    def hold(self, holder: int, blocks: list[int], ttl_s: int) -> None:
        live = self.live(blocks)
        self.catalog.holds.hold(holder, self.world.rows(*live), self.now_s + ttl_s)
        for number in live:
            holds = self.blocks[number].holds
            holds[holder] = max(holds.get(holder, 0.0), self.now_s + ttl_s)

    @rule(holder=HOLDERS, blocks=SOME)
    def release(self, holder: int, blocks: list[int]) -> None:
        live = self.live(blocks)
        expected = sum(holder in self.blocks[number].holds for number in set(live))
        assert self.catalog.holds.release(holder, self.world.rows(*live)) == expected
        for number in live:
            self.blocks[number].holds.pop(holder, None)

    @rule(holder=HOLDERS)
    def release_all(self, holder: int) -> None:
        assert self.catalog.holds.release_all(holder) == sum(block.holds.pop(holder, None) is not None for block in self.blocks.values())

    @rule(holder=HOLDERS, blocks=SOME, ttl_s=st.integers(0, 20))
    def claim(self, holder: int, blocks: list[int], ttl_s: int) -> None:
        live = self.live(blocks)
        self.catalog.holds.claim(holder, self.world.rows(*live), self.now_s + ttl_s)
        for number in live:
            holds = self.blocks[number].holds
            if holds.pop(RECOVERED, None) is not None:
                holds[holder] = max(holds.get(holder, 0.0), self.now_s + ttl_s)

    @rule(seconds=st.integers(0, 15))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        ended = 0
        for block in self.blocks.values():
            for holder in [holder for holder, until_s in block.holds.items() if until_s <= self.now_s]:
                del block.holds[holder]
                ended += 1
        assert self.catalog.holds.expire(self.now_s) == ended

    # -- going away --------------------------------------------------------------------------------------------------------------------

    @rule(namespace=st.integers(0, 1))
    def drop_namespace(self, namespace: int) -> None:
        mine = self.live([number for number in BLOCKS if number % 2 == namespace])
        rows = self.catalog.rows_of_namespace(namespace)
        assert sorted(rows.tolist()) == sorted(self.blocks[number].row for number in mine)
        assert self.catalog.drop(rows) == len(mine)
        for number in mine:
            self.drop(number)

    @rule(volume=st.integers(0, 1), often=st.integers(0, 9))
    def drop_volume(self, volume: int, often: int) -> None:
        if often:
            return
        while self.catalog.drop_volume(volume, count_max=3):
            pass
        for number, block in list(self.blocks.items()):
            if block.volume is not None and block.volume[0] == volume:
                if block.pins:
                    block.doomed = True
                else:
                    block.volume = None
                    self.forget_absent(number)

    # -- the keeper --------------------------------------------------------------------------------------------------------------------

    @rule(target=wishes, volume=st.integers(0, 1))
    def grant(self, volume: int) -> Any:
        return multiple(*((volume, wish) for wish in self.world.pool(volume).take_wishes()))

    @rule(wish=consumes(wishes), works=st.integers(0, 4))
    def keeper_answers(self, wish: tuple[int, Wish], works: int) -> None:
        volume, wanted = wish
        pool = self.world.pool(volume)
        if not works:
            pool.failed(wanted.slab, cut=wanted.slot_bytes > 0)
            return
        pool.ready(wanted.slab, self.world.nonce() if wanted.slot_bytes else pool.slabs[wanted.slab].nonce)

    @rule(volume=st.integers(0, 1), clean=st.booleans())
    def keeper_closes(self, volume: int, clean: bool) -> None:
        pool = self.world.pool(volume)
        for slab in pool.slabs:
            if slab.state == SlabState.CLOSING:
                pool.closed(slab.index, clean=clean)
                return
        chosen = pool.next_to_close()
        if chosen is not None:
            pool.closing(chosen)

    @rule(data=st.data(), dirty=st.booleans())
    def keeper_tells(self, data: st.DataObject, dirty: bool) -> None:
        """The next part of a slab that is being scanned, or its end."""
        if not self.told:
            return
        slab = min(self.told)
        pool = self.world.pool(1)
        count = pool.slabs[slab].slot_count
        if self.told[slab] >= count:
            pool.recovered(slab, dirty=dirty)
            del self.told[slab]
            return
        stop = data.draw(st.integers(self.told[slab] + 1, count))
        slots = [slot for slot in range(self.told[slab], stop) if data.draw(st.booleans())]
        self.told[slab] = stop
        blocks = [data.draw(blocks_of(pool.slabs[slab].slot_bytes)) for _ in slots]
        kept = np.array([data.draw(st.booleans()) for _ in slots], dtype=np.bool_)
        until_s = self.now_s + 5
        told = self.catalog.recover(
            1,
            slab,
            rows_array(*slots),
            keys_of(*blocks),
            payload_bytes=np.full(len(slots), 4, dtype=np.uint32),
            namespaces=np.array([block % 2 for block in blocks], dtype=np.int32),
            kept=kept,
            keep_until_s=until_s,
        )
        entered = 0
        for number, slot in zip(blocks, slots, strict=True):
            block = self.blocks.get(number)
            if block is None:
                if len(self.blocks) == CAPACITY:
                    continue
                block = self.blocks[number] = Block(int(self.world.rows(number)[0]))
                assert block.row
            if not block.doomed and block.volume is None:
                block.volume, block.durable = (1, slab, slot), True
                entered += 1
        assert told == entered
        for number, keep in zip(blocks, kept.tolist(), strict=True):
            if keep and number in self.blocks and not self.blocks[number].doomed:
                holds = self.blocks[number].holds
                holds[RECOVERED] = max(holds.get(RECOVERED, 0.0), until_s)

    # -- what always holds -------------------------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "world"):
            return
        self.catalog.check()
        assert len(self.catalog.index) == len(self.blocks)
        expected = [self.blocks[number].row if self.live([number]) else 0 for number in BLOCKS]
        assert self.catalog.lookup(keys_of(*BLOCKS)).tolist() == expected, "a published block is found until policy, loss or a drop took it"
        for number, block in self.blocks.items():
            row = rows_array(block.row)
            arena, volume = self.catalog.arena_sources(row), self.catalog.volume_sources(row)
            assert (block.arena is not None) == bool(arena.rows[0])
            assert block.arena is None or block.arena == (arena.slab[0], arena.slot[0])
            assert (block.volume is not None) == bool(volume.rows[0])
            assert block.volume is None or block.volume == (volume.volume[0], volume.slab[0], volume.slot[0])
            durable = bool(self.catalog.stored_as(row, tier=Tier.VOLUME, durable=True)[0])
            assert durable == (block.volume is not None and block.durable), number

    @invariant()
    def what_is_read_stays(self) -> None:
        for reading in getattr(self, "reading", ()):
            for row, volume, slab, slot, generation, nonce in reading.places:
                held = self.world.pool(volume).slabs[slab]
                assert held.rows[slot] == row and held.generations[slot] == generation and held.nonce == nonce, (
                    "the slot of a block that is read was given away"
                )

    @invariant()
    def events_tell_the_copies(self) -> None:
        if not hasattr(self, "world"):
            return
        copies: set[tuple[Tier, bytes]] = set()
        for stored, tier, name in self.world.events:
            assert ((tier, name) in copies) != stored, "an event told nothing new"
            copies ^= {(tier, name)}
        expected = {(Tier.ARENA, key(number)) for number, block in self.blocks.items() if block.arena is not None}
        expected |= {(Tier.VOLUME, key(number)) for number, block in self.blocks.items() if block.volume is not None}
        assert copies == expected
        self.world.events[:] = [(True, tier, name) for tier, name in sorted(copies)]

    def teardown(self) -> None:
        """Settle everything: then nothing is reserved or pinned."""
        if not hasattr(self, "world"):
            return
        for tier in (ARENA, 0, 1):
            self.free_places(tier, [(slab, slot) for at, slab, slot in sorted(self.reserved) if at == tier])
        for reading in self.reading:
            self.unpin(reading.blocks)
        self.catalog.check()
        for tier in (ARENA, 0, 1):
            assert not any(slab.reserved_count for slab in self.world.pool(tier).slabs)


CatalogBesideModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCatalogBesideModel = CatalogBesideModel.TestCase

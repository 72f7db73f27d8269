"""One block's life in the catalog: published, read, replaced, lost, dropped, found again."""

import numpy as np
import pytest

from offloadd.catalog.holds import RECOVERED
from offloadd.catalog.pool import Shortage
from offloadd.model.enums import Tier

from .world import ARENA, SMALL, World, key, keys_of, rows_array


def recover(world: World, slab: int, slots: list[int], blocks: list[int], *, kept: bool = False, volume: int = 0, until_s: float = 5.0) -> int:
    count = len(blocks)
    return world.catalog.recover(
        volume,
        slab,
        rows_array(*slots),
        keys_of(*blocks),
        payload_bytes=np.full(count, 4, dtype=np.uint32),
        namespaces=np.full(count, 1, dtype=np.int32),
        kept=np.full(count, kept, dtype=np.bool_),
        keep_until_s=until_s,
    )


def test_a_block_is_not_seen_before_it_is_published_and_a_failed_evict_never_is() -> None:
    world = World()
    places = world.reserve(2)
    assert world.found([1, 2]) == []
    world.publish([1], places[:1])
    world.catalog.free_reserved(0, rows_array(places[1][0]), rows_array(places[1][1]))
    assert world.found([1, 2]) == [1]
    assert world.pool().used_slots == 1 and world.catalog.block_count == 1
    world.catalog.check()


def test_recovered_duplicates_keep_one_copy() -> None:
    world = World(volume_slabs=(3,))
    for slab in (0, 1):
        world.pool().adopt(slab, slot_bytes=SMALL, slot_count=8, nonce=world.nonce())
    assert recover(world, 0, [1, 2, 4], [7, 8, 7]) == 2
    assert recover(world, 1, [3, 5], [8, 9]) == 1
    for slab in (0, 1):
        world.pool().recovered(slab, dirty=False)
    assert world.place(7) == (0, 1) and world.place(8) == (0, 2) and world.place(9) == (1, 5)
    assert world.pool().used_slots == 3, "the other copies' slots are free"
    assert world.events.count((True, Tier.VOLUME, key(7))) == 1
    world.catalog.check()


def test_a_block_that_was_evicted_again_while_its_volume_was_scanned_is_there_once() -> None:
    world = World(arena_slabs=1, volume_slabs=(1, 1))
    world.pool(0).adopt(0, slot_bytes=SMALL, slot_count=8, nonce=world.nonce())
    world.store([1], volume=1)
    world.store([2], volume=ARENA)
    assert recover(world, 0, [0, 1], [1, 2]) == 1
    assert world.place(1, 1) and world.place(2, 0) == (0, 1) and world.catalog.block_count == 2
    world.catalog.check()


def test_a_dropped_block_that_is_still_read_does_not_come_back_with_the_scan() -> None:
    world = World(arena_slabs=1, volume_slabs=(1,))
    world.pool().adopt(0, slot_bytes=SMALL, slot_count=8, nonce=world.nonce())
    rows = world.store([1], volume=ARENA)
    world.catalog.pin(rows)
    world.catalog.drop(rows)
    assert recover(world, 0, [0], [1], kept=True) == 0
    assert world.found([1]) == []
    world.catalog.unpin(rows)
    assert world.catalog.block_count == 0
    world.catalog.check()


def test_more_recovered_blocks_than_the_index_has_room_for_leave_their_slots_free() -> None:
    world = World(capacity=3, volume_slabs=(1,))
    world.pool().adopt(0, slot_bytes=SMALL, slot_count=8, nonce=world.nonce())
    assert recover(world, 0, [0, 1, 2, 3, 4], [10, 11, 12, 13, 14]) == 3
    assert world.found(range(10, 15)) == [10, 11, 12] and world.pool().used_slots == 3
    world.catalog.check()


def test_a_row_number_reused_after_delete_carries_nothing_over() -> None:
    world = World(capacity=1, arena_slabs=1, volume_slabs=(1,))
    old = world.store([1], volume=ARENA)
    world.store([1], durable=True)
    world.catalog.holds.hold(1, old, 10.0)
    world.catalog.holds.hold(2, old, 20.0)
    world.catalog.touch(old)
    world.catalog.pin(old)
    world.catalog.drop(old)
    world.catalog.unpin(old)
    world.catalog.check()
    new = world.store([2])
    assert new.tolist() == old.tolist()
    assert world.found([1, 2]) == [2]
    assert not world.catalog.stored_as(new, tier=Tier.VOLUME, durable=True)[0] and not world.catalog.stored_as(new, tier=Tier.ARENA, durable=False)[0]
    assert world.catalog.holds.held_count == 0 and world.catalog.holds.expire(100.0) == 0
    assert world.catalog.describe(new)[3].tolist() == [0]
    world.ask(8)
    assert world.found([2]) == [], "the new block may go"


def test_a_full_index_refuses_without_leaking_slots() -> None:
    for tier in (ARENA, 0):
        world = World(capacity=3, arena_slabs=1)
        rows = world.store(range(5), volume=tier)
        assert (rows > 0).tolist() == [True] * 3 + [False] * 2, "as many as fit"
        world.catalog.holds.hold(1, rows[:3], 100.0)
        assert world.pool(tier).used_slots == 3
        assert world.store([9], volume=tier).tolist() == [0] and world.found([9]) == []
        assert world.store([0, 1], volume=tier).all(), "blocks that are there need no room"
        assert world.pool(tier).used_slots == 3
        world.catalog.check()


def test_a_key_named_twice_is_published_once_and_leaks_no_slot() -> None:
    for tier in (ARENA, 0):
        world = World(arena_slabs=1)
        rows = world.store([1, 2, 1], volume=tier)
        assert rows[0] == rows[2] != rows[1] and world.pool(tier).used_slots == 2
        world.store([2, 3, 3], volume=tier)
        assert world.pool(tier).used_slots == 3
        world.catalog.check()


def test_a_block_that_two_evicts_brought_is_there_once() -> None:
    world = World()
    first, second = world.reserve(1), world.reserve(1)
    rows = world.publish([1], first)
    assert world.publish([1], second).tolist() == rows.tolist()
    assert world.place(1) == first[0] and world.pool().used_slots == 1
    assert [event[0] for event in world.events] == [True]


def test_a_durable_copy_replaces_one_that_was_not_synced() -> None:
    world = World(volume_slabs=(1, 1))
    rows = world.store([1], volume=1)
    assert not world.catalog.stored_as(rows, tier=Tier.VOLUME, durable=True)[0]
    world.store([1], durable=True)
    assert world.catalog.stored_as(rows, tier=Tier.VOLUME, durable=True)[0]
    assert world.place(1, 0) and world.pool(1).used_slots == 0
    place = world.place(1, 0)
    world.store([1])
    world.store([1], durable=True)
    assert world.place(1, 0) == place and world.catalog.stored_as(rows, tier=Tier.VOLUME, durable=True)[0], "a durable one stays"
    world.catalog.check()


def test_a_durable_copy_replaces_an_unsynced_one_that_is_being_read_and_the_old_slot_stays_until_then() -> None:
    world = World(volume_slabs=(1, 1))
    world.store([1])
    old = world.place(1)
    reads = [world.catalog.plan_restore(keys_of(1)) for _ in range(2)]
    rows = world.store([1], volume=1, durable=True)
    assert world.catalog.stored_as(rows, tier=Tier.VOLUME, durable=True)[0], "or the engine was told an untruth"
    assert world.place(1, 1)
    world.catalog.unpin(reads[0].rows)
    got = world.ask(8)
    assert old not in zip(got.slabs.tolist(), got.slots.tolist(), strict=True) and len(got) == 7
    world.catalog.check()
    world.catalog.unpin(reads[1].rows)
    assert [(int(got.slabs[0]), int(got.slots[0])) for got in [world.ask(1)]] == [old]
    world.catalog.check()


def test_doomed_blocks_are_invisible_and_go_with_their_last_pin() -> None:
    for tier in (ARENA, 0):
        world = World(arena_slabs=1)
        world.store([1, 2], volume=tier)
        reads = [world.catalog.plan_restore(keys_of(1)) for _ in range(2)]
        assert world.catalog.drop(world.catalog.rows_of_namespace(1)) == 2
        assert world.found([1, 2]) == [] and world.catalog.plan_restore(keys_of(1)).rows.tolist() == [0]
        assert world.catalog.rows_of_namespace(1).shape == (0,) and world.catalog.arena_only(held=False).shape == (0,)
        assert world.pool(tier).used_slots == 1, "the one that is read keeps its slot"
        assert world.store([1], volume=tier).tolist() == [0], "and can't be entered anew until then"
        world.catalog.unpin(reads[0].rows)
        assert world.pool(tier).used_slots == 1
        world.catalog.unpin(reads[1].rows)
        assert world.pool(tier).used_slots == 0 and world.catalog.block_count == 0
        assert world.store([1], volume=tier).all() and world.found([1]) == [1]
        world.catalog.check()


def test_a_copy_found_bad_is_gone_and_the_other_one_is_read() -> None:
    world = World(arena_slabs=1)
    rows = world.store([1], volume=ARENA)
    world.store([1])
    assert world.catalog.tiers_of(rows).tolist() == [Tier.ARENA]
    world.catalog.lose(rows, volume=False)
    assert world.catalog.tiers_of(rows).tolist() == [Tier.VOLUME] and world.pool(ARENA).used_slots == 0
    world.catalog.lose(rows, volume=True)
    assert world.found([1]) == [] and world.pool(0).used_slots == 0


def test_two_restores_that_find_the_same_copy_bad_lose_it_once() -> None:
    world = World(arena_slabs=1)
    world.store([1])
    reads = [world.catalog.plan_restore(keys_of(1)) for _ in range(2)]
    for read in reads:
        world.catalog.unpin(read.rows)
        world.catalog.lose(read.rows, volume=True)
        assert world.found([1]) == []
        assert world.pool().used_slots == (1 if read is reads[0] else 0), "the other restore still reads it"
        world.catalog.check()
    assert world.catalog.block_count == 0 and world.pool().used_slots == 0
    world.catalog.check()


def test_a_volume_that_is_gone_takes_its_copies_with_it_in_portions() -> None:
    world = World(arena_slabs=1, volume_slabs=(1, 1))
    world.store([1, 2, 3])
    world.store([2], volume=ARENA)
    world.store([4], volume=1)
    world.catalog.pin(world.rows(3))
    pinned = world.rows(3)
    told = []
    while not told or told[-1]:
        told.append(world.catalog.drop_volume(0, count_max=2))
    assert told == [2, 1, 0] and world.found(range(1, 5)) == [2, 4]
    world.catalog.unpin(pinned)
    assert world.pool(0).used_slots == 0
    world.catalog.check()


def test_an_unpin_without_a_pin_is_refused() -> None:
    world = World()
    rows = world.store([1])
    with pytest.raises(AssertionError, match="not pinned"):
        world.catalog.unpin(rows)


def test_a_block_may_be_pinned_more_often_than_16_bits_count() -> None:
    world = World(volume_slabs=(1,))
    rows = world.store(range(8))
    world.catalog.pin(np.repeat(rows[:1], 1 << 16))
    assert rows[0] not in world.ask(7).victims and world.ask(1).shortage == Shortage.FULL


def test_what_a_drain_spills_is_in_the_arena_only() -> None:
    world = World(arena_slabs=1)
    rows = world.store([1, 2, 3], volume=ARENA)
    world.store([2])
    world.catalog.holds.hold(1, rows[1:], 10.0)
    assert world.catalog.arena_only(held=False).tolist() == [rows[0], rows[2]]
    assert world.catalog.arena_only(held=True).tolist() == [rows[2]]


def test_a_recovered_keep_belongs_to_whoever_claims_it() -> None:
    world = World(volume_slabs=(1,))
    world.pool().adopt(0, slot_bytes=SMALL, slot_count=8, nonce=world.nonce())
    recover(world, 0, [0, 1], [1, 2], kept=True, until_s=5.0)
    holds = world.catalog.holds
    assert world.catalog.describe(world.rows(1, 2))[3].tolist() == [1, 1]
    holds.claim(3, world.rows(1), 50.0)
    assert holds.expire(6.0) == 1, "the one that nobody claimed"
    assert world.catalog.describe(world.rows(1, 2))[3].tolist() == [1, 0]
    assert holds.release(RECOVERED, world.rows(1)) == 0 and holds.release_all(3) == 1


def test_a_keep_told_by_either_of_two_recovered_copies_counts() -> None:
    world = World(volume_slabs=(1,))
    world.pool().adopt(0, slot_bytes=SMALL, slot_count=8, nonce=world.nonce())
    recover(world, 0, [0], [1], kept=False)
    recover(world, 0, [1], [1], kept=True)
    assert world.catalog.holds.held_count == 1
    world.catalog.check()

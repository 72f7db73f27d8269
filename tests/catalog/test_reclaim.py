"""Which blocks go when a tier is full, and which stay."""

import numpy as np
import pytest

from offloadd.catalog import pool as pool_module
from offloadd.catalog import victims as victims_module
from offloadd.catalog.pool import Shortage, SlabState, Wish
from offloadd.catalog.ring import Ring
from offloadd.catalog.slab import Slab, SlabColumns

from .world import ARENA, HUGE, LARGE, SMALL, World, keys_of, rows_array


def test_a_block_being_restored_keeps_its_slot() -> None:
    for tier in (ARENA, 0):
        world = World(arena_slabs=1, volume_slabs=(1,))
        world.store(range(8), volume=tier)
        sources = world.catalog.plan_restore(keys_of(3))
        place = world.place(3, tier)
        world.store(range(8, 15), volume=tier)
        got = world.ask(8, volume=tier)
        assert (len(got), got.shortage) == (7, Shortage.FULL), "all the others go, however long the hand turns"
        assert world.found(range(15)) == [3] and world.place(3, tier) == place
        world.catalog.unpin(sources.rows)
        world.ask(8, volume=tier)
        assert world.found([3]) == []


def test_a_kept_block_survives_a_full_tier_and_the_answer_is_full() -> None:
    for tier in (ARENA, 0):
        world = World(arena_slabs=1, volume_slabs=(2,))
        count = 8 if tier == ARENA else 16
        rows = world.store(range(count), volume=tier)
        world.catalog.holds.hold(1, rows, 10.0)
        got = world.ask(3, volume=tier)
        assert (len(got), got.shortage) == (0, Shortage.FULL)
        assert world.found(range(count)) == list(range(count))
        world.catalog.holds.release(1, rows[:2])
        got = world.ask(3, volume=tier)
        assert (len(got), got.shortage) == (2, Shortage.FULL), "what there is comes back"
        assert sorted(got.victims.tolist()) == sorted(rows[:2].tolist())


def test_a_held_block_may_lose_its_arena_copy_if_a_volume_has_it() -> None:
    world = World(arena_slabs=1, volume_slabs=(1,))
    rows = world.store(range(8), volume=ARENA)
    world.store([5])
    world.catalog.holds.hold(1, rows, 10.0)
    got = world.ask(8, volume=ARENA)
    assert got.victims.tolist() == rows[5:6].tolist() and got.shortage == Shortage.FULL
    assert world.found(range(8)) == list(range(8))


def test_a_held_block_does_not_lose_its_volume_copy_even_if_the_arena_has_one() -> None:
    world = World(arena_slabs=1, volume_slabs=(1,))
    rows = world.store(range(8))
    world.store([5], volume=ARENA)
    world.catalog.holds.hold(1, rows[5:6], 10.0)
    assert rows[5] not in world.ask(8).victims


def test_untouched_blocks_go_before_touched_ones() -> None:
    world = World(volume_slabs=(2,))
    world.store(range(16))
    world.catalog.touch(world.rows(0, 1, 2, 9))
    world.read(keys_of(4))
    world.ask(11)
    assert world.found(range(16)) == [0, 1, 2, 4, 9]
    got = world.ask(5)
    assert len(got) == 5 and world.found(range(16)) == [], "a second chance is not a third"


def test_what_lies_behind_the_last_victim_keeps_its_second_chance() -> None:
    world = World(volume_slabs=(1,))
    world.store(range(8))
    world.catalog.touch(world.rows(1, 2))
    world.ask(1)
    assert world.found(range(8)) == list(range(1, 8))
    got = world.ask(5)
    assert world.found(range(8)) == [1, 2]
    world.publish(list(range(20, 25)), list(zip(got.slabs.tolist(), got.slots.tolist(), strict=True)))
    world.ask(1)
    assert world.found([1, 2, *range(20, 25)]) == [2, *range(20, 25)], "the hand that passed them took it"


def test_a_new_slot_size_finds_room_on_a_full_volume_by_recutting_the_coldest_slab() -> None:
    world = World(volume_slabs=(3,))
    world.store(range(24))
    # The first and the last slab are used; the second one is the coldest.
    world.read(keys_of(0, 23))
    got = world.ask(4, LARGE)
    assert got.shortage == Shortage.OPENING and got.victims.shape == (8,)
    assert world.pool().take_wishes() == [Wish(1, LARGE)]
    assert world.found(range(24)) == [*range(8), *range(16, 24)]
    world.pool().ready(1, world.nonce())
    assert len(world.ask(4, LARGE)) == 4


def test_a_new_slot_size_keeps_growing_while_foreign_slabs_are_colder() -> None:
    world = World(volume_slabs=(4,))
    world.store(range(32))
    world.read(keys_of(31))
    world.store(range(100, 112), LARGE)
    assert [slab.slot_bytes for slab in world.pool().slabs] == [LARGE, LARGE, LARGE, SMALL]
    assert world.found(range(32)) == list(range(24, 32))
    # The one that was used after its own first slab is not colder: once that is the only foreign one, the size turns over its own blocks.
    world.read(keys_of(31))
    world.store(range(200, 204), LARGE)
    assert world.found(range(24, 32)) == list(range(24, 32)) and len(world.found(range(100, 112))) == 8


def test_a_slab_with_a_pinned_held_or_reserved_slot_is_not_recut() -> None:
    for protect in ("pin", "hold", "reserve"):
        world = World(volume_slabs=(2,))
        world.store(range(16))
        if protect == "pin":
            world.catalog.pin(world.rows(3))
        elif protect == "hold":
            world.catalog.holds.hold(1, world.rows(3), 10.0)
        else:
            assert world.ask(1).slabs.tolist() == [0]
            world.catalog.touch(world.rows(8))
            world.read(keys_of(8))
        world.ask(1, LARGE)
        assert world.answer() == [1], protect
        assert len(world.found(range(8))) == (7 if protect == "reserve" else 8)
        # With the other slab in use too, there is nothing to re-cut: the new size must wait or turn over what it has.
        assert world.pool().slabs[0].slot_bytes == SMALL


def test_a_few_old_keeps_do_not_hide_the_cold_slabs_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "RECUT_CANDIDATES", 2)
    world = World(volume_slabs=(5,))
    world.store(range(40))
    world.catalog.holds.hold(1, world.rows(0, 8, 16), 10.0)
    answers = [world.ask(1, LARGE).shortage for _ in range(2)]
    assert answers == [Shortage.FULL, Shortage.OPENING], "the second look begins behind the first"
    assert world.answer() == [3]


def test_neighbours_stay_neighbours_when_their_slots_are_reclaimed() -> None:
    world = World(capacity=500, volume_slabs=(4,), slab_bytes=256)
    for first in range(0, 256, 16):
        world.store(range(first, first + 16))
    world.catalog.touch(world.rows(*range(32, 48)))
    for first in range(1000, 1160, 16):
        got = world.ask(16)
        assert len(set(got.slabs.tolist())) == 1
        assert (np.diff(got.slots.astype(np.int64)) == 1).all(), got.slots
        world.publish(list(range(first, first + 16)), list(zip(got.slabs.tolist(), got.slots.tolist(), strict=True)))


def test_the_slots_of_one_request_are_neighbours_behind_the_last_ones() -> None:
    world = World(volume_slabs=(1,), slab_bytes=64)
    world.store(range(16))
    world.catalog.drop(world.rows(1, *range(8, 16)))
    assert world.ask(4).slots.tolist() == [1, 8, 9, 10], "the cursor is at the start of the slab again"
    world.catalog.drop(world.rows(0))
    assert world.ask(2).slots.tolist() == [11, 12], "on from there, not back to a hole"


def test_the_hand_opens_a_closed_slab_before_it_reclaims_in_it() -> None:
    world = World(volume_slabs=(2,))
    world.store(range(16))
    world.close_all()
    got = world.ask(2)
    assert (len(got), got.shortage) == (0, Shortage.OPENING)
    assert world.found(range(16)) == list(range(16)), "nothing is reclaimed in a slab that is not open"
    assert world.pool().take_wishes() == [Wish(0, 0)]
    assert world.ask(2).shortage == Shortage.OPENING and world.pool().take_wishes() == [], "it is asked for once"
    world.pool().ready(0, world.pool().slabs[0].nonce)
    got = world.ask(2)
    assert got.slabs.tolist() == [0, 0] and got.victims.shape == (2,)


def test_free_slots_of_closed_and_closing_slabs_are_not_handed_out() -> None:
    world = World(volume_slabs=(1,))
    world.store(range(4))
    world.pool().closing(world.pool().slabs[0])
    got = world.ask(1)
    assert (len(got), got.shortage) == (0, Shortage.OPENING)
    world.pool().closed(0, clean=True)
    got = world.ask(1)
    assert (len(got), got.shortage) == (0, Shortage.OPENING)
    assert world.answer() == [0]
    assert world.ask(1).slots.tolist() == [4] and len(world.found(range(4))) == 4


def test_the_last_free_slots_of_a_closed_slab_full_of_kept_blocks_are_found() -> None:
    world = World(volume_slabs=(1,), slab_bytes=128)
    world.catalog.holds.hold(1, world.store(range(30)), 10.0)
    world.store([30])
    world.catalog.holds.hold(1, world.rows(30), 10.0)
    world.close_all()
    assert world.ask(1).shortage == Shortage.OPENING
    assert world.answer() == [0]
    assert len(world.ask(2)) == 1


def test_a_roomy_closed_slab_is_opened_before_anything_is_reclaimed() -> None:
    world = World(volume_slabs=(2,))
    world.store(range(16))
    world.close_all()
    world.catalog.drop(world.rows(8, 9))
    assert world.ask(1).shortage == Shortage.OPENING
    assert world.answer() == [1]
    assert world.ask(2).victims.shape == (0,) and world.found(range(8)) == list(range(8))


def test_a_roomy_closed_slab_is_opened_before_another_is_cut() -> None:
    world = World(volume_slabs=(2,))
    world.pool().adopt(0, slot_bytes=SMALL, slot_count=8, nonce=world.nonce())
    world.pool().recovered(0, dirty=False)
    assert world.ask(1).shortage == Shortage.OPENING
    assert world.answer() == [0] and world.pool().cut_count == 1


def test_reserve_says_opening_full_or_too_large() -> None:
    world = World(arena_slabs=1, volume_slabs=(1,))
    assert world.ask(1, HUGE).shortage == Shortage.TOO_LARGE
    assert world.ask(1, HUGE, ARENA).shortage == Shortage.TOO_LARGE
    assert world.ask(1).shortage == Shortage.OPENING
    assert world.ask(1).shortage == Shortage.OPENING, "while the slab is being cut"
    assert world.ask(1, LARGE).shortage == Shortage.OPENING, "the only slab is being cut for another size: not full yet"
    assert world.answer() == [0]
    got = world.ask(9)
    assert (len(got), got.shortage) == (8, Shortage.FULL), "every slot is reserved"
    assert world.ask(1, LARGE).shortage == Shortage.FULL
    assert world.ask(0).shortage == Shortage.NONE
    world.catalog.free_reserved(0, got.slabs, got.slots)
    assert world.ask(8).shortage == Shortage.NONE


def test_a_volume_that_is_still_being_scanned_is_not_called_full() -> None:
    world = World(volume_slabs=(1,))
    world.pool().adopt(0, slot_bytes=SMALL, slot_count=8, nonce=world.nonce())
    assert world.ask(1).shortage == Shortage.OPENING
    assert world.ask(1, LARGE).shortage == Shortage.OPENING
    world.pool().recovered(0, dirty=True)
    assert len(world.ask(1)) == 1


def test_the_next_slab_is_asked_for_while_a_quarter_of_one_is_free() -> None:
    world = World(volume_slabs=(2,))
    world.reserve(6)
    assert world.pool().take_wishes() == []
    world.ask(1)
    assert world.pool().take_wishes() == [Wish(1, SMALL)]


def test_slabs_beyond_the_limit_are_closed_but_never_one_with_reserved_slots() -> None:
    world = World(volume_slabs=(2,), open_slabs_max=1)
    pool = world.pool()
    places = world.reserve(5)
    assert pool.next_to_close() is None, "there is but one"
    rest = world.reserve(3)
    world.store(range(8))
    assert [slab.index for slab in pool.open_slabs()] == [0, 1]
    chosen = pool.next_to_close()
    assert chosen is not None and chosen.index == 1, "slots of slab 0 are being written"
    world.publish(list(range(100, 105)), places)
    assert pool.next_to_close() is chosen
    world.publish(list(range(105, 108)), rest)
    chosen = pool.next_to_close()
    assert chosen is not None and chosen.index == 0, "unused longest"
    pool.closing(chosen)
    assert chosen not in pool.open_slabs() and pool.next_to_close() is None
    pool.closed(0, clean=False)
    assert chosen not in pool.open_slabs(), "the volume may say that it is clean: what is written to it then is not found after a crash"


def test_a_slab_with_room_is_not_closed_before_a_full_one() -> None:
    world = World(volume_slabs=(2,), open_slabs_max=1)
    world.store(range(16))
    world.catalog.drop(world.rows(0, 1, 2))
    chosen = world.pool().next_to_close()
    assert chosen is not None and chosen.index == 1


def test_the_hand_stays_where_it_is_when_a_slab_leaves_or_joins_its_ring() -> None:
    columns = SlabColumns(4)
    slabs = [Slab(index, columns) for index in range(4)]
    ring = Ring()
    for slab in slabs[:3]:
        ring.add(slab)
    ring.step()
    ring.step()
    assert ring.at_hand is slabs[2]
    ring.remove(slabs[1])
    assert ring.at_hand is slabs[2], "one that it had passed leaves"
    ring.add(slabs[3])
    visited = []
    for _ in range(3):
        visited.append(ring.at_hand.index)
        ring.step()
    assert visited == [2, 0, 3], "the one that joined comes last"
    ring.remove(slabs[2])
    assert ring.at_hand is slabs[0], "the one at hand leaves: on to the next"


def test_a_copy_that_went_and_came_back_begins_cold() -> None:
    world = World(arena_slabs=1, volume_slabs=(2,))
    rows = world.store(range(8), volume=ARENA)
    world.store(range(8))
    world.catalog.touch(rows[:1])
    world.catalog.lose(rows[:1], volume=False)
    world.store([0], volume=ARENA)
    assert world.ask(1, volume=ARENA).victims.tolist() == rows[:1].tolist()


def test_a_slab_that_cannot_be_opened_is_left_alone_for_a_while() -> None:
    world = World(volume_slabs=(2,))
    world.store(range(16))
    world.close_all()
    world.ask(1)
    assert world.pool().take_wishes() == [Wish(0, 0)]
    world.pool().failed(0, cut=False)
    assert world.ask(1).shortage == Shortage.OPENING
    assert world.answer() == [1], "the sick slab does not stop every evict"
    assert len(world.ask(1)) == 1 and world.found(range(8)) == list(range(8))
    for _ in range(pool_module.SHUN_TICKS):
        world.ask(1)
    world.ask(1)
    assert world.pool().slabs[0].state == SlabState.PREPARING, "it is tried again"


def test_a_slab_that_cannot_be_cut_is_uncut_again_and_last_in_turn() -> None:
    world = World(volume_slabs=(3,))
    world.ask(1)
    world.pool().take_wishes()
    world.pool().failed(0, cut=True)
    assert world.pool().slabs[0].state == SlabState.UNCUT and world.pool().cut_count == 0
    world.store(range(16))
    assert world.pool().cut_count == 3 or world.pool().slabs[0].state == SlabState.UNCUT
    assert [world.place(0)[0], world.place(8)[0]] == [1, 2]
    world.catalog.check()


def test_the_generation_of_a_slot_rises_with_each_use_and_begins_anew_with_a_new_nonce() -> None:
    world = World(volume_slabs=(1,))
    seen = []
    for _ in range(3):
        world.reserve(0)
        got = world.ask(8)
        if not len(got):
            world.answer()
            got = world.ask(8)
        seen.append(got.generations.tolist())
        world.catalog.free_reserved(0, got.slabs, got.slots)
    world.store(range(8))
    reclaimed = world.ask(2)
    assert seen == [[1] * 8, [2] * 8, [3] * 8] and reclaimed.generations.tolist() == [5, 5]
    world.catalog.free_reserved(0, reclaimed.slabs, reclaimed.slots)
    nonce = world.pool().slabs[0].nonce
    world.reserve(1, LARGE)
    assert world.pool().slabs[0].nonce != nonce and world.pool().slabs[0].generations.tolist() == [1, 0, 0, 0]


def test_a_bounded_sweep_still_finds_the_only_block_that_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victims_module, "CLOCK_STEPS_MAX", 2)
    for warm in (False, True):
        world = World(volume_slabs=(20,))
        rows = world.store(range(160))
        world.catalog.holds.hold(1, np.delete(rows, 150), 10.0)
        world.catalog.touch(rows)
        if not warm:
            world.catalog._volume_referenced[rows[150]] = 0
        assert world.ask(1).victims.tolist() == [rows[150]]
        assert world.ask(1).shortage == Shortage.FULL


def test_where_all_blocks_are_warm_and_the_sweep_is_bounded_victims_are_found_in_closed_slabs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victims_module, "CLOCK_STEPS_MAX", 2)
    world = World(volume_slabs=(12,), open_slabs_max=2)
    rows = world.store(range(96))
    world.close_all()
    world.catalog.touch(rows)
    first = world.ask(3)
    assert first.shortage == Shortage.OPENING and len(world.answer()) == 1
    got = world.ask(3)
    assert len(got) == 3 and got.victims.shape == (3,)


def test_a_pass_over_all_rows_is_made_only_where_the_next_slabs_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victims_module, "CLOCK_STEPS_MAX", 1)
    monkeypatch.setattr(victims_module, "NEAR_SLABS", 4)
    passes = []
    world = World(volume_slabs=(12,))
    pool = world.pool()
    reclaimable = pool._search._reclaimable
    monkeypatch.setattr(pool._search, "_reclaimable", lambda: passes.append(1) or reclaimable())
    rows = world.store(range(96))
    world.catalog.touch(rows)
    assert len(world.ask(3)) == 3 and not passes
    world.catalog.holds.hold(1, np.setdiff1d(np.flatnonzero(world.catalog._volume), rows[90:]).astype(np.uint32), 10.0)
    got = world.ask(3)
    assert len(got) == 3 and set(got.victims.tolist()) <= set(rows[90:].tolist()) and passes


def test_a_publication_of_a_slot_that_is_not_reserved_is_refused() -> None:
    world = World()
    places = world.reserve(2)
    world.publish([1], places[:1])
    with pytest.raises(AssertionError, match="not reserved"):
        world.publish([2], places[:1])
    world.catalog.free_reserved(0, rows_array(places[1][0]), rows_array(places[1][1]))
    with pytest.raises(AssertionError, match="free slot"):
        world.catalog.free_reserved(0, rows_array(places[1][0]), rows_array(places[1][1]))


@pytest.mark.parametrize("volume", [0, ARENA])
def test_a_full_index_reclaims_the_blocks_used_least_though_the_tier_has_room(volume: int) -> None:
    world = World(capacity=20, arena_slabs=10, volume_slabs=(10,))
    for first in range(0, 60, 4):
        assert all(world.store(range(first, first + 4), volume=volume)), "a block was refused"
        world.read(keys_of(*range(4)))
        world.catalog.check()
    assert world.found(range(4)) == [0, 1, 2, 3], "what is used stays"
    assert world.found(range(56, 60)) == [56, 57, 58, 59]
    assert len(world.catalog.index) == 20


def test_a_full_index_of_kept_blocks_refuses_and_loses_none() -> None:
    world = World(capacity=8, volume_slabs=(4,))
    rows = world.store(range(8))
    world.catalog.holds.hold(1, rows, 100.0)
    assert world.store(range(8, 10)).tolist() == [0, 0]
    assert world.found(range(10)) == list(range(8))
    world.catalog.check()

"""An arena over several NUMA nodes: near slots first, and nothing lost for it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadd.catalog import victims as victims_module
from offloadd.catalog.pool import Reservation, Shortage
from offloadd.catalog.victims import ANY_NODE, REMOTE_AGE_RATIO

from .world import ARENA, LARGE, SMALL, World, rows_array


def two_nodes(slabs_each: int = 2) -> World:
    """Slabs of eight small slots: the first half on node 0, the others on node 1."""
    return World(arena_nodes=(0,) * slabs_each + (1,) * slabs_each, volume_slabs=())


def ask(world: World, count: int, node: int, slot_bytes: int = SMALL) -> Reservation:
    return world.catalog.reserve_arena(slot_bytes, count, node)


def nodes_of(world: World, reservation: Reservation) -> list[int]:
    return [world.pool(ARENA).slabs[slab].node for slab in reservation.slabs.tolist()]


def fill(world: World, blocks: range, node: int, slot_bytes: int = SMALL) -> None:
    got = ask(world, len(blocks), node, slot_bytes)
    assert len(got) == len(blocks)
    world.publish(list(blocks), list(zip(got.slabs.tolist(), got.slots.tolist(), strict=True)), ARENA)


@pytest.mark.parametrize("node", [0, 1])
def test_slots_come_from_the_node_that_is_named_while_it_has_free_ones(node: int) -> None:
    world = two_nodes()
    assert nodes_of(world, ask(world, 16, node)) == [node] * 16


def test_free_slots_elsewhere_come_before_a_victim_near_by() -> None:
    world = two_nodes()
    fill(world, range(16), 0)
    got = ask(world, 16, 0)
    assert nodes_of(world, got) == [1] * 16 and not got.victims.size
    assert world.pool(ARENA).remote_count(got.slabs, 0) == 16 and world.pool(ARENA).remote_count(got.slabs, 1) == 0


@pytest.mark.parametrize("node", [0, 1])
def test_victims_near_by_come_before_those_elsewhere(node: int) -> None:
    world = two_nodes()
    fill(world, range(16), 0)
    fill(world, range(16, 32), 1)
    got = ask(world, 10, node)
    assert nodes_of(world, got) == [node] * 10 and got.victims.size == 10


def test_nothing_is_refused_while_another_node_has_something_to_reclaim() -> None:
    world = two_nodes()
    fill(world, range(16), 0)
    fill(world, range(16, 32), 1)
    world.catalog.holds.hold(1, world.rows(*range(14)), 10.0)
    got = ask(world, 10, 0)
    assert sorted(nodes_of(world, got)) == [0] * 2 + [1] * 8
    assert world.found(range(14)) == list(range(14))
    got = ask(world, 20, 0)
    assert (len(got), got.shortage) == (8, Shortage.FULL), "all but what is kept"


def test_the_last_block_that_may_go_is_found_on_whichever_node_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither the hand nor a look around it comes that far in one reservation.
    monkeypatch.setattr(victims_module, "CLOCK_STEPS_MAX", 1)
    monkeypatch.setattr(victims_module, "NEAR_SLABS", 0)
    world = two_nodes()
    fill(world, range(16), 0)
    fill(world, range(16, 32), 1)
    world.catalog.touch(world.rows(*range(32)))
    world.catalog.holds.hold(1, world.rows(*range(31)), 10.0)
    got = ask(world, 2, 0)
    assert (nodes_of(world, got), got.shortage) == ([1], Shortage.FULL)


def test_who_names_no_node_fills_all_alike() -> None:
    world = two_nodes()
    assert sorted(nodes_of(world, ask(world, 16, ANY_NODE))) == [0] * 8 + [1] * 8
    assert sorted(nodes_of(world, ask(world, 16, 7))) == [0] * 8 + [1] * 8, "nor who names one that the arena does not lie on"
    assert world.pool(ARENA).remote_count(rows_array(0, 3), 7) == 0


def test_two_busy_nodes_reclaim_at_home() -> None:
    world = two_nodes()
    fill(world, range(16), 0)
    fill(world, range(16, 32), 1)
    for turn in range(40):
        got = ask(world, 4, turn % 2)
        assert nodes_of(world, got) == [turn % 2] * 4, turn
        world.publish(list(range(32 + 4 * turn, 36 + 4 * turn)), list(zip(got.slabs.tolist(), got.slots.tolist(), strict=True)), ARENA)
    world.catalog.check()


def test_what_an_idle_node_holds_does_not_stay_for_ever_while_another_is_busy() -> None:
    # Kept blocks there must not draw all evicts away either: these slabs stay the coldest whatever happens.
    world = two_nodes(slabs_each=3)
    fill(world, range(24), 1)
    fill(world, range(24, 48), 0)
    world.catalog.holds.hold(1, world.rows(*range(8)), 10.0)
    homes = []
    for turn in range(30 * REMOTE_AGE_RATIO):
        got = ask(world, 4, 0)
        homes += nodes_of(world, got)
        world.publish(list(range(48 + 4 * turn, 52 + 4 * turn)), list(zip(got.slabs.tolist(), got.slots.tolist(), strict=True)), ARENA)
    assert world.found(range(24)) == list(range(8)), "all but the kept ones have gone"
    assert 16 <= homes.count(1) < len(homes) // 2, "and home is still the rule"
    world.catalog.check()


def test_a_slab_of_another_size_is_cut_anew_at_home_first() -> None:
    world = two_nodes(slabs_each=1)
    fill(world, range(8), 1)
    fill(world, range(8, 16), 0)
    assert nodes_of(world, ask(world, 4, 0, LARGE)) == [0] * 4
    assert world.found(range(16)) == list(range(8)), "though the other slab is colder"


def test_slabs_of_one_node_are_as_those_of_none() -> None:
    plain, one = World(arena_slabs=3, volume_slabs=()), World(arena_nodes=(1, 1, 1), volume_slabs=())
    for world in (plain, one):
        world.store(range(20), volume=ARENA)
    assert plain.pool(ARENA).nodes == one.pool(ARENA).nodes == ()
    for count in (3, 8, 30):
        first, second = ask(plain, count, ANY_NODE), ask(one, count, 1)
        assert [getattr(first, name).tolist() for name in ("slabs", "slots", "victims")] == [
            getattr(second, name).tolist() for name in ("slabs", "slots", "victims")
        ]
        assert one.pool(ARENA).remote_count(second.slabs, 1) == 0


def test_use_is_told_by_node() -> None:
    world = two_nodes()
    fill(world, range(3), 1)
    fill(world, range(3, 4), 0, LARGE)
    assert world.pool(ARENA).bytes_by_node() == [(0, 2, LARGE), (1, 2, 3 * SMALL)]


STEPS = st.lists(
    st.tuples(
        st.sampled_from([-1, 0, 1, 2]), st.integers(1, 20), st.sampled_from([SMALL, LARGE]), st.sampled_from(["store", "keep", "abandon", "hold", "touch"])
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(nodes=st.lists(st.integers(0, 2), min_size=1, max_size=8), steps=STEPS)
def test_whatever_is_asked_for_near_comes_first_nothing_is_lost_and_no_slot_goes_out_twice(nodes: list[int], steps: list[tuple[int, int, int, str]]) -> None:
    """Beside a world of the same slabs without nodes: whatever comes back there, as much comes back here."""
    world = World(capacity=400, arena_nodes=tuple(nodes), volume_slabs=())
    pool = world.pool(ARENA)
    out: set[tuple[int, int]] = set()
    pending: list[tuple[list[tuple[int, int]], int]] = []
    number = 0
    for node, count, slot_bytes, what in steps:
        free = {one: free_slots(world, slot_bytes, one) for one in set(nodes)}
        reclaimable = sum(int((~pool._protected(live)).sum()) for slab in pool.slabs if slab.slot_bytes == slot_bytes and (live := live_rows(slab)).size)
        got = ask(world, count, node, slot_bytes)
        places = list(zip(got.slabs.tolist(), got.slots.tolist(), strict=True))
        assert len(set(places)) == len(places) and not out & set(places), "a slot went out twice"
        assert len(got) >= min(count, sum(free.values()) + reclaimable), "refused, though there was room"
        homes = nodes_of(world, got)
        if node in pool.nodes:
            assert homes.count(node) >= min(count, free[node]), "a far slot, though a near one was free"
        if sum(free.values()) >= count:
            assert not got.victims.size, "a victim, though slots were free"
        out |= set(places)
        pending.append((places, slot_bytes))
        if what == "abandon":
            places, _ = pending.pop()
            world.catalog.free_reserved(-1, rows_array(*(slab for slab, _ in places)), rows_array(*(slot for _, slot in places)))
            out -= set(places)
        elif what != "keep":
            places, _ = pending.pop(0)
            blocks = list(range(number, number + len(places)))
            number += len(places)
            if places:
                rows = world.publish(blocks, places, ARENA)
                if what == "hold":
                    world.catalog.holds.hold(1, rows[::3], 10.0)
                elif what == "touch":
                    world.catalog.touch(rows)
            out -= set(places)
        world.catalog.check()


def live_rows(slab):  # type: ignore[no-untyped-def]
    return slab.rows[(slab.rows != 0) & (slab.rows != 0xFFFFFFFF)]


def free_slots(world: World, slot_bytes: int, node: int) -> int:
    """Free slots of this size on a node, those of slabs that are not cut yet included."""
    pool = world.pool(ARENA)
    on_node = [slab for slab in pool.slabs if (slab.node == node or not pool.nodes)]
    return int(
        np.sum([slab.free_count if slab.slot_bytes == slot_bytes else world.slot_count(slot_bytes) * (not slab.slot_bytes) for slab in on_node], initial=0)
    )

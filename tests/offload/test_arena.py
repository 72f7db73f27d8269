"""The arena as the front makes it: which NUMA node each slab lies on."""

import os

import pytest

from offloadd.mover.messages import ArenaPart
from offloadd.offload.arena import make_arena, spread_slabs
from offloadd.units import GIB, MIB


def test_slabs_are_spread_as_the_memory_is() -> None:
    assert spread_slabs(5, [(0, 64 * GIB), (1, 64 * GIB)]) == (0, 0, 1, 1, 1)
    assert spread_slabs(8, [(0, 3 * GIB), (2, GIB)]) == (0,) * 6 + (2,) * 2
    assert spread_slabs(9, [(0, GIB), (1, GIB), (2, GIB)]) == (0,) * 3 + (1,) * 3 + (2,) * 3


@pytest.mark.parametrize("nodes", [[], [(1, GIB)], [(0, 1000 * GIB), (1, GIB)]])
def test_where_there_is_nothing_to_choose_slabs_have_no_node(nodes: list[tuple[int, int]]) -> None:
    assert spread_slabs(4, nodes) == ()
    assert spread_slabs(1, [(0, GIB), (1, GIB)]) == ()


def test_an_arena_has_a_part_for_each_node_and_the_parts_are_the_whole() -> None:
    arena = make_arena(5 * 16 * MIB, 16 * MIB, huge_pages="never", nodes=[(3, GIB), (7, GIB)])
    assert arena.parts == (ArenaPart(3, 2 * 16 * MIB), ArenaPart(7, 3 * 16 * MIB))
    os.close(arena.fd)

"""A copy plan names exactly the bytes that transfer.gather moves, in as few copies as its knobs allow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.cuda.copy_plan import CopyPlan, plan_copies
from offloadd.cuda.region import CudaRegion, MemoryPart, Places
from offloadd.errors import InvalidRequest
from offloadd.model.region import Layout, Plane

from .layouts import MoveCase, cases, host_result

PITCH_BYTES_MAX = 2**31 - 1


def copy_count(plan: CopyPlan) -> int:
    return len(plan.sizes) + sum(len(some.engine) for some in plan.rectangles)


def carry_out(plan: CopyPlan, source: np.ndarray, source_side: str, target: np.ndarray) -> np.ndarray:
    """The target after the plan; how often each byte of it was written must be at most once."""
    written = np.zeros(len(target), np.int64)
    copies = [(engine, ours, size) for engine, ours, size in zip(plan.engine.tolist(), plan.ours.tolist(), plan.sizes.tolist(), strict=True)]
    for some in plan.rectangles:
        assert some.row_count >= 2
        for row in range(some.row_count):
            for engine, ours in zip(some.engine.tolist(), some.ours.tolist(), strict=True):
                copies.append((engine + row * some.engine_pitch_bytes, ours + row * some.our_pitch_bytes, some.row_bytes))
    result = target.copy()
    for engine, ours, size in copies:
        begin, to = (engine, ours) if source_side == "engine" else (ours, engine)
        assert size > 0 and 0 <= begin <= len(source) - size and 0 <= to <= len(target) - size
        result[to : to + size] = source[begin : begin + size]
        written[to : to + size] += 1
    assert written.max(initial=0) <= 1
    return result


@given(cases(), st.sampled_from([1, 2, 3, 8]), st.sampled_from([0, 40, PITCH_BYTES_MAX]), st.sampled_from(["engine", "ours"]))
def test_a_plan_moves_what_the_host_moves(case: MoveCase, rows_min: int, pitch_bytes_max: int, source_side: str) -> None:
    memories = [MemoryPart(offset, size) for offset, size in zip(case.memory_offsets, case.memory_bytes, strict=True)]
    region = CudaRegion.over(case.layout, memories, planes_max=1000)
    places = Places(0, len(case.ours), case.places, case.stride_bytes, on_device=False)
    plan = plan_copies(region, case.blocks, places, case.first, case.last, rows_min=rows_min, pitch_bytes_max=pitch_bytes_max)
    source, target = (case.engine, case.ours) if source_side == "engine" else (case.ours, case.engine)
    assert (carry_out(plan, source, source_side, target) == host_result(case, out=source_side == "engine")).all()
    for some in plan.rectangles:
        assert some.row_count >= rows_min
        assert some.row_bytes <= min(some.engine_pitch_bytes, some.our_pitch_bytes) and max(some.engine_pitch_bytes, some.our_pitch_bytes) <= pitch_bytes_max


def plan(layout: Layout, blocks: list[int], offsets: list[int], stride_bytes: int, *, rows_min: int = 8, pitch_bytes_max: int = PITCH_BYTES_MAX) -> CopyPlan:
    region = CudaRegion.over(layout, [MemoryPart(0, 1 << 40)], planes_max=1000)
    places = Places(0, 1 << 40, np.array(offsets), stride_bytes, on_device=False)
    return plan_copies(region, np.array(blocks, dtype="<u4"), places, 0, None, rows_min=rows_min, pitch_bytes_max=pitch_bytes_max)


def layers(count: int, blocks: int, piece: int) -> Layout:
    """K and V of each layer one after the other, all blocks of a plane together."""
    return Layout(blocks, tuple(Plane(0, number * blocks * piece, piece, piece) for number in range(2 * count)))


def test_one_block_of_many_layers_is_one_copy() -> None:
    assert copy_count(plan(layers(32, 1000, 32768), [7], [4096], 1 << 22)) == 1


def test_neighbouring_blocks_are_as_few_copies_as_the_shorter_side_has() -> None:
    few = plan(layers(32, 1000, 32768), [7, 8, 9], [0, 1 << 22, 2 << 22], 1 << 22)
    many = plan(layers(4, 1000, 32768), list(range(100)), [number << 20 for number in range(100)], 1 << 20)
    assert (copy_count(few), copy_count(many)) == (3, 8)


def test_neighbours_that_touch_on_both_sides_are_one_copy_of_all() -> None:
    made = plan(Layout(100, (Plane(0, 0, 655360, 655360),)), list(range(10, 60)), [number * 655360 for number in range(50)], 655360)
    assert (made.rectangles, made.sizes.tolist()) == ([], [50 * 655360])


def test_pieces_further_apart_than_the_pitch_limit_are_single_copies() -> None:
    far = layers(32, 100_000, 32768)
    assert plan(far, [7], [0], 1 << 22).rectangles == []
    assert len(plan(far, [7], [0], 1 << 22).sizes) == 64
    near = 100_000 * 32768
    assert copy_count(plan(far, [7], [0], 1 << 22, pitch_bytes_max=near)) == 1
    assert copy_count(plan(far, [7], [0], 1 << 22, pitch_bytes_max=near - 1)) == 64


def test_copies_do_not_reach_from_one_memory_into_the_next() -> None:
    layout = Layout(4, (Plane(0, 0, 16, 16), Plane(1, 0, 16, 16)))
    region = CudaRegion.over(layout, [MemoryPart(0, 64), MemoryPart(64, 64)], planes_max=2)
    assert [(group.offset_bytes, group.plane_count) for group in region.groups] == [(0, 1), (64, 1)]


def test_a_plane_that_ends_behind_its_allocation_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="plane 0 ends at byte 64; its memory 0 has 63 bytes"):
        CudaRegion.over(Layout(4, (Plane(0, 0, 16, 16),)), [MemoryPart(0, 63)], planes_max=1)


@pytest.mark.parametrize(("offset", "size"), [(-1, 10), (0, 101), (91, 10), (100, 1), (0, 0)])
def test_a_part_outside_its_allocation_is_refused(offset: int, size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{size} bytes at offset {offset} is outside its allocation of 100 bytes"):
        MemoryPart.of(MemoryPart(4096, 100), offset, size)
    assert MemoryPart.of(MemoryPart(4096, 100), 90, 10) == MemoryPart(4186, 10)


REGION = CudaRegion.over(Layout(4, (Plane(0, 0, 10, 10),)), [MemoryPart(0, 40)], planes_max=1)


@pytest.mark.parametrize(
    ("blocks", "offsets", "first", "last", "text"),
    [
        ([2, 4], [0, 10], 0, None, "block index 4 is outside the region of 4 blocks"),
        ([-1, 2], [0, 10], 0, None, "block index -1 is outside the region of 4 blocks"),
        ([1], [0, 10], 0, None, "1 blocks can't go to 2 places"),
        ([1], [0], 0, 11, "payload bytes 0 to 11 are no part of a payload of 10 bytes"),
        ([1], [0], -1, 5, "payload bytes -1 to 5 are no part of a payload of 10 bytes"),
        ([1], [0], 5, 5, "payload bytes 5 to 5 are no part of a payload of 10 bytes"),
        ([1, 2], [0, 91], 0, None, "a payload of 10 bytes at offset 91 is outside our memory of 100 bytes"),
        ([1, 2], [-1, 10], 0, None, "a payload of 10 bytes at offset -1 is outside our memory of 100 bytes"),
    ],
)
def test_numbers_out_of_range_are_named(blocks: list[int], offsets: list[int], first: int, last: int | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_copies(REGION, np.array(blocks), Places(0, 100, np.array(offsets), 10, on_device=False), first, last, rows_min=2, pitch_bytes_max=100)


def test_no_blocks_are_no_copies() -> None:
    none = np.empty(0, np.int64)
    assert copy_count(plan_copies(REGION, none, Places(0, 100, none, 10, on_device=False), 0, None, rows_min=2, pitch_bytes_max=100)) == 0

"""A sample has the geometry of its region, is small, and is the same for all regions of one shape."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.cuda.region import CudaRegion, MemoryPart
from offloadd.cuda.sample import PLANES_MAX, SAMPLE_BLOCKS_MAX, SAMPLE_BYTES, SAMPLE_EXTENT_BYTES, sample_of
from offloadd.memory.planes import PlaneGroup
from offloadd.model.region import Layout, Plane
from offloadd.units import KIB, MIB

from .layouts import layouts

BASES = st.integers(1, 1 << 40)


def region_of(layout: Layout, bases: list[int]) -> CudaRegion:
    return CudaRegion.over(layout, [MemoryPart(base, 1 << 50) for base in bases], planes_max=1000)


def pieces(region: CudaRegion) -> list[tuple[int, int]]:
    """Beginning and end of each piece of each block."""
    found = []
    for group in region.groups:
        for plane in range(group.plane_count):
            for block in range(region.block_count):
                begin = group.offset_bytes + plane * group.plane_step_bytes + block * group.block_stride_bytes
                found.append((begin, begin + group.piece_bytes))
    return sorted(found)


@given(layouts(), st.lists(BASES, min_size=12, max_size=12, unique=True))
def test_pieces_do_not_overlap_and_lie_within_the_extent(layout: Layout, bases: list[int]) -> None:
    sample = sample_of(region_of(layout, sorted(base * (1 << 12) for base in bases)))
    assert sample is not None
    found = pieces(sample)
    assert found[0][0] >= 0 and found[-1][1] <= SAMPLE_EXTENT_BYTES
    assert all(before[1] <= after[0] for before, after in pairwise(found))
    assert sample.block_count * sample.payload_bytes <= max(SAMPLE_BYTES, sample.payload_bytes) and 1 <= sample.block_count <= SAMPLE_BLOCKS_MAX


@given(layouts(), st.lists(BASES, min_size=12, max_size=12, unique=True))
def test_pieces_counts_touches_and_alignments_are_those_of_the_region(layout: Layout, bases: list[int]) -> None:
    region = region_of(layout, bases)
    sample = sample_of(region)
    assert sample is not None and sample.payload_bytes == region.payload_bytes
    for real, small in zip(region.groups, sample.groups, strict=True):
        assert (real.plane_count, real.piece_bytes) == (small.plane_count, small.piece_bytes)
        assert (real.block_stride_bytes == real.piece_bytes) == (small.block_stride_bytes == small.piece_bytes)
        assert real.block_stride_bytes % 256 == small.block_stride_bytes % 256
        assert real.plane_step_bytes % 256 == small.plane_step_bytes % 256
        assert (real.plane_step_bytes < 0) == (small.plane_step_bytes < 0)
        lowest_real, lowest_small = (one.offset_bytes + min(0, (one.plane_count - 1) * one.plane_step_bytes) for one in (real, small))
        assert real.plane_step_bytes < 0 or lowest_real % 256 == lowest_small % 256


def engine_region(block_count: int, base: int, *, piece_bytes: int = 4 * KIB) -> CudaRegion:
    """K and V of 32 layers, each an allocation of its own."""
    layout = Layout(block_count, tuple(Plane(layer, half * block_count * piece_bytes, piece_bytes, piece_bytes) for layer in range(32) for half in range(2)))
    return region_of(layout, [base + layer * 3 * block_count * piece_bytes for layer in range(32)])


def test_regions_of_one_shape_have_one_sample_wherever_they_lie_and_however_long() -> None:
    sample = sample_of(engine_region(1000, 1 << 30))
    assert sample == sample_of(engine_region(70_000, 5 << 40)) and sample is not None
    assert sample.block_count == 16
    assert sample != sample_of(engine_region(1000, (1 << 30) + 8)), "another alignment is another shape"
    assert sample != sample_of(engine_region(1000, 1 << 30, piece_bytes=8 * KIB))


def test_a_long_block_is_sampled_by_its_beginning() -> None:
    sample = sample_of(region_of(Layout(9, (Plane(0, 0, 40 * MIB, 33 * MIB), Plane(1, 0, 40 * MIB, 7 * MIB))), [0, 1 << 40]))
    assert sample is not None
    assert (sample.payload_bytes, sample.block_count) == (SAMPLE_BYTES, 1)
    assert [group.piece_bytes for group in sample.groups] == [SAMPLE_BYTES]


def test_pieces_with_gaps_fit_with_fewer_blocks() -> None:
    groups = tuple(PlaneGroup(number * (1 << 20) + 255, 1, 0, 1 << 20, 10) for number in range(PLANES_MAX))
    sample = sample_of(CudaRegion(groups, 1000, 10 * len(groups)))
    assert sample is not None and 1 <= sample.block_count < SAMPLE_BLOCKS_MAX
    assert pieces(sample)[-1][1] <= SAMPLE_EXTENT_BYTES


def test_a_region_of_more_planes_than_the_limit_has_no_sample() -> None:
    groups = tuple(PlaneGroup(number * (1 << 20), 256, 300, 1 << 20, 1) for number in range(PLANES_MAX // 256))
    assert sample_of(CudaRegion(groups, 8, PLANES_MAX)) is not None
    assert sample_of(CudaRegion((*groups, replace(groups[0], plane_count=1)), 8, PLANES_MAX + 1)) is None


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_blocks_are_as_many_as_the_region_has_at_most(count: int) -> None:
    sample = sample_of(region_of(Layout(count, (Plane(0, 0, 1 * KIB, 1 * KIB),)), [0]))
    assert sample is not None and sample.block_count == min(count, SAMPLE_BLOCKS_MAX)

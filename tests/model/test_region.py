"""No block index below block_count can address outside the memory, and no two blocks share a byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.errors import InvalidRequest
from offloadd.model.region import Layout, Plane, validate_layout

PLANES = st.builds(Plane, memory=st.integers(0, 2), offset_bytes=st.integers(-2, 40), block_stride_bytes=st.integers(0, 24), block_bytes=st.integers(-1, 12))


@given(st.integers(-1, 4), st.lists(PLANES, max_size=3))
def test_an_accepted_layout_stays_inside_its_memories_and_never_overlaps_itself(block_count: int, planes: list[Plane]) -> None:
    layout, sizes = Layout(block_count, tuple(planes)), (64, 48)
    try:
        validate_layout(layout, sizes, planes_max=3)
    except InvalidRequest:
        return
    touched: set[tuple[int, int]] = set()
    for block in range(block_count):
        for plane in planes:
            for offset in range(plane.block_bytes):
                place = (plane.memory, plane.offset_bytes + block * plane.block_stride_bytes + offset)
                assert 0 <= place[1] < sizes[plane.memory]
                assert place not in touched
                touched.add(place)


@pytest.mark.parametrize(
    "planes",
    [
        # per layer, one after the other; K and V apart in two memories; cross-layer; K and V interleaved in each block; padding behind each block
        [Plane(0, layer * 400, 100, 100) for layer in range(3)],
        [Plane(memory, layer * 400, 100, 100) for layer in range(3) for memory in range(2)],
        [Plane(0, 0, 300, 300)],
        [Plane(0, 0, 200, 100), Plane(0, 100, 200, 100)],
        [Plane(0, 8, 130, 100)],
    ],
)
def test_the_layouts_of_engines_are_accepted(planes: list[Plane]) -> None:
    validate_layout(Layout(4, tuple(planes)), (1200, 1200), planes_max=6)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(0, (Plane(0, 0, 8, 8),)), "block_count 0"),
        (Layout(4, ()), "no planes"),
        (Layout(4, (Plane(0, 0, 8, 8),) * 4), "4 planes; planes_per_region_max is 3"),
        (Layout(4, (Plane(2, 0, 8, 8),)), "memory 2; the region has 2"),
        (Layout(4, (Plane(0, 0, 8, 0),)), "block_bytes 0"),
        (Layout(4, (Plane(0, -1, 8, 8),)), "offset_bytes -1"),
        (Layout(4, (Plane(0, 0, 7, 8),)), "block_stride_bytes 7 below its block_bytes 8"),
        (Layout(4, (Plane(0, 33, 8, 8),)), "ends at byte 65; its memory 0 has 64 bytes"),
        (Layout(4, (Plane(0, 0, 8, 8), Plane(0, 4, 8, 4))), "planes 0 and 1 overlap"),
    ],
)
def test_a_refusal_names_the_number_and_the_limit(layout: Layout, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        validate_layout(layout, (64, 64), planes_max=3)

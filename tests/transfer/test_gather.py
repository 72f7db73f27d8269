"""Gather and scatter move exactly the bytes that the layout's formula names, whatever the layout."""

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from offloadd.memory.planes import merge_planes, plane_views
from offloadd.model.region import Layout, Plane, validate_layout
from offloadd.transfer.combine import combine
from offloadd.transfer.gather import Payloads, block_crc


def reference_positions(layout, memory_offsets, block):
    """Where each payload byte of a block lies, one byte at a time."""
    return [
        memory_offsets[plane.memory] + plane.offset_bytes + block * plane.block_stride_bytes + byte
        for plane in layout.planes
        for byte in range(plane.block_bytes)
    ]


@st.composite
def layouts(draw):
    """A layout, the offsets of its memories, and the bytes of all of them."""
    kind = draw(st.sampled_from(["apart", "per_layer", "cross_layer", "interleaved", "mixed"]))
    blocks = draw(st.integers(1, 9))
    piece = draw(st.sampled_from([1, 3, 16, 100, 1000]))
    layers = draw(st.integers(1, 5))
    gap = draw(st.sampled_from([0, 1, 24]))
    if kind == "apart":
        planes = [Plane(0, 0, piece + gap, piece), Plane(1, 7, piece + gap, piece)]
    elif kind == "per_layer":
        planes = [Plane(layer, half * blocks * piece, piece, piece) for layer in range(layers) for half in range(2)]
    elif kind == "cross_layer":
        planes = [Plane(0, gap + layer * piece, layers * piece, piece) for layer in range(layers)]
    elif kind == "interleaved":
        stride = layers * (piece + gap) + 5
        planes = [Plane(0, layer * (piece + gap), stride, piece) for layer in draw(st.permutations(range(layers)))]
    else:
        planes = [Plane(0, 0, piece, piece), Plane(1, 2, 9, 4), Plane(0, blocks * piece + gap, piece, piece), Plane(1, 9 * blocks + 10, 13, 13)]
    layout = Layout(blocks, tuple(planes))
    sizes = []
    for memory in range(max(plane.memory for plane in planes) + 1):
        sizes.append(max(p.offset_bytes + (blocks - 1) * p.block_stride_bytes + p.block_bytes for p in planes if p.memory == memory))
    validate_layout(layout, tuple(sizes), planes_max=100)
    step = max(sizes) + draw(st.integers(0, 3))
    return layout, [number * step for number in range(len(sizes))], step * len(sizes)


@st.composite
def cases(draw):
    layout, offsets, total = draw(layouts())
    chosen = draw(st.lists(st.integers(0, layout.block_count - 1), min_size=1, unique=True))
    first = draw(st.integers(0, layout.payload_bytes - 1))
    last = draw(st.one_of(st.none(), st.integers(first + 1, layout.payload_bytes)))
    spread = draw(st.integers(0, 3))
    return layout, offsets, total, chosen, first, last, spread


def _payloads(layout, chosen, spread, holes):
    stride = layout.payload_bytes + spread
    places = np.cumsum([0] + [stride + (1 if index % 3 == 2 and holes else 0) for index in range(len(chosen) - 1)])
    return Payloads(np.random.default_rng(3).integers(0, 256, int(places[-1]) + stride, dtype=np.uint8), places, stride)


@given(cases(), st.booleans())
def test_gather_takes_exactly_the_bytes_of_the_formula(moves, case, holes):
    layout, memory_offsets, total, chosen, first, last, spread = case
    memory = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
    views = plane_views(memory, layout, memory_offsets)
    target = _payloads(layout, chosen, spread, holes)
    want, before = target.buffer.copy(), memory.copy()
    for block, place in zip(chosen, target.offsets.tolist(), strict=True):
        for at, position in enumerate(reference_positions(layout, memory_offsets, block)[first:last]):
            want[place + at] = memory[position]
    moves.gather(views, np.array(chosen, dtype="<u4"), target, first, last)
    assert (target.buffer == want).all() and (memory == before).all()


@given(cases(), st.booleans())
def test_scatter_changes_exactly_the_bytes_of_the_formula(moves, case, holes):
    layout, memory_offsets, total, chosen, first, last, spread = case
    memory = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
    views = plane_views(memory, layout, memory_offsets)
    source = _payloads(layout, chosen, spread, holes)
    want, before = memory.copy(), source.buffer.copy()
    for block, place in zip(chosen, source.offsets.tolist(), strict=True):
        for at, position in enumerate(reference_positions(layout, memory_offsets, block)[first:last]):
            want[position] = source.buffer[place + at]
    moves.scatter(views, np.array(chosen, dtype="<u4"), source, first, last)
    assert (memory == want).all() and (source.buffer == before).all()


@given(cases())
def test_the_checksum_in_place_is_that_of_the_payload(case):
    layout, memory_offsets, total, chosen, first, last, _ = case
    memory = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
    views = plane_views(memory, layout, memory_offsets)
    positions = reference_positions(layout, memory_offsets, chosen[0])[first:last]
    assert block_crc(views, chosen[0], first, last) == crc32c(memory[positions].tobytes())


@given(layouts())
def test_merging_planes_keeps_their_bytes_and_order(case):
    layout, memory_offsets, _ = case
    for block in range(layout.block_count):
        merged = [
            group.offset_bytes + plane * group.plane_step_bytes + block * group.block_stride_bytes + byte
            for group in merge_planes(layout, memory_offsets)
            for plane in range(group.plane_count)
            for byte in range(group.piece_bytes)
        ]
        assert merged == reference_positions(layout, memory_offsets, block)


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_a_block_outside_the_region_moves_nothing(moves, name):
    memory = np.arange(100, dtype=np.uint8)
    views = plane_views(memory[:40], Layout(4, (Plane(0, 0, 10, 10),)), [0])
    payloads = Payloads(np.full(60, 255, dtype=np.uint8), np.arange(3) * 20, 20)
    with pytest.raises(ValueError, match="block index 4 is outside the region of 4 blocks"):
        getattr(moves, name)(views, np.array([2, 3, 4], dtype="<u4"), payloads)
    assert (memory == np.arange(100)).all() and (payloads.buffer == 255).all()


@given(st.binary(max_size=3000), st.binary(max_size=3000), st.binary(max_size=10))
def test_combined_checksums_are_those_of_the_whole(first, second, third):
    assert combine(combine(crc32c(first), crc32c(second), len(second)), crc32c(third), len(third)) == crc32c(first + second + third)


def test_a_changed_part_changes_the_combined_checksum():
    parts = [bytes([number]) * 4096 for number in range(8)]
    whole = 0
    for part in parts:
        whole = combine(whole, crc32c(part), 4096)
    for number in range(8):
        for bit in (0, 1, 17, 4096 * 8 - 1):
            changed = bytearray(b"".join(parts))
            changed[number * 4096 + bit // 8] ^= 1 << bit % 8
            assert crc32c(changed) != whole

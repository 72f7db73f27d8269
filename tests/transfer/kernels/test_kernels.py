"""Every implementation of the kernels moves exactly the bytes of the layout's formula, and computes the CPU's CRC32C."""

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from offloadd.model.region import Layout, Plane, validate_layout
from offloadd.transfer.kernels.base import PAYLOAD_BYTES_MAX, Blocks, Region, Slots, plane_table
from offloadd.transfer.kernels.source import COPY_TILE_BYTES, CRC_PIECE_BYTES, CRC_ROW_BYTES
from offloadd.units import KIB, MIB


def _random(count, seed=1):
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@st.composite
def layouts(draw):
    """A layout, where each of its memories begins, and how long the buffer of all of them is."""
    kind = draw(st.sampled_from(["apart", "per_layer", "cross_layer", "interleaved", "mixed"]))
    blocks = draw(st.integers(1, 6))
    piece = draw(st.sampled_from([1, 3, 4, 8, 15, 16, 17, 64, 100, 511, 2047, 2048, 2049, 4096, 5000, COPY_TILE_BYTES + 24]))
    layers = draw(st.integers(1, 5))
    gap = draw(st.sampled_from([0, 1, 4, 8, 24]))
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
    begin = draw(st.integers(0, 17))
    step = max(sizes) + draw(st.integers(0, 17))
    return layout, [begin + number * step for number in range(len(sizes))], begin + step * (len(sizes) - 1) + sizes[-1]


class Case:
    """A layout, blocks in any order with their flags, and slots; with where each moved byte lies on both sides.

    `order`: at which multiple of the stride each block's slot lies, told by offsets; None for slots in the blocks' order.
    """

    def __init__(self, layout, begins, total, chosen, good, window, place, spread, order=None):
        self.layout, self.begins, self.chosen, self.good, self.window = layout, begins, chosen, good, window
        first, last = window[0], layout.payload_bytes if window[1] is None else window[1]
        self.place, self.stride = place, last - first + spread
        self.order = order
        self.memory = _random(total)
        self.slots = _random(place + (len(chosen) - 1) * self.stride + last - first, seed=2)
        self.good_after = [int(flag and block < layout.block_count) for flag, block in zip(good, chosen, strict=True)]
        engine, ours = [], []
        for number, block in enumerate(chosen):
            if self.good_after[number]:
                places = [
                    begins[plane.memory] + plane.offset_bytes + block * plane.block_stride_bytes + byte
                    for plane in layout.planes
                    for byte in range(plane.block_bytes)
                ]
                engine += places[first:last]
                slot = place + (order[number] if order else number) * self.stride
                ours += range(slot, slot + last - first)
        self.engine_bytes, self.slot_bytes = np.array(engine, dtype=np.intp), np.array(ours, dtype=np.intp)

    def run(self, device, kernels, verb):
        """(memory, slots, flags) afterwards."""
        memory, slots = device.put(self.memory), device.put(self.slots)
        table = plane_table(self.layout, [memory.address + begin for begin in self.begins])
        planes, indices, good = device.put(table), device.put(np.array(self.chosen, dtype="<u4")), device.put(np.array(self.good, dtype=np.uint8))
        region = Region(planes.address, len(table), self.layout.block_count, self.layout.payload_bytes)
        stride, offsets = self.stride, None
        if self.order:
            stride, offsets = 0, device.put(np.array(self.order, dtype="<u8") * np.uint64(self.stride))
        blocks = Blocks(len(self.chosen), indices.address, good.address, offsets.address if offsets else 0)
        first, last = self.window
        getattr(kernels, verb)(region, blocks, Slots(slots.address, stride, self.place), first=first, last=last)
        return memory.get(), slots.get(), good.get().tolist()


@st.composite
def cases(draw):
    layout, begins, total = draw(layouts())
    chosen = draw(st.lists(st.integers(0, layout.block_count), min_size=1, max_size=5, unique=True))
    chosen = [block if block < layout.block_count else draw(st.sampled_from([block, 1 << 31, (1 << 32) - 1])) for block in chosen]
    good = draw(st.lists(st.sampled_from([0, 1, 1, 255]), min_size=len(chosen), max_size=len(chosen)))
    good = [flag if block < layout.block_count else 1 for flag, block in zip(good, chosen, strict=True)]
    first = draw(st.one_of(st.just(0), st.integers(0, layout.payload_bytes - 1)))
    last = draw(st.one_of(st.none(), st.integers(first + 1, layout.payload_bytes)))
    order = draw(st.one_of(st.none(), st.permutations(range(len(chosen)))))
    return Case(layout, begins, total, chosen, good, (first, last), draw(st.integers(0, 17)), draw(st.sampled_from([0, 1, 4, 8, 16])), order)


def _flags(case):
    return [flag if after else 0 for flag, after in zip(case.good, case.good_after, strict=True)]


@given(case=cases(), chopped=st.booleans())
def test_gather_takes_exactly_the_bytes_of_the_formula(device, case, chopped):
    want = case.slots.copy()
    want[case.slot_bytes] = case.memory[case.engine_bytes]
    memory, slots, good = case.run(device, device.chopped if chopped else device.kernels, "gather")
    assert (slots == want).all() and (memory == case.memory).all() and good == _flags(case)


@given(case=cases(), chopped=st.booleans())
def test_scatter_changes_exactly_the_bytes_of_the_formula(device, case, chopped):
    want = case.memory.copy()
    want[case.engine_bytes] = case.slots[case.slot_bytes]
    memory, slots, good = case.run(device, device.chopped if chopped else device.kernels, "scatter")
    assert (memory == want).all() and (slots == case.slots).all() and good == _flags(case)


@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_payloads_of_several_launches_are_moved_whole(device, verb):
    """Five tiles, two a launch."""
    layout = Layout(
        3, (Plane(0, 0, 2 * COPY_TILE_BYTES, 2 * COPY_TILE_BYTES - 40), Plane(0, 6 * COPY_TILE_BYTES, 3 * COPY_TILE_BYTES, 2 * COPY_TILE_BYTES + 100))
    )
    case = Case(layout, [0], 15 * COPY_TILE_BYTES, [2, 0], [1, 1], (0, None), 5, 3)
    want_memory, want_slots = case.memory.copy(), case.slots.copy()
    if verb == "gather":
        want_slots[case.slot_bytes] = case.memory[case.engine_bytes]
    else:
        want_memory[case.engine_bytes] = case.slots[case.slot_bytes]
    memory, slots, good = case.run(device, device.chopped, verb)
    assert (memory == want_memory).all() and (slots == want_slots).all() and good == [1, 1]


def test_touching_planes_are_one_entry_of_the_table():
    layout = Layout(4, (Plane(0, 0, 300, 100), Plane(0, 100, 300, 100), Plane(1, 0, 50, 50)))
    assert plane_table(layout, [1 << 63, 4096]).tolist() == [(1 << 63, 300, 200, 0), (4096, 50, 50, 200)]


def _crcs(device, kernels, memory, offset, stride, sizes):
    payloads, lengths = device.put(memory), device.put(np.array(sizes, dtype="<u8"))
    crcs = device.put(np.full(len(sizes), 0x5A5A5A5A, dtype="<u4"))
    kernels.checksums(Slots(payloads.address, stride, offset), len(sizes), lengths.address, max(sizes, default=0), crcs.address)
    assert (payloads.get() == memory).all()
    return crcs.get().tolist()


def _reference(memory, offset, stride, sizes):
    return [crc32c(memory[offset + number * stride :][:size].tobytes()) for number, size in enumerate(sizes)]


EDGES = [edge + change for edge in (CRC_ROW_BYTES, CRC_PIECE_BYTES, 3 * CRC_PIECE_BYTES) for change in (-17, -16, -1, 0, 1, 15, 16, 17)]


@pytest.mark.parametrize("size_bytes", [*range(5), 100, *EDGES, 640 * KIB, 640 * KIB - 3])
@pytest.mark.parametrize("offset", [0, 1, 15])
def test_the_checksum_is_that_of_the_cpu(device, size_bytes, offset):
    memory = _random(offset + size_bytes)
    assert _crcs(device, device.kernels, memory, offset, 0, [size_bytes]) == _reference(memory, offset, 0, [size_bytes])


def test_the_checksum_of_a_long_payload_is_that_of_the_cpu(device):
    """More than 256 pieces: the second table of pieces is used."""
    memory = _random(16 * MIB + 5)
    assert _crcs(device, device.kernels, memory, 0, 0, [memory.size]) == [crc32c(memory.tobytes())]


def test_the_checksum_of_payloads_of_several_launches_is_that_of_the_cpu(device):
    """Six pieces, two a launch."""
    sizes, stride = [5 * CRC_PIECE_BYTES + 3, 17, 5 * CRC_PIECE_BYTES], 6 * CRC_PIECE_BYTES + 1
    memory = _random(3 * stride)
    assert _crcs(device, device.chopped, memory, 7, stride, sizes) == _reference(memory, 7, stride, sizes)


def test_checksums_hold_at_every_alignment_of_beginning_and_end(device):
    sizes = [size for size in range(40) for _ in range(16)]
    memory = _random(len(sizes) * 49)
    assert _crcs(device, device.kernels, memory, 3, 49, sizes) == _reference(memory, 3, 49, sizes)


@given(
    sizes=st.lists(st.one_of(st.integers(0, 70), st.integers(0, 2 * CRC_PIECE_BYTES + 50)), min_size=1, max_size=4),
    offset=st.integers(0, 17),
    spread=st.integers(0, 17),
    fill=st.sampled_from([None, 0, 255]),
    chopped=st.booleans(),
)
def test_checksums_of_payloads_of_any_lengths_are_those_of_the_cpu(device, sizes, offset, spread, fill, chopped):
    stride = max(sizes) + spread
    memory = _random(offset + (len(sizes) - 1) * stride + sizes[-1])
    if fill is not None:
        memory[:] = fill
    assert _crcs(device, device.chopped if chopped else device.kernels, memory, offset, stride, sizes) == _reference(memory, offset, stride, sizes)


def test_a_batch_of_slots_as_a_volume_has_them(device):
    stride = 644 * KIB
    memory = _random(12 * stride)
    sizes = [640 * KIB] * 11 + [123457]
    assert _crcs(device, device.kernels, memory, 4096, stride, sizes) == _reference(memory, 4096, stride, sizes)


def test_checksums_of_more_payloads_than_a_cta_has_threads(device):
    memory = _random(300 * 5)
    assert _crcs(device, device.kernels, memory, 0, 5, [5] * 300) == _reference(memory, 0, 5, [5] * 300)


def test_verify_clears_the_flags_of_wrong_checksums_and_sets_none(device):
    count = 300
    expected = np.random.default_rng(5).integers(0, 1 << 32, count, dtype=np.uint32)
    computed = expected.copy()
    flags = np.array([0 if number % 7 == 0 else 1 + number % 3 for number in range(count)], dtype=np.uint8)
    want = flags.copy()
    for number in (0, 1, 31, 32, 255, 256, 299):
        computed[number] ^= 1 << number % 32
        want[number] = 0
    crcs, right, good = device.put(computed), device.put(expected), device.put(flags)
    device.kernels.verify(crcs.address, right.address, good.address, count)
    assert good.get().tolist() == want.tolist() and crcs.get().tolist() == computed.tolist()


@pytest.mark.parametrize("changed_bit", [0, 8 * 700, 8 * 1500 - 1])
def test_a_payload_with_a_flipped_bit_is_not_scattered(device, changed_bit):
    """Gather, checksum, damage, verify, scatter elsewhere: nobody looks at the flags in between."""
    layout = Layout(8, (Plane(0, 0, 1000, 1000), Plane(0, 8000, 500, 500)))
    before, empty = _random(12000), np.zeros(3 * 2000, dtype=np.uint8)
    memory, slots = device.put(before), device.put(empty)
    table = device.put(plane_table(layout, [memory.address]))
    region = Region(table.address, 2, 8, 1500)
    good, lengths, expected = device.put(np.ones(3, dtype=np.uint8)), device.put(np.full(3, 1500, dtype="<u8")), device.put(np.zeros(3, dtype="<u4"))
    sources = device.put(np.array([5, 0, 2], dtype="<u4"))
    device.kernels.gather(region, Blocks(3, sources.address, good.address), Slots(slots.address, 2000, 100))
    device.kernels.checksums(Slots(slots.address, 2000, 100), 3, lengths.address, 1500, expected.address)

    staged = slots.get()
    staged[2000 + 100 + changed_bit // 8] ^= 1 << changed_bit % 8
    damaged, crcs = device.put(staged), device.put(np.zeros(3, dtype="<u4"))
    targets = device.put(np.array([7, 3, 4], dtype="<u4"))
    device.kernels.checksums(Slots(damaged.address, 2000, 100), 3, lengths.address, 1500, crcs.address)
    device.kernels.verify(crcs.address, expected.address, good.address, 3)
    device.kernels.scatter(region, Blocks(3, targets.address, good.address), Slots(damaged.address, 2000, 100))

    want = before.copy()
    for source, target in ((5, 7), (2, 4)):
        want[target * 1000 : (target + 1) * 1000] = before[source * 1000 : (source + 1) * 1000]
        want[8000 + target * 500 : 8000 + (target + 1) * 500] = before[8000 + source * 500 : 8000 + (source + 1) * 500]
    assert good.get().tolist() == [1, 0, 1]
    assert (memory.get() == want).all()


def test_nothing_is_done_for_no_blocks(device):
    one = device.put(np.zeros(64, dtype=np.uint8))
    region = Region(device.put(plane_table(Layout(1, (Plane(0, 0, 8, 8),)), [one.address])).address, 1, 1, 8)
    for move in (device.kernels.gather, device.kernels.scatter):
        move(region, Blocks(0, one.address, one.address), Slots(one.address, 8))
    device.kernels.checksums(Slots(one.address, 8), 0, one.address, 8, one.address)
    device.kernels.verify(one.address, one.address, one.address, 0)
    assert not one.get().any()


@pytest.mark.parametrize(
    ("window", "stride", "message"),
    [
        ((0, 101), 200, "payload bytes 0 to 101 are no part of a payload of 100 bytes"),
        ((-1, 5), 200, "payload bytes -1 to 5 are no part of a payload of 100 bytes"),
        ((7, 7), 200, "payload bytes 7 to 7 are no part of a payload of 100 bytes"),
        ((10, 60), 49, "slots of 49 bytes can't take 50 payload bytes each"),
    ],
)
@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_windows_and_slots_that_do_not_fit_move_nothing(device, verb, window, stride, message):
    with pytest.raises(ValueError, match=message):
        getattr(device.kernels, verb)(Region(0, 1, 4, 100), Blocks(2, 0, 0), Slots(0, stride), first=window[0], last=window[1])


def test_impossible_counts_and_lengths_are_refused(device):
    with pytest.raises(ValueError, match="-1 blocks can't be moved; at least 0 are needed"):
        device.kernels.gather(Region(0, 1, 1, 8), Blocks(-1, 0, 0), Slots(0, 8))
    with pytest.raises(ValueError, match="region has 0 planes and 1 blocks; at least 1 of each is needed"):
        device.kernels.gather(Region(0, 0, 1, 8), Blocks(1, 0, 0), Slots(0, 8))
    with pytest.raises(ValueError, match=f"payloads of {PAYLOAD_BYTES_MAX + 1} bytes can't be checked in one piece; the limit is {PAYLOAD_BYTES_MAX}"):
        device.kernels.checksums(Slots(0, 0), 1, 0, PAYLOAD_BYTES_MAX + 1, 0)
    with pytest.raises(ValueError, match="-2 payloads can't be checked; at least 0 are needed"):
        device.kernels.verify(0, 0, 0, -2)

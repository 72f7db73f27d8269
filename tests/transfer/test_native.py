"""What the C library does beyond NumPy's copies: checksums on the way, bounds of its own, and the proof at its start."""

import ctypes
import hashlib
import os
import shutil
import subprocess

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from offloadd.transfer import native as module
from offloadd.transfer.gather import Checks, Payloads
from offloadd.transfer.native import PORTABLE, Library, NativeUnavailableError, load

from .moves import SOURCE, build, compiler

BLOCKS = 6
#: Pieces below, at and above what each way of copying and folding takes at a time; the last two are stored past the caches and cross a portion.
SHAPES = [(1, 1), (1, 63), (3, 64), (2, 200), (5, 257), (7, 1360), (3, 4096), (2, 4081), (80, 4096), (1, 655_360), (3, 131_072 + 8)]


def engine(planes, piece, seed=1):
    """Memory of an engine with gaps between its pieces and odd addresses, and the views of it: [plane, block, byte]."""
    stride = piece + 3
    memory = np.random.default_rng(seed).integers(0, 256, 5 + planes * BLOCKS * stride, dtype=np.uint8)
    return memory, (np.ndarray((planes, BLOCKS, piece), np.uint8, memory, offset=5, strides=(BLOCKS * stride, stride, 1)),)


def slots(planes, piece, count, fill=0):
    stride = planes * piece + 11
    return Payloads(np.full(9 + count * stride, fill, np.uint8), 9 + np.arange(count) * stride, stride)


def payload(views, block):
    return b"".join(plane[block].tobytes() for plane in views[0])


@given(data=st.binary(max_size=9000), value=st.integers(0, 2**32 - 1), offset=st.integers(0, 70))
def test_checksums_are_crc32c_at_every_length_and_address(native, data, value, offset):
    array = np.frombuffer(b"x" * offset + data, dtype=np.uint8)[offset:]
    assert native.crc32c(array, value) == crc32c(data, value)


@pytest.mark.parametrize("length", [2**20, 2**20 + 1, 3 * 1360 * 77 - 1, 3 * 1360 * 77, 655_360])
def test_checksums_of_long_payloads_are_crc32c(native, length):
    data = np.random.default_rng(2).integers(0, 256, length, dtype=np.uint8)
    assert native.crc32c(data) == crc32c(data.tobytes())


@pytest.mark.parametrize(("planes", "piece"), SHAPES)
def test_a_gather_takes_the_checksum_of_what_it_copies(native, planes, piece):
    memory, views = engine(planes, piece)
    before = memory.copy()
    chosen = np.array([4, 0, 5], dtype="<u4")
    target, checks = slots(planes, piece, 3), Checks.of(3)
    native.pieces(views).gather(chosen, target, 0, None, checks)
    for number, block in enumerate(chosen.tolist()):
        begin = int(target.offsets[number])
        assert target.buffer[begin : begin + planes * piece].tobytes() == payload(views, block)
        assert checks.checksums[number] == crc32c(payload(views, block))
    untouched = np.ones(target.buffer.size, dtype=bool)
    for begin in target.offsets.tolist():
        untouched[begin : begin + planes * piece] = False
    assert not target.buffer[untouched].any() and (memory == before).all()
    assert checks.spent_ns > 0


@pytest.mark.parametrize(("planes", "piece"), SHAPES)
def test_a_window_has_the_checksum_of_its_own_bytes(native, planes, piece):
    _, views = engine(planes, piece)
    size = planes * piece
    first, last = size // 3, size - size // 5
    target, checks = slots(planes, piece, 1), Checks.of(1)
    native.pieces(views).gather(np.array([2]), target, first, last, checks)
    want = payload(views, 2)[first:last]
    assert target.buffer[9 : 9 + last - first].tobytes() == want and checks.checksums[0] == crc32c(want)


@pytest.mark.parametrize(("planes", "piece"), SHAPES)
def test_only_payloads_with_the_expected_checksum_are_scattered(native, planes, piece):
    memory, views = engine(planes, piece)
    source = slots(planes, piece, 4)
    source.buffer[:] = np.random.default_rng(3).integers(0, 256, source.buffer.size, dtype=np.uint8)
    texts = [source.buffer[begin : begin + planes * piece].tobytes() for begin in source.offsets.tolist()]
    expected = np.array([crc32c(text) for text in texts], dtype=np.uint32)
    # One bit of the last byte, and a wrong record.
    source.buffer[int(source.offsets[1]) + planes * piece - 1] ^= 128
    expected[3] ^= 1
    chosen = np.array([5, 1, 0, 3])
    before = memory.copy()
    kept = [payload(views, block) for block in range(BLOCKS)]
    checks = Checks(np.zeros(4, np.uint32), expected)
    native.pieces(views).scatter(chosen, source, 0, None, checks)
    assert (checks.checksums != expected).tolist() == [False, True, False, True]
    assert [payload(views, block) for block in range(BLOCKS)] == [texts[2], kept[1], kept[2], kept[3], kept[4], texts[0]]
    # And no byte between the pieces.
    gaps = np.ones(memory.size, dtype=bool)
    gaps_view = np.ndarray(views[0].shape, bool, gaps, offset=5, strides=views[0].strides)
    gaps_view[:] = False
    assert (memory[gaps] == before[gaps]).all()


@pytest.mark.parametrize("name", ["gather", "scatter"])
@pytest.mark.parametrize(
    ("chosen", "offsets", "first", "last", "told"),
    [
        ([0, 6], [0, 300], 0, None, "block index 6 is outside the region of 6 blocks"),
        ([0, 1], [0, 401], 0, None, "payloads of 300 bytes at offsets 0 to 401 leave their buffer of 700"),
        ([0, 1], [-1, 300], 0, None, "payloads of 300 bytes at offsets -1 to 300 leave their buffer of 700"),
        ([0, 1], [0, 300], 0, 301, "payload bytes 0 to 301 were asked for; a payload has 300"),
        ([0, 1], [0, 300], -1, 5, "payload bytes -1 to 5 were asked for; a payload has 300"),
        ([0, 1], [0, 300], 6, 5, "payload bytes 6 to 5 were asked for; a payload has 300"),
        ([0, 1], [0], 0, None, "2 blocks were named with 1 places and 2 checksums"),
        ([0], [0], 0, None, "1 blocks were named with 1 places and 2 checksums"),
    ],
)
def test_a_move_outside_its_memories_touches_no_byte(native, name, chosen, offsets, first, last, told):
    memory, views = engine(3, 100)
    ours = Payloads(np.full(700, 7, np.uint8), np.array(offsets), 300)
    before = memory.copy()
    with pytest.raises(ValueError, match=told):
        getattr(native.pieces(views), name)(np.array(chosen), ours, first, last, Checks.of(2))
    assert (memory == before).all() and (ours.buffer == 7).all()


def test_a_buffer_with_holes_is_refused(native):
    _, views = engine(1, 100)
    with pytest.raises(ValueError, match="not contiguous"):
        native.pieces(views).gather(np.array([0]), Payloads(np.zeros(400, np.uint8)[::2], np.array([0]), 100), 0, None)


def test_checksums_of_another_width_are_refused(native):
    _, views = engine(1, 100)
    for checks in (Checks(np.zeros(2, np.uint64)), Checks(np.zeros(2, np.uint32), np.zeros(3, np.uint32)), Checks(np.zeros(4, np.uint32)[::2])):
        with pytest.raises(ValueError, match="2 blocks were named"):
            native.pieces(views).gather(np.array([0, 1]), slots(1, 100, 2), 0, None, checks)


def test_the_installed_library_proves_itself():
    try:
        library = load()
    except NativeUnavailableError as error:
        # Where the tests set everything up themselves, a compiler means a library.
        if "not built" not in str(error) or (compiler() is not None and os.environ.get("CI")):
            raise
        pytest.skip(f"the native library: {error}")
    assert library.ways


@pytest.fixture
def installed(native, monkeypatch):
    """Has `load` find the library that a test gives it."""
    monkeypatch.setattr(module, "find_spec", lambda name: type("Spec", (), {"origin": native._library._name})())
    monkeypatch.setattr(module, "PORTABLE", "only for tests")

    def change(**functions):
        real = native._library

        class Changed:
            def __getattr__(self, name):
                return functions[name] if name in functions else getattr(real, name)

        monkeypatch.setattr(module.ctypes, "CDLL", lambda path: Changed())

    return change


def test_a_library_of_another_version_is_not_used(installed):
    installed(offloadd_interface=lambda: 99)
    with pytest.raises(NativeUnavailableError, match="has interface 99; 3 is needed"):
        load()


def test_a_library_that_computes_another_checksum_is_not_used(installed, native):
    real = native._library.offloadd_crc32c

    def wrong(data, size, value):
        return real(data, size, value) ^ (size == 1000)

    installed(offloadd_crc32c=wrong)
    with pytest.raises(NativeUnavailableError, match="its CRC32C of 1000 bytes is"):
        load()


@pytest.mark.parametrize("name", ["offloadd_gather", "offloadd_scatter"])
def test_a_library_that_copies_wrongly_is_not_used(installed, native, name):
    real = getattr(native._library, name)

    def wrong(move):
        result = real(move)
        if name == "offloadd_gather":
            ctypes.cast(move._obj.ours, ctypes.POINTER(ctypes.c_uint8))[0] ^= 1
        else:
            ctypes.cast(module._Group.from_address(move._obj.groups).base, ctypes.POINTER(ctypes.c_uint8))[0] ^= 1
        return result

    installed(**{name: wrong})
    with pytest.raises(NativeUnavailableError, match="are not those of NumPy"):
        load()


def test_what_is_no_library_is_told(monkeypatch, tmp_path):
    path = tmp_path / "moves.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(module, "find_spec", lambda name: type("Spec", (), {"origin": str(path)})())
    with pytest.raises(NativeUnavailableError, match="can't be loaded"):
        load()
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(NativeUnavailableError, match="was not built: install a C compiler"):
        load()


def test_the_widths_are_different_ways(tmp_path):
    if compiler() is None:
        pytest.skip("no C compiler")
    assert Library(build(tmp_path, width=0)).ways == PORTABLE


def test_a_cpu_without_a_fast_way_is_left_to_numpy(tmp_path, monkeypatch):
    if compiler() is None:
        pytest.skip("no C compiler")
    path = build(tmp_path, width=0)
    monkeypatch.setattr(module, "find_spec", lambda name: type("Spec", (), {"origin": path})())
    with pytest.raises(NativeUnavailableError, match="it has no fast way for this CPU"):
        load()


DRIVER = """
#include "moves.c"
#include <stdio.h>
int main(void) {
    static uint8_t data[70000], to[70000];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i * 2654435761u >> 13);
    puts(offloadd_ways());
    for (size_t size = 0; size < 69000; size = size * 5 / 4 + 7) printf("%zu %u\\n", size, offloadd_crc32c(data + size % 9, size, (uint32_t)size));
    Group group = {data, 7, 5000, 600, 511, 8};
    int64_t block = 5, offset = 3;
    uint32_t checksum;
    Move move = {&group, 1, &block, 1, to, sizeof to, &offset, 0, 7 * 511, &checksum, NULL, 0, 0};
    printf("%d %u", offloadd_gather(&move), checksum);
    printf(" %u\\n", offloadd_crc32c(to + 3, 7 * 511, 0));
}
"""


def test_the_code_for_arm_computes_the_same(tmp_path):
    cross, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if cross is None or emulator is None:
        pytest.skip("no compiler and emulator for aarch64")
    source, program = tmp_path / "driver.c", tmp_path / "driver"
    source.write_text(DRIVER)
    subprocess.run([cross, "-O3", "-std=gnu11", "-static", "-Wall", "-Werror", f"-I{SOURCE.parent}", source, "-o", program], check=True, timeout=300)
    lines = subprocess.run([emulator, program], capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    data = bytes((i * 2654435761 & 0xFFFFFFFF) >> 13 & 255 for i in range(70_000))
    assert lines[0] == "ARMv8 CRC32" and len(lines) > 30
    for line in lines[1:-1]:
        size, checksum = map(int, line.split())
        assert checksum == crc32c(data[size % 9 : size % 9 + size], size)
    block = b"".join(data[plane * 5000 + 5 * 600 :][:511] for plane in range(7))
    assert lines[-1].split() == ["0", str(crc32c(block)), str(crc32c(block))]


@given(prefix=st.binary(max_size=120), item_bytes=st.integers(1, 64), data=st.binary(min_size=200, max_size=400))
def test_digests_are_those_of_hashlib(native, prefix, item_bytes, data):
    items = data[: len(data) // item_bytes * item_bytes]
    digests = native.sha256_each(prefix, items, item_bytes)
    if digests is None:
        pytest.skip("the CPU has no SHA instructions")
    assert digests == b"".join(hashlib.sha256(prefix + items[at : at + item_bytes]).digest() for at in range(0, len(items), item_bytes))


def test_messages_that_are_too_long_are_left_to_hashlib(native):
    assert native.sha256_each(b"x" * 150, b"y" * 64, 64) is None
    assert native.sha256_each(b"x" * 200, b"y", 1) is None


def test_a_library_that_makes_other_keys_is_not_used(installed, native):
    if native.sha256_each(b"", b"x", 1) is None:
        pytest.skip("the CPU has no SHA instructions")

    def wrong(prefix, prefix_bytes, items, item_bytes, count, digests):
        ctypes.memset(digests, 0, 32 * count)
        return 0

    installed(offloadd_sha256_each=wrong)
    with pytest.raises(NativeUnavailableError, match="SHA-256 of 51 and 32 bytes is not hashlib's"):
        load()

"""CRC32C: each library against arithmetic over single bits, and the choice between them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.transfer import checksum
from offloadd.transfer.checksum import LIBRARIES, Function, choose_fastest, crc32c

_POLYNOMIAL = 0x82F63B78


def by_bits(data: bytes, value: int = 0) -> int:
    value ^= 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = checksum._function
    yield
    checksum._function = before


@pytest.mark.parametrize("name", LIBRARIES)
@given(data=st.binary(max_size=600), value=st.integers(0, 2**32 - 1), offset=st.integers(0, 15))
def test_a_library_computes_what_the_bits_say(name: str, data: bytes, value: int, offset: int) -> None:
    array = np.frombuffer(b"x" * offset + data, dtype=np.uint8)[offset:]
    assert LIBRARIES[name](array, value) == by_bits(data, value)


@pytest.mark.parametrize("name", LIBRARIES)
def test_pieces_continue_over_lengths_at_which_libraries_change_their_way(name: str) -> None:
    data = np.random.default_rng(5).integers(0, 256, 3 << 20, dtype=np.uint8)
    whole = LIBRARIES["awscrt"](data, 0)
    for length in (1, 63, 255, 4096, 24_576, 655_360, (1 << 20) + 3):
        value = LIBRARIES[name](data[:length], 0)
        assert LIBRARIES[name](data[length:], value) == whole


def test_the_fastest_is_taken() -> None:
    calls = []

    def slow(data: Any, value: int) -> int:
        calls.append("slow")
        for _ in range(20):
            LIBRARIES["awscrt"](data, value)
        return LIBRARIES["awscrt"](data, value)

    def fast(data: Any, value: int) -> int:
        calls.append("fast")
        return LIBRARIES["awscrt"](data, value)

    for libraries in ({"slow": slow, "fast": fast}, {"fast": fast, "slow": slow}):
        assert choose_fastest(libraries) == "fast"
        calls.clear()
        assert crc32c(b"123456789") == 0xE3069283 and calls == ["fast"]


def _wrong_at(length: int) -> Function:
    return lambda data, value: LIBRARIES["crc32c"](data, value) ^ (len(data) >= length)


@pytest.mark.parametrize(("length", "text"), [(0, "the library wrong computes"), (1 << 20, "compute different CRC32Cs")])
def test_a_library_that_computes_something_else_is_refused(length: int, text: str) -> None:
    before = checksum._function
    with pytest.raises(RuntimeError, match=text):
        choose_fastest({"awscrt": LIBRARIES["awscrt"], "wrong": _wrong_at(length)})
    assert checksum._function is before

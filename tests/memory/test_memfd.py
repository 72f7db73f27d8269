"""Only memory that can't shrink is mapped."""

import fcntl
import os
import subprocess
import sys

import pytest

from offloadd.errors import InvalidRequest
from offloadd.memory.memfd import create_sealed, map_shared, validate_sealed
from offloadd.units import MIB


@pytest.fixture
def fd():
    fd = create_sealed("memory", 10000)
    yield fd
    os.close(fd)


def test_a_sealed_memory_can_neither_shrink_nor_grow(fd):
    assert validate_sealed(fd, 10000) == 10000 and validate_sealed(fd) == 10000
    for size in (9999, 10001):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_short_memory_is_refused_with_both_numbers(fd):
    with pytest.raises(InvalidRequest, match=r"10000 bytes; 10001"):
        validate_sealed(fd, 10001)


def test_missing_seals_are_named():
    fd = os.memfd_create("half", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(InvalidRequest, match=r"lacks the seals F_SEAL_SHRINK, F_SEAL_SEAL$"):
        validate_sealed(fd)
    os.close(fd)


def test_what_is_no_memfd_is_refused(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x")
        with pytest.raises(InvalidRequest, match="not a memfd"):
            validate_sealed(file.fileno(), 1)
    reader, writer = os.pipe()
    with pytest.raises(InvalidRequest, match="not a memfd"):
        validate_sealed(reader)
    os.close(reader)
    os.close(writer)


def test_both_sides_of_a_shared_mapping_see_the_same_bytes(fd):
    first, second = map_shared(fd, 10000), map_shared(fd, 10000)
    first[5:8] = b"abc"
    assert second[4:9] == b"\0abc\0"
    first.close()
    second.close()


def test_huge_pages_are_taken_only_when_there_are_some():
    fd = create_sealed("huge", 4 * MIB, huge=True)
    assert validate_sealed(fd, 4 * MIB) == 4 * MIB
    map_shared(fd, 4 * MIB).close()
    os.close(fd)


def test_an_empty_memory_is_refused():
    with pytest.raises(InvalidRequest, match="0 bytes"):
        create_sealed("empty", 0)


def test_the_module_needs_nothing_but_the_standard_library():
    """Engines import it through the client."""
    code = "import sys, offloadd.memory.memfd; print(sorted({'msgspec', 'grpc', 'pydantic', 'crc32c'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

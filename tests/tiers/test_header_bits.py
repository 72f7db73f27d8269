"""One flipped bit anywhere in a volume's own records is noticed: the record then says nothing, and never something else."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offloadd.errors import VolumeDamaged, VolumeForeign
from offloadd.keeper.namespaces import NamespaceTable
from offloadd.keeper.scan import Scanner
from offloadd.tiers.format import NAMESPACE_TABLE_OFFSET, SUMMARY_DTYPE, Geometry, parse_superblocks, slot_count_for, summary_bytes_for
from offloadd.tiers.slab_header import SlabHeader, parse_slab_header
from offloadd.tiers.superblock import write_record
from offloadd.tiers.volume_file import format_volume
from offloadd.tiers.volume_io import open_volume
from offloadd.transfer.checksum import crc32c
from offloadd.units import KIB, MIB, SECTOR_BYTES

pytestmark = pytest.mark.torture("P1")

SLOT_BYTES = 128 * KIB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "volume"


@pytest.fixture
def geometry(path: Path) -> Geometry:
    return format_volume(str(path), volume_bytes=6 * MIB, slab_bytes=MIB, namespace_count=4)


def _flips(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """(bit, the bytes with this bit flipped), for each bit."""
    changed = bytearray(raw)
    for bit in range(8 * len(raw)):
        changed[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(changed)
        changed[bit // 8] ^= 1 << bit % 8


def test_a_superblock_with_a_flipped_bit_never_counts(path: Path, geometry: Geometry) -> None:
    raw_a, raw_b = (path.read_bytes()[offset : offset + SECTOR_BYTES] for offset in (0, SECTOR_BYTES))
    for bit, flipped in _flips(raw_a):
        assert parse_superblocks(flipped, raw_b, name="v").tobytes() == raw_b, f"bit {bit}"
        with pytest.raises((VolumeDamaged, VolumeForeign)):
            parse_superblocks(flipped, flipped, name="v")
    for bit, flipped in _flips(raw_b):
        assert parse_superblocks(raw_a, flipped, name="v").tobytes() == raw_a, f"bit {bit}"


def test_a_slab_header_with_a_flipped_bit_is_none(path: Path, geometry: Geometry) -> None:
    header = SlabHeader(slab=1, cut=True, slot_bytes=SLOT_BYTES, slot_count=slot_count_for(MIB, SLOT_BYTES), nonce=b"n" * 16, dirty=True, written=True)
    file = open_volume(str(path), busy_wait_s=0)
    write_record(file.synced_fd, header.record(geometry, 3), geometry.slab_offset(1), "test")
    file.close()
    raw = path.read_bytes()[geometry.slab_offset(1) :][:SECTOR_BYTES]
    assert parse_slab_header(raw, geometry, 1) == header
    for bit, flipped in _flips(raw):
        assert parse_slab_header(flipped, geometry, 1) is None, f"bit {bit}"


def test_a_namespace_entry_with_a_flipped_bit_is_not_live_and_its_ordinal_is_not_given_out(path: Path, geometry: Geometry) -> None:
    file = open_volume(str(path), busy_wait_s=0)
    table = NamespaceTable(file.synced_fd, geometry)
    table.read(file.data_fd)
    table.add(b"i" * 32, "tenant", b"fields")
    file.close()
    at = path.read_bytes().index(b"OFFLNSP")
    ordinal = (at - NAMESPACE_TABLE_OFFSET) // SECTOR_BYTES
    raw = path.read_bytes()[at : at + SECTOR_BYTES]
    for bit, flipped in _flips(raw):
        table = NamespaceTable(-1, geometry)
        table._enter(ordinal, flipped)
        assert not table.live() and not table._free and table.damaged_count == 1, f"bit {bit}"
    table = NamespaceTable(-1, geometry)
    table._enter(ordinal, raw)
    assert [live.namespace_id for live in table.live()] == [b"i" * 32]


def test_a_summary_with_a_flipped_bit_is_not_believed(path: Path, geometry: Geometry) -> None:
    count = slot_count_for(MIB, SLOT_BYTES)
    summary = np.zeros(summary_bytes_for(count), np.uint8)
    summary[: count * SUMMARY_DTYPE.itemsize] = np.random.default_rng(1).integers(0, 256, count * SUMMARY_DTYPE.itemsize)
    header = SlabHeader(slab=0, cut=True, slot_bytes=SLOT_BYTES, slot_count=count, nonce=b"n" * 16, summary_crc=crc32c(summary))
    told: list[bytes] = []
    offset = geometry.slab_offset(0) + SECTOR_BYTES
    fd = os.memfd_create("volume")
    os.ftruncate(fd, geometry.volume_bytes)
    try:
        scanner = Scanner(fd=fd, geometry=geometry, headers=[header], tell=lambda _, records: told.append(records.tobytes()), io_threads=1)
        for bit, flipped in _flips(summary.tobytes()):
            os.pwrite(fd, flipped, offset)
            assert not scanner._tell_from_summary(header), f"bit {bit}"
        os.pwrite(fd, summary.tobytes(), offset)
        assert not told and scanner._tell_from_summary(header)
    finally:
        os.close(fd)
    assert told == [summary[: count * SUMMARY_DTYPE.itemsize].tobytes()]

"""What formatting overwrites and what it refuses to, and what `show` tells."""

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest

from offloadd.errors import InvalidRequest, VolumeBusy, VolumeDamaged, VolumeForeign, VolumeNotEmpty
from offloadd.tiers import volume_io
from offloadd.tiers.format import NAMESPACE_DTYPE, NAMESPACE_MAGIC, Geometry, new_record, slot_count_for
from offloadd.tiers.slab_header import SlabHeader
from offloadd.tiers.superblock import read_superblock, write_record
from offloadd.tiers.volume_file import NAMESPACE_COUNT_MAX, format_volume
from offloadd.tiers.volume_io import open_volume
from offloadd.tiers.volume_summary import read_volume
from offloadd.units import GIB, KIB, MIB, SECTOR_BYTES


def small(path: Path, *, volume_bytes: int | None = 18 * MIB, slab_bytes: int = 4 * MIB, overwrite_blocks: bool = False) -> Geometry:
    return format_volume(str(path), volume_bytes=volume_bytes, slab_bytes=slab_bytes, namespace_count=8, overwrite_blocks=overwrite_blocks)


def cut(path: Path, geometry: Geometry, slab: int, *, slot_bytes: int = 128 * KIB, dirty: bool = True) -> None:
    header = SlabHeader(
        slab=slab, cut=True, slot_bytes=slot_bytes, slot_count=slot_count_for(geometry.slab_bytes, slot_bytes), nonce=os.urandom(16), dirty=dirty
    )
    file = open_volume(str(path), busy_wait_s=0)
    write_record(file.synced_fd, header.record(geometry, 1), geometry.slab_offset(slab), "test")
    file.close()


def test_a_new_volume_is_sparse_and_takes_seconds_at_any_size(tmp_path):
    path = tmp_path / "volume"
    start = time.monotonic()
    geometry = format_volume(str(path), volume_bytes=2048 * GIB)
    assert time.monotonic() - start < 30
    status = path.stat()
    assert status.st_size == 2048 * GIB and status.st_blocks * 512 < MIB
    assert status.st_mode & 0o777 == 0o600
    summary = read_volume(str(path))
    assert summary.geometry == geometry and geometry.slab_count == 2047
    assert (summary.epoch, summary.slabs_free, summary.slabs_cut, summary.namespaces_live, summary.locked) == (0, 2047, 0, 0, False)


@pytest.mark.parametrize("content", [b"x", b"hello" * 100_000, bytes(MIB - 1) + b"x" + bytes(20 * MIB)], ids=["1 byte", "text", "end of the first MiB"])
def test_a_foreign_file_is_refused_and_untouched(tmp_path, content):
    path = tmp_path / "precious"
    path.write_bytes(content)
    for overwrite_blocks in (False, True):
        with pytest.raises(VolumeForeign):
            small(path, overwrite_blocks=overwrite_blocks)
    assert path.read_bytes() == content


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(VolumeForeign):
        small(tmp_path)


def test_empty_and_zeroed_files_are_accepted(tmp_path):
    (tmp_path / "empty").touch()
    assert small(tmp_path / "empty").slab_count == 4
    (tmp_path / "zeroed").write_bytes(bytes(18 * MIB))
    assert small(tmp_path / "zeroed", volume_bytes=None).volume_bytes == 18 * MIB


def test_a_locked_volume_is_not_formatted(tmp_path):
    path = tmp_path / "volume"
    geometry = small(path)
    file = open_volume(str(path), busy_wait_s=0)
    with pytest.raises(VolumeBusy):
        small(path, overwrite_blocks=True)
    assert read_volume(str(path)).locked
    assert read_volume(str(path)).geometry == geometry
    file.close()
    assert small(path).volume_uuid != geometry.volume_uuid


def test_a_volume_with_cut_slabs_is_formatted_only_when_told_to(tmp_path):
    path = tmp_path / "volume"
    geometry = small(path)
    cut(path, geometry, 1)
    cut(path, geometry, 3, slot_bytes=MIB, dirty=False)
    with pytest.raises(VolumeNotEmpty, match="2 of 4 slabs"):
        small(path)
    assert read_volume(str(path)).slabs_cut == 2
    after = small(path, overwrite_blocks=True)
    assert after.volume_uuid != geometry.volume_uuid
    summary = read_volume(str(path))
    assert (summary.slabs_cut, summary.slabs_damaged, summary.slabs_free) == (0, 0, 4)


def test_no_old_slab_header_or_namespace_stays_after_formatting_with_another_geometry(tmp_path):
    path = tmp_path / "volume"
    geometry = small(path)
    for slab in range(4):
        cut(path, geometry, slab)
    record = new_record(NAMESPACE_DTYPE)
    record["magic"], record["ordinal"], record["epoch"] = np.void(NAMESPACE_MAGIC), 2, 1
    file = open_volume(str(path), busy_wait_s=0)
    write_record(file.synced_fd, record, geometry.namespace_offset(2), "test")
    file.close()
    assert read_volume(str(path)).namespaces_live == 1
    small(path, slab_bytes=8 * MIB, overwrite_blocks=True)
    raw = path.read_bytes()
    assert not any(any(raw[geometry.slab_offset(slab) :][:SECTOR_BYTES]) for slab in range(4))
    assert not any(raw[64 * KIB : geometry.data_offset])
    assert read_volume(str(path)).namespaces_live == 0


def test_a_volume_is_grown_and_shrunk_by_formatting(tmp_path):
    path = tmp_path / "volume"
    small(path)
    assert small(path, volume_bytes=34 * MIB).slab_count == 8
    assert path.stat().st_size == 34 * MIB
    assert small(path, volume_bytes=10 * MIB).slab_count == 2
    assert path.stat().st_size == 10 * MIB


def test_a_volume_with_two_damaged_superblocks_may_hold_blocks(tmp_path):
    path = tmp_path / "volume"
    small(path)
    with path.open("r+b") as file:
        for offset in (100, 4196):
            file.seek(offset)
            file.write(b"\xff")
    with pytest.raises(VolumeDamaged):
        read_volume(str(path))
    with pytest.raises(VolumeNotEmpty):
        small(path)
    small(path, overwrite_blocks=True)
    assert read_volume(str(path)).slabs_free == 4


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"slab_bytes": MIB + 4096}, "1052672"),
        ({"slab_bytes": 512 * KIB}, "524288"),
        ({"slab_bytes": 0}, "slab_bytes is 0"),
        ({"slab_bytes": -MIB}, str(-MIB)),
        ({"namespace_count": 0}, "namespace_count is 0"),
        ({"namespace_count": NAMESPACE_COUNT_MAX + 1}, str(NAMESPACE_COUNT_MAX)),
        ({"volume_bytes": 1000}, "volume_bytes is 1000"),
        ({"volume_bytes": 4 * MIB}, str(4 * MIB)),
        ({"volume_bytes": None}, "does not exist"),
    ],
    ids=str,
)
def test_sizes_that_cannot_work_are_refused_and_create_nothing(tmp_path, sizes, words):
    path = tmp_path / "volume"
    with pytest.raises(InvalidRequest, match=words):
        format_volume(str(path), **({"volume_bytes": 64 * MIB, "slab_bytes": 4 * MIB, "namespace_count": 8} | sizes))
    assert not path.exists()


def test_a_format_that_fails_midway_leaves_no_file_of_its_own(tmp_path, monkeypatch):
    path = tmp_path / "volume"

    def fail(*_):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr("offloadd.tiers.superblock.write_full", fail)
    with pytest.raises(OSError, match="no"):
        small(path)
    assert not path.exists()


def test_until_the_first_new_superblock_stands_the_old_volume_counts(tmp_path, monkeypatch):
    path = tmp_path / "volume"
    old = small(path)
    cut(path, old, 0)
    monkeypatch.setattr("offloadd.tiers.volume_file.write_superblocks", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EIO, "crash")))
    with pytest.raises(OSError, match="crash"):
        small(path, slab_bytes=8 * MIB, overwrite_blocks=True)
    summary = read_volume(str(path))
    assert summary.geometry == old and summary.slabs_cut == 0


def test_after_the_first_new_superblock_the_new_volume_counts(tmp_path, monkeypatch):
    path = tmp_path / "volume"
    small(path)
    small(path)
    real = volume_io.write_full
    calls = []

    def once(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.EIO, "crash")
        real(*arguments)

    monkeypatch.setattr("offloadd.tiers.superblock.write_full", once)
    with pytest.raises(OSError, match="crash"):
        small(path, slab_bytes=8 * MIB)
    assert read_volume(str(path)).geometry.slab_bytes == 8 * MIB


def test_show_counts_slabs_by_slot_size_and_notices_truncation(tmp_path):
    path = tmp_path / "volume"
    geometry = small(path)
    cut(path, geometry, 0)
    cut(path, geometry, 2, dirty=False)
    with path.open("r+b") as file:
        file.seek(geometry.slab_offset(3))
        file.write(b"rubbish")
    summary = read_volume(str(path))
    assert (summary.slabs_cut, summary.slabs_dirty, summary.slabs_damaged, summary.slabs_free) == (2, 1, 1, 1)
    assert [(use.slot_bytes, use.slab_count, use.slabs_dirty, use.slot_count) for use in summary.slot_sizes] == [(128 * KIB, 2, 1, 62)]
    os.truncate(path, 17 * MIB)
    with pytest.raises(VolumeDamaged, match=f"{17 * MIB} bytes.*{18 * MIB}"):
        read_volume(str(path))


def test_bytes_between_the_fields_of_a_superblock_are_not_from_our_heap(tmp_path):
    path = tmp_path / "volume"
    small(path)
    raw = path.read_bytes()[:SECTOR_BYTES]
    waste = [np.full(SECTOR_BYTES, 0xAA, dtype=np.uint8) for _ in range(64)]
    del waste
    file = open_volume(str(path), busy_wait_s=0)
    block = read_superblock(file.data_fd, str(path))
    file.close()
    assert block.copy == 0 and block.record.tobytes() == raw

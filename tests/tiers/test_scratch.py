"""The scratch area lies between the tables and the slabs, touches neither, and gives each device bytes of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.errors import VolumeDamaged
from offloadd.tiers.format import NAMESPACE_TABLE_OFFSET, SCRATCH_BYTES_MAX, Geometry, plan_geometry
from offloadd.tiers.scratch import NO_SCRATCH, PROBE_BYTES, Scratch
from offloadd.tiers.superblock import check_geometry
from offloadd.tiers.volume_file import format_volume
from offloadd.tiers.volume_summary import read_volume
from offloadd.units import GIB, MIB, SECTOR_BYTES, align_up

sectors = st.integers(1, 4 * GIB // SECTOR_BYTES).map(lambda count: count * SECTOR_BYTES)
slabs = st.integers(1, 1024).map(lambda count: count * MIB)


def plan(volume_bytes: int, slab_bytes: int, namespace_count: int = 1024) -> Geometry:
    return plan_geometry(volume_uuid=b"u" * 16, volume_bytes=volume_bytes, slab_bytes=slab_bytes, namespace_count=namespace_count)


@given(volume_bytes=st.one_of(sectors, sectors.map(lambda size: size * 1000)), slab_bytes=slabs, namespace_count=st.integers(1, 65536))
def test_scratch_overlaps_neither_tables_nor_slabs_and_costs_a_hundredth_at_most(volume_bytes: int, slab_bytes: int, namespace_count: int) -> None:
    try:
        geometry = plan(volume_bytes, slab_bytes, namespace_count)
    except VolumeDamaged:
        return
    check_geometry(geometry, volume_bytes, "volume")
    begin, end = geometry.scratch_offset, geometry.scratch_offset + geometry.scratch_bytes
    assert NAMESPACE_TABLE_OFFSET + namespace_count * SECTOR_BYTES <= begin <= end <= geometry.slab_offset(0)
    assert begin % MIB == 0 and geometry.scratch_bytes % MIB == 0 and geometry.scratch_bytes <= SCRATCH_BYTES_MAX
    without = (volume_bytes - begin) // slab_bytes
    assert without - without // 100 <= geometry.slab_count <= without
    spare_bytes = volume_bytes - begin - without * slab_bytes
    # What no slab fills is used, and tiny volumes lose no slab to it.
    assert geometry.scratch_bytes >= min(SCRATCH_BYTES_MAX, spare_bytes // MIB * MIB)
    if without >= 100:
        assert geometry.scratch_bytes >= MIB


@given(offset=st.integers(0, 1 << 20).map(lambda count: count * MIB), mibs=st.integers(0, 32), count=st.integers(1, 64), sectors_a_slot=st.integers(2, 2049))
def test_no_byte_of_the_scratch_area_is_two_devices_or_a_probe_and_a_slot(offset: int, mibs: int, count: int, sectors_a_slot: int) -> None:
    whole, slot_bytes = Scratch(offset, mibs * MIB), sectors_a_slot * SECTOR_BYTES
    end = offset
    for index in range(count):
        part = whole.part(index, count)
        if part == NO_SCRATCH:
            assert mibs < count and not part.has_probe and part.slot_count(slot_bytes) == 0
            continue
        ranges = [(part.offset, part.offset + PROBE_BYTES)]
        ranges += [(at, at + slot_bytes) for slot in range(part.slot_count(slot_bytes)) for at in [part.slot_offset(slot, slot, slot_bytes)]]
        for begin, stop in ranges:
            assert begin >= end
            end = stop
        assert end <= part.offset + part.size_bytes <= whole.offset + whole.size_bytes
        with pytest.raises(ValueError, match="outside the scratch area"):
            part.slot_offset(0, part.slot_count(slot_bytes), slot_bytes)


@given(namespace_count=st.integers(1, 65536), extra_sectors=st.integers(-255, 255))
def test_a_volume_of_before_has_no_scratch_area(namespace_count: int, extra_sectors: int) -> None:
    # The slabs began at the first whole MiB behind the table; anything less than a MiB more is no area either.
    tables_end = align_up(NAMESPACE_TABLE_OFFSET + namespace_count * SECTOR_BYTES, MIB)
    geometry = Geometry(b"u" * 16, 1 << 40, GIB, 100, tables_end + extra_sectors * SECTOR_BYTES, namespace_count)
    assert geometry.scratch_bytes == 0
    assert Scratch(geometry.scratch_offset, geometry.scratch_bytes).part(0, 1) == NO_SCRATCH


def test_a_formatted_volume_tells_its_scratch_area(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = str(tmp_path / "volume")
    made = format_volume(path, volume_bytes=200 * MIB, slab_bytes=64 * MIB)
    # 5 MiB of tables, three slabs, and what is over.
    assert (made.scratch_offset, made.scratch_bytes, made.slab_offset(0), made.slab_count) == (5 * MIB, 3 * MIB, 8 * MIB, 3)
    assert read_volume(path).geometry == made

"""What a volume holds, told to people: read without the lock, so also while a daemon has it open."""

import os
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from offloadd.tiers.format import NAMESPACE_DTYPE, NAMESPACE_MAGIC, Geometry, is_sound
from offloadd.tiers.slab_header import SlabHeader, read_slab_headers
from offloadd.tiers.superblock import check_geometry, read_superblock
from offloadd.tiers.volume_io import allocate, file_system_of, open_read_only, read_full, size_of
from offloadd.units import SECTOR_BYTES

_THREADS = 8
_TABLE_PIECE_ENTRIES = 1024


@dataclass(frozen=True, slots=True)
class SlotSizeUse:
    """The slabs that are cut into slots of one size."""

    slot_bytes: int
    slab_count: int
    slabs_dirty: int
    slot_count: int


@dataclass(frozen=True, slots=True)
class VolumeSummary:
    """A volume as it stands on the device. While a daemon writes to it, the counts are those of one moment or another."""

    path: str
    geometry: Geometry
    file_bytes: int
    file_system: str
    #: Openings so far.
    epoch: int
    #: First 16 bytes of SHA-256 of the last owner's machine id; zeros before the first opening.
    owner_host: bytes
    #: Wall time of formatting, nanoseconds since the Unix epoch.
    created_ns: int
    namespaces_live: int
    namespaces_dropped: int
    namespaces_damaged: int
    slabs_cut: int
    slabs_dirty: int
    slabs_free: int
    slabs_damaged: int
    #: Ascending by `slot_bytes`.
    slot_sizes: tuple[SlotSizeUse, ...]
    #: A running daemon holds the lock.
    locked: bool


def read_volume(path: str) -> VolumeSummary:
    """Describe the volume. Raises `VolumeForeign`, `VolumeDamaged` (also if it is truncated), OSError."""
    fd, locked = open_read_only(path)
    try:
        superblock = read_superblock(fd, path)
        geometry = superblock.geometry
        file_bytes = size_of(fd)
        check_geometry(geometry, file_bytes, path)
        live, dropped, damaged = _count_namespaces(fd, geometry, path)
        headers = read_slab_headers(fd, geometry, range(geometry.slab_count), threads=_THREADS)
        file_system = file_system_of(fd)
    finally:
        os.close(fd)
    cut = [header for header in headers if header is not None and header.cut]
    slabs_damaged = sum(header is None for header in headers)
    row = superblock.record[0]
    return VolumeSummary(
        path=path,
        geometry=geometry,
        file_bytes=file_bytes,
        file_system=file_system,
        epoch=int(row["epoch"]),
        owner_host=row["owner_host"].tobytes(),
        created_ns=int(row["created_ns"]),
        namespaces_live=live,
        namespaces_dropped=dropped,
        namespaces_damaged=damaged,
        slabs_cut=len(cut),
        slabs_dirty=sum(header.dirty for header in cut),
        slabs_free=geometry.slab_count - len(cut) - slabs_damaged,
        slabs_damaged=slabs_damaged,
        slot_sizes=_slot_sizes(cut),
        locked=locked,
    )


def _slot_sizes(cut: list[SlabHeader]) -> tuple[SlotSizeUse, ...]:
    by_size: dict[int, list[SlabHeader]] = defaultdict(list)
    for header in cut:
        by_size[header.slot_bytes].append(header)
    return tuple(
        SlotSizeUse(
            slot_bytes=slot_bytes,
            slab_count=len(group),
            slabs_dirty=sum(header.dirty for header in group),
            slot_count=sum(header.slot_count for header in group),
        )
        for slot_bytes, group in sorted(by_size.items())
    )


def _count_namespaces(fd: int, geometry: Geometry, path: str) -> tuple[int, int, int]:
    live = dropped = damaged = 0
    for first in range(0, geometry.namespace_count, _TABLE_PIECE_ENTRIES):
        count = min(_TABLE_PIECE_ENTRIES, geometry.namespace_count - first)
        piece = allocate(count * SECTOR_BYTES)
        read_full(fd, piece, geometry.namespace_offset(first), f"namespace table of {path}")
        sectors = np.frombuffer(piece, dtype=np.uint8).reshape(count, SECTOR_BYTES)
        for index in np.flatnonzero(sectors.any(axis=1)):
            sector = sectors[index]
            if not is_sound(sector.data, NAMESPACE_MAGIC):
                damaged += 1
            elif sector.view(NAMESPACE_DTYPE)[0]["dropped"]:
                dropped += 1
            else:
                live += 1
    return live, dropped, damaged

"""Formatting of a volume: what may be overwritten, and in which order. Takes seconds at any size, since the data area is never written."""

import os
import secrets
import stat
from pathlib import Path

import numpy as np

from offloadd.clock import wall_ns
from offloadd.errors import InvalidRequest, VolumeDamaged, VolumeForeign, VolumeNotEmpty
from offloadd.tiers.format import (
    FORMAT_VERSION,
    NAMESPACE_TABLE_OFFSET,
    SUPERBLOCK_DTYPE,
    SUPERBLOCK_MAGIC,
    SUPERBLOCK_OFFSETS,
    Geometry,
    new_record,
    plan_geometry,
)
from offloadd.tiers.slab_header import map_threads, read_slab_headers
from offloadd.tiers.superblock import Superblock, read_superblock, write_superblocks
from offloadd.tiers.volume_io import ZERO_SECTOR, VolumeFile, allocate, open_volume, read_full, read_up_to, size_of, sync, write_full
from offloadd.units import GIB, MIB, SECTOR_BYTES

#: The table is read whole at each start: 65,536 entries are 256 MiB.
NAMESPACE_COUNT_MAX = 65_536
#: `offloadd volume show` holds a volume's lock for an instant.
_BUSY_WAIT_S = 0.5
_THREADS = 8


def format_volume(
    path: str,
    *,
    volume_bytes: int | None,
    slab_bytes: int = GIB,
    namespace_count: int = 1024,
    overwrite_blocks: bool = False,
) -> Geometry:
    """Make `path` an empty volume and return its geometry.

    A file that does not exist is created, sparse, with `volume_bytes`. Of an existing file or block device the present size is taken if
    `volume_bytes` is None; a file is made as long as asked for. Raises `InvalidRequest` (sizes), `VolumeForeign` (the first MiB holds something
    else), `VolumeNotEmpty` (an offloadd volume with cut slabs, unless `overwrite_blocks`), `VolumeBusy` (locked), OSError.
    """
    _check_sizes(volume_bytes, slab_bytes, namespace_count)
    created = not os.path.lexists(path)
    if created:
        if volume_bytes is None:
            raise InvalidRequest(f"{path} does not exist; volume_bytes is needed to create it")
        _plan(volume_bytes, slab_bytes, namespace_count)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        file = open_volume(path, busy_wait_s=_BUSY_WAIT_S)
        try:
            return _format_open(file, volume_bytes, slab_bytes, namespace_count, overwrite_blocks)
        finally:
            file.close()
    except BaseException:
        if created:
            Path(path).unlink(missing_ok=True)
        raise


def _check_sizes(volume_bytes: int | None, slab_bytes: int, namespace_count: int) -> None:
    if slab_bytes < MIB or slab_bytes % MIB:
        raise InvalidRequest(f"slab_bytes is {slab_bytes}; a multiple of {MIB} (1 MiB), at least {MIB}, is needed")
    if not 1 <= namespace_count <= NAMESPACE_COUNT_MAX:
        raise InvalidRequest(f"namespace_count is {namespace_count}; 1 to {NAMESPACE_COUNT_MAX} are possible")
    if volume_bytes is not None and (volume_bytes < 1 or volume_bytes % SECTOR_BYTES):
        raise InvalidRequest(f"volume_bytes is {volume_bytes}; a positive multiple of {SECTOR_BYTES} is needed")


def _plan(volume_bytes: int, slab_bytes: int, namespace_count: int) -> Geometry:
    try:
        return plan_geometry(volume_uuid=secrets.token_bytes(16), volume_bytes=volume_bytes, slab_bytes=slab_bytes, namespace_count=namespace_count)
    except VolumeDamaged as error:
        raise InvalidRequest(str(error)) from error


def _format_open(file: VolumeFile, volume_bytes: int | None, slab_bytes: int, namespace_count: int, overwrite_blocks: bool) -> Geometry:
    """Order: until the first new superblock stands, the old volume still counts, with fewer and fewer slabs; from then on the new one, empty.

    Nothing old can count in the new volume: its uuid is new, so no slab or slot header of before matches. The namespace table carries no uuid and is
    therefore zeroed; slab headers are zeroed as well, so that they are not counted as damaged ones at each start.
    """
    regular = stat.S_ISREG(os.fstat(file.data_fd).st_mode)
    old = _old_superblock(file, overwrite_blocks)
    volume_bytes = file.size_bytes // SECTOR_BYTES * SECTOR_BYTES if volume_bytes is None else volume_bytes
    if volume_bytes > file.size_bytes and not regular:
        raise InvalidRequest(f"volume_bytes is {volume_bytes}; the device {file.path} has {file.size_bytes}")
    geometry = _plan(volume_bytes, slab_bytes, namespace_count)

    stale = {geometry.slab_offset(slab) for slab in range(geometry.slab_count)}
    if old is not None:
        stale |= {old.geometry.slab_offset(slab) for slab in range(old.geometry.slab_count)}
    # Beyond the present end of the file there is nothing to make invalid: the new part of a file reads as zeros.
    _zero_sectors(file, [offset for offset in stale if offset + SECTOR_BYTES <= file.size_bytes])
    if volume_bytes > file.size_bytes:
        os.ftruncate(file.data_fd, volume_bytes)
    if file.size_bytes > 0:
        _zero_range(file, NAMESPACE_TABLE_OFFSET, geometry.data_offset)
    sync(file.data_fd, f"tables of {file.path}")
    _write_first_superblocks(file, geometry, old)
    if regular and size_of(file.data_fd) > volume_bytes:
        os.ftruncate(file.data_fd, volume_bytes)
    os.fsync(file.data_fd)
    _sync_directory(file.path)
    return geometry


def _old_superblock(file: VolumeFile, overwrite_blocks: bool) -> Superblock | None:
    """The superblock of the volume that is there, None if there is none; raises if it may not be overwritten."""
    head = allocate(MIB)
    count = read_up_to(file.data_fd, head, 0, f"the first MiB of {file.path}")
    if not any(bytes(head[offset : offset + 7]) == SUPERBLOCK_MAGIC[:7] for offset in SUPERBLOCK_OFFSETS):
        if np.frombuffer(head, dtype=np.uint8)[:count].any():
            raise VolumeForeign(
                f"{file.path} is not an offloadd volume, and its first {count} bytes are not zero: zero them (wipefs, dd) if nothing there is needed"
            )
        return None
    try:
        old = read_superblock(file.data_fd, file.path)
    except VolumeDamaged as error:
        if overwrite_blocks:
            return None
        raise VolumeNotEmpty(f"{error}; it may hold blocks") from error
    if not overwrite_blocks:
        geometry = old.geometry
        present = [slab for slab in range(geometry.slab_count) if geometry.slab_offset(slab) + SECTOR_BYTES <= file.size_bytes]
        headers = read_slab_headers(file.data_fd, geometry, present, threads=_THREADS)
        cut_count = sum(header is None or header.cut for header in headers)
        if cut_count:
            raise VolumeNotEmpty(f"{file.path} is an offloadd volume with {cut_count} of {geometry.slab_count} slabs cut; they may hold blocks")
    return old


def _zero_sectors(file: VolumeFile, offsets: list[int]) -> None:
    """Zero those of the sectors that are not zero: writing into the holes of a sparse file would only allocate blocks."""

    def zero(offset: int) -> None:
        sector = allocate(SECTOR_BYTES)
        read_full(file.data_fd, sector, offset, f"slab header of {file.path}")
        if bytes(sector) != ZERO_SECTOR:
            write_full(file.data_fd, allocate(SECTOR_BYTES), offset, f"slab header of {file.path}")

    map_threads(zero, sorted(offsets), _THREADS)


def _zero_range(file: VolumeFile, start: int, end: int) -> None:
    zeros = allocate(min(4 * MIB, end - start))
    for offset in range(start, end, len(zeros)):
        write_full(file.data_fd, zeros[: min(len(zeros), end - offset)], offset, f"namespace table of {file.path}")


def _write_first_superblocks(file: VolumeFile, geometry: Geometry, old: Superblock | None) -> None:
    record = new_record(SUPERBLOCK_DTYPE)
    row = record[0]
    row["magic"] = np.void(SUPERBLOCK_MAGIC)
    row["format_version"] = FORMAT_VERSION
    row["volume_uuid"] = np.void(geometry.volume_uuid)
    row["volume_bytes"] = geometry.volume_bytes
    row["slab_bytes"] = geometry.slab_bytes
    row["slab_count"] = geometry.slab_count
    row["data_offset"] = geometry.data_offset
    row["namespace_count"] = geometry.namespace_count
    row["created_ns"] = wall_ns()
    # Counting on from the old volume's: after a crash between the two writes the new copy outranks the old one.
    row["write_count"] = 0 if old is None else int(old.record["write_count"][0])
    write_superblocks(file.synced_fd, record, counting_copy=0 if old is None else old.copy, name=file.path)


def _sync_directory(path: str) -> None:
    fd = os.open(Path(path).absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

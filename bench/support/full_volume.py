"""A volume full of blocks that were never written: headers and summaries as a daemon leaves them, in a sparse file of any size."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.support.fakes import random_keys
from offloadd.catalog.index import Keys
from offloadd.keeper.namespaces import NamespaceTable
from offloadd.model.namespace import Namespace
from offloadd.tiers.format import (
    CHECKSUM_CRC32C,
    FORMAT_VERSION,
    NAMESPACE_TABLE_OFFSET,
    SCRATCH_BYTES_MAX,
    SLOT_DTYPE,
    SLOT_MAGIC,
    SUMMARY_DTYPE,
    Geometry,
    seal,
    slot_bytes_for,
    slot_count_for,
    summary_bytes_for,
)
from offloadd.tiers.slab_header import SlabHeader
from offloadd.tiers.superblock import write_record
from offloadd.tiers.volume_file import format_volume
from offloadd.tiers.volume_io import allocate, open_volume, sync, write_full
from offloadd.transfer.checksum import crc32c
from offloadd.units import MIB, SECTOR_BYTES, align_up

NAMESPACE_COUNT = 64


KeysOf = Callable[[int, int], Keys]


def make_full_volume(path: Path, *, slab_count: int, slab_bytes: int, block_bytes: int, dirty_count: int, keys_of: KeysOf = random_keys) -> int:
    """Make the volume; `keys_of(count, slab)` names the blocks of each slab. Every slot of every slab holds a block; returns how many.

    The last `dirty_count` slabs are dirty: no summary, headers in their slots. Clean slabs get their summary only, since nobody reads the headers of their
    slots at a start.
    """
    tables = align_up(NAMESPACE_TABLE_OFFSET + NAMESPACE_COUNT * SECTOR_BYTES, MIB)
    geometry = format_volume(
        str(path), volume_bytes=tables + SCRATCH_BYTES_MAX + slab_count * slab_bytes, slab_bytes=slab_bytes, namespace_count=NAMESPACE_COUNT
    )
    if geometry.slab_count != slab_count:
        raise RuntimeError(f"the volume has {geometry.slab_count} slabs; {slab_count} are to be filled")
    file = open_volume(str(path), busy_wait_s=5.0)
    # Through the page cache: tens of thousands of single sectors, synced once.
    cached_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        table = NamespaceTable(file.synced_fd, geometry)
        table.read(file.data_fd)
        table.add(Namespace(model="bench").id(), "bench", b"")
        for slab in range(slab_count):
            _fill_slab(cached_fd, geometry, slab, block_bytes, keys_of, dirty=slab >= slab_count - dirty_count)
        sync(cached_fd, str(path))
        os.posix_fadvise(cached_fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(cached_fd)
        file.close()
    return slab_count * slot_count_for(slab_bytes, slot_bytes_for(block_bytes))


def _fill_slab(fd: int, geometry: Geometry, slab: int, block_bytes: int, keys_of: KeysOf, *, dirty: bool) -> None:
    slot_bytes = slot_bytes_for(block_bytes)
    slot_count = slot_count_for(geometry.slab_bytes, slot_bytes)
    nonce = secrets.token_bytes(16)
    keys = keys_of(slot_count, slab)
    summary_crc = 0
    if dirty:
        _write_slots(fd, geometry, slab, nonce, block_bytes, keys)
    else:
        records = np.zeros(slot_count, dtype=SUMMARY_DTYPE)
        records["key"] = keys
        records["generation"] = records["namespace_epoch"] = 1
        records["payload_bytes"] = block_bytes
        summary = allocate(summary_bytes_for(slot_count))
        summary[: records.nbytes] = records.tobytes()
        write_full(fd, summary, geometry.slab_offset(slab) + SECTOR_BYTES, "summary")
        summary_crc = crc32c(summary)
    header = SlabHeader(slab=slab, cut=True, slot_bytes=slot_bytes, slot_count=slot_count, nonce=nonce, dirty=dirty, written=True, summary_crc=summary_crc)
    write_record(fd, header.record(geometry, 0), geometry.slab_offset(slab), "slab header")


def _write_slots(fd: int, geometry: Geometry, slab: int, nonce: bytes, block_bytes: int, keys: "np.ndarray[tuple[int], np.dtype[np.void]]") -> None:
    slot_bytes = slot_bytes_for(block_bytes)
    headers = np.zeros(len(keys), dtype=SLOT_DTYPE)
    headers["magic"] = np.void(SLOT_MAGIC)
    headers["format_version"] = FORMAT_VERSION
    headers["checksum_kind"] = CHECKSUM_CRC32C
    headers["key"] = keys
    headers["volume_uuid"] = np.void(geometry.volume_uuid)
    headers["nonce"] = np.void(nonce)
    headers["slab"] = slab
    headers["slot"] = np.arange(len(keys))
    headers["generation"] = headers["namespace_epoch"] = 1
    headers["payload_bytes"] = block_bytes
    seal(headers)
    raw = headers.tobytes()
    for slot in range(len(keys)):
        write_full(fd, raw[slot * SECTOR_BYTES : (slot + 1) * SECTOR_BYTES], geometry.slot_offset(slab, slot, slot_bytes), "slot header")

"""The pair of superblocks on an open volume: read, checked against the file, and rewritten so that one sound copy exists at any moment."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from offloadd.errors import VolumeDamaged
from offloadd.tiers.format import (
    NAMESPACE_TABLE_OFFSET,
    SUPERBLOCK_DTYPE,
    SUPERBLOCK_OFFSETS,
    Array,
    Geometry,
    geometry_of,
    parse_superblocks,
    seal,
)
from offloadd.tiers.volume_io import allocate, read_up_to, write_full
from offloadd.units import SECTOR_BYTES


@dataclass(frozen=True, slots=True)
class Superblock:
    """The copy that counts. `record` has dtype SUPERBLOCK_DTYPE and shape (1,); `copy` is its position in SUPERBLOCK_OFFSETS."""

    record: Array
    copy: int

    @property
    def geometry(self) -> Geometry:
        """Where everything lies."""
        return geometry_of(self.record)


def read_superblock(fd: int, name: str) -> Superblock:
    """The superblock that counts; one unreadable copy is forgiven.

    Raises `VolumeForeign` or `VolumeDamaged` as `parse_superblocks` does, OSError if no copy can be read.
    """
    raws: list[bytes] = []
    failure: OSError | None = None
    for offset in SUPERBLOCK_OFFSETS:
        buffer = allocate(SECTOR_BYTES)
        try:
            count = read_up_to(fd, buffer, offset, f"superblock of {name}")
        except OSError as error:
            failure, count = error, 0
        raws.append(bytes(buffer[:count]))
    if failure is not None and not any(raws):
        raise failure
    raw = parse_superblocks(raws[0], raws[1], name=name).tobytes()
    return Superblock(record=writable_record(raw, SUPERBLOCK_DTYPE), copy=0 if raws[0] == raw else 1)


def check_geometry(geometry: Geometry, size_bytes: int, name: str) -> None:
    """Raise `VolumeDamaged` if the file or device is shorter than its volume, or the superblock describes an impossible one."""
    if size_bytes < geometry.volume_bytes:
        raise VolumeDamaged(f"{name} has {size_bytes} bytes; its superblock says {geometry.volume_bytes}: it was truncated or its device shrank")
    table_end = NAMESPACE_TABLE_OFFSET + geometry.namespace_count * SECTOR_BYTES
    slabs_end = geometry.data_offset + geometry.slab_count * geometry.slab_bytes
    aligned = geometry.data_offset % SECTOR_BYTES == 0 and geometry.slab_bytes % SECTOR_BYTES == 0
    if geometry.slab_count < 1 or not aligned or table_end > geometry.data_offset or slabs_end > geometry.volume_bytes:
        raise VolumeDamaged(
            f"{name}: its superblock puts {geometry.slab_count} slabs of {geometry.slab_bytes} bytes at {geometry.data_offset}, which does not fit "
            f"a table that ends at {table_end} and a volume of {geometry.volume_bytes} bytes"
        )


def write_superblocks(synced_fd: int, record: Array, *, counting_copy: int, name: str) -> None:
    """Write both copies with rising `write_count` through the O_DSYNC descriptor.

    The copy that counts is overwritten last, when the other one stands on the device: a torn write leaves one that is sound.
    """
    for copy in (1 - counting_copy, counting_copy):
        record["write_count"] += 1
        write_record(synced_fd, record, SUPERBLOCK_OFFSETS[copy], f"superblock {'AB'[copy]} of {name}")


def writable_record(raw: bytes, dtype: np.dtype[Any]) -> Array:
    """A record of its own, shape (1,), with every byte of `raw`.

    `ndarray.copy` copies fields only: what lies between them would be whatever the heap held before, and end up on the volume.
    """
    return np.frombuffer(bytearray(raw), dtype=dtype)


def write_record(fd: int, record: Array, offset: int, what: str) -> None:
    """Seal one 4 KiB record and write it."""
    seal(record)
    buffer = allocate(SECTOR_BYTES)
    buffer[:] = record.tobytes()
    write_full(fd, buffer, offset, what)

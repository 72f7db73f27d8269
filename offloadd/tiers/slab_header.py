"""What a slab's header says, as a value: read, checked against the volume, and turned back into its record."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from offloadd.tiers.format import (
    FORMAT_VERSION,
    SLAB_CUT,
    SLAB_DTYPE,
    SLAB_MAGIC,
    SLAB_UNCUT,
    Array,
    Geometry,
    is_sound,
    new_record,
    slot_count_for,
    summary_bytes_for,
)
from offloadd.tiers.volume_io import ZERO_SECTOR, allocate, read_full
from offloadd.units import SECTOR_BYTES

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """One slab: cut into `slot_count` slots of `slot_bytes`, or uncut (then only `written` means anything)."""

    slab: int
    cut: bool = False
    slot_bytes: int = 0
    slot_count: int = 0
    nonce: bytes = bytes(16)
    #: Slots may have changed since the summary was written.
    dirty: bool = False
    #: The whole slab has been written once: no extent of it reads as zeros after a power cut.
    written: bool = False
    summary_crc: int = 0

    def record(self, geometry: Geometry, epoch: int) -> Array:
        """The record to write (SLAB_DTYPE, shape (1,), not sealed)."""
        record = new_record(SLAB_DTYPE)
        row = record[0]
        row["magic"] = np.void(SLAB_MAGIC)
        row["format_version"] = FORMAT_VERSION
        row["volume_uuid"] = np.void(geometry.volume_uuid)
        row["slab"] = self.slab
        row["slot_bytes"] = self.slot_bytes
        row["slot_count"] = self.slot_count
        row["nonce"] = np.void(self.nonce)
        row["state"] = SLAB_CUT if self.cut else SLAB_UNCUT
        row["dirty"] = self.dirty
        row["written"] = self.written
        row["epoch"] = epoch
        row["summary_bytes"] = summary_bytes_for(self.slot_count)
        row["summary_crc"] = self.summary_crc
        return record


def parse_slab_header(raw: bytes, geometry: Geometry, slab: int) -> SlabHeader | None:
    """The header in 4 KiB of raw bytes: zeros are an uncut slab; None if it is damaged, or another volume's or slab's."""
    if raw == ZERO_SECTOR:
        return SlabHeader(slab=slab)
    if not is_sound(raw, SLAB_MAGIC):
        return None
    row = np.frombuffer(raw, dtype=SLAB_DTYPE)[0]
    if int(row["format_version"]) != FORMAT_VERSION or row["volume_uuid"].tobytes() != geometry.volume_uuid or int(row["slab"]) != slab:
        return None
    if int(row["state"]) == SLAB_UNCUT:
        return SlabHeader(slab=slab, written=bool(row["written"]))
    slot_bytes, slot_count = int(row["slot_bytes"]), int(row["slot_count"])
    sized = slot_bytes >= 2 * SECTOR_BYTES and slot_bytes % SECTOR_BYTES == 0 and 0 < slot_count == slot_count_for(geometry.slab_bytes, slot_bytes)
    if int(row["state"]) != SLAB_CUT or not sized:
        return None
    return SlabHeader(
        slab=slab,
        cut=True,
        slot_bytes=slot_bytes,
        slot_count=slot_count,
        nonce=row["nonce"].tobytes(),
        dirty=bool(row["dirty"]),
        written=bool(row["written"]),
        summary_crc=int(row["summary_crc"]),
    )


def read_slab_headers(fd: int, geometry: Geometry, slabs: Iterable[int], *, threads: int) -> list[SlabHeader | None]:
    """The headers of these slabs, in order. None: damaged or unreadable; an I/O error costs its slab only."""

    def read(slab: int) -> SlabHeader | None:
        buffer = allocate(SECTOR_BYTES)
        try:
            read_full(fd, buffer, geometry.slab_offset(slab), f"header of slab {slab}")
        except OSError:
            return None
        return parse_slab_header(bytes(buffer), geometry, slab)

    return map_threads(read, list(slabs), threads)


def map_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """`function` of every item, in order, on up to `threads` threads: tens of thousands of 4 KiB reads wait for the device, not for each other."""
    if len(items) < 2 or threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(threads, len(items)), thread_name_prefix="volume-read") as pool:
        # One future a stretch of items: a future costs as much as a read.
        stretch = max(1, min(64, len(items) // threads))
        parts = pool.map(lambda first: [function(item) for item in items[first : first + stretch]], range(0, len(items), stretch))
        return [result for part in parts for result in part]

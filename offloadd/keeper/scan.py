"""The start-up scan: which block each slot of a volume holds, from the summaries of clean slabs and the slot headers of all others.

Clean slabs come first: they cost one read each, and the volume serves their blocks while the dirty ones are scanned.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offloadd.keeper.messages import ScanFinished
from offloadd.tiers.format import (
    FORMAT_VERSION,
    SLOT_DTYPE,
    SLOT_MAGIC,
    SUMMARY_DTYPE,
    Array,
    Geometry,
    is_sound,
    summary_bytes_for,
)
from offloadd.tiers.slab_header import SlabHeader
from offloadd.tiers.volume_io import allocate, read_full
from offloadd.transfer.checksum import crc32c
from offloadd.units import KIB, MIB, SECTOR_BYTES

#: Up to this slot size one long read beats many short ones: 2 GB/s of span against some 10,000 headers a second and thread.
SPAN_SLOT_BYTES_MAX = 64 * KIB
_SPAN_BYTES = 2 * MIB
_HEADERS_PER_JOB = 64
_NONCE_OFFSET = 80
assert SLOT_DTYPE.fields is not None and SLOT_DTYPE.fields["nonce"][1] == _NONCE_OFFSET

#: Tells the front what one slab holds: its header, and SUMMARY_DTYPE records of all its slots, whatever became of their namespaces.
Tell = Callable[[SlabHeader, Array], None]


@dataclass(slots=True)
class _Counts:
    slabs_from_summary: int = 0
    slabs_scanned: int = 0
    slabs_failed: int = 0
    header_bytes_read: int = 0
    headers_bad: int = 0


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What the headers of some neighbouring slots say. `records` have no generation where there is no block."""

    records: Array
    generation_max: int
    headers_bad: int
    bytes_read: int


class Scanner:
    """Scans once. `run` returns when every slab has been told; `tell` is called from several threads."""

    def __init__(self, *, fd: int, geometry: Geometry, headers: list[SlabHeader], tell: Tell, io_threads: int) -> None:
        self._fd = fd
        self._geometry = geometry
        self._headers = headers
        self._tell = tell
        self._io_threads = io_threads

    def run(self) -> ScanFinished:
        """Tell every slab. An I/O error costs its slab only: it is told as having no blocks, and counted."""
        start_ns = time.monotonic_ns()
        counts = _Counts()
        with ThreadPoolExecutor(max_workers=self._io_threads, thread_name_prefix="scan") as pool:
            clean = [header for header in self._headers if not header.dirty]
            unclear = [header for header, told in zip(clean, pool.map(self._tell_from_summary, clean), strict=True) if not told]
            counts.slabs_from_summary = len(clean) - len(unclear)
            for header in [*unclear, *(header for header in self._headers if header.dirty)]:
                self._scan_slab(header, pool, counts)
        return ScanFinished(
            slabs_from_summary=counts.slabs_from_summary,
            slabs_scanned=counts.slabs_scanned,
            header_bytes_read=counts.header_bytes_read,
            headers_bad=counts.headers_bad,
            scan_ns=time.monotonic_ns() - start_ns,
            slabs_failed=counts.slabs_failed,
        )

    def _tell_from_summary(self, header: SlabHeader) -> bool:
        """False if the summary can't be believed: then the slots are asked."""
        summary = allocate(summary_bytes_for(header.slot_count))
        try:
            read_full(self._fd, summary, self._geometry.slab_offset(header.slab) + SECTOR_BYTES, f"summary of slab {header.slab}")
        except OSError:
            return False
        if crc32c(summary) != header.summary_crc:
            return False
        # The mapping is writable and ours alone, and lives as long as the array.
        self._tell(header, np.frombuffer(summary, dtype=SUMMARY_DTYPE, count=header.slot_count))
        return True

    def _scan_slab(self, header: SlabHeader, pool: ThreadPoolExecutor, counts: _Counts) -> None:
        span = header.slot_bytes <= SPAN_SLOT_BYTES_MAX
        step = max(1, _SPAN_BYTES // header.slot_bytes) if span else _HEADERS_PER_JOB
        read = self._read_span if span else self._read_headers
        jobs = [pool.submit(read, header, first, min(step, header.slot_count - first)) for first in range(0, header.slot_count, step)]
        records = np.zeros(header.slot_count, dtype=SUMMARY_DTYPE)
        generation_max = 0
        failed = False
        for number, job in enumerate(jobs):
            if failed:
                # A volume that answers with errors may take its time for each: what has not begun is not begun.
                job.cancel()
                continue
            try:
                stretch = job.result()
            except OSError:
                failed = True
                continue
            first = number * step
            records[first : first + len(stretch.records)] = stretch.records
            generation_max = max(generation_max, stretch.generation_max)
            counts.headers_bad += stretch.headers_bad
            counts.header_bytes_read += stretch.bytes_read
        if failed:
            records[:] = np.zeros(1, dtype=SUMMARY_DTYPE)
            counts.slabs_failed += 1
        else:
            counts.slabs_scanned += 1
        # Which generations were used in a slot without a sound header is unknown; the next one rises above all that the slab has seen.
        records["generation"][records["payload_bytes"] == 0] = generation_max
        self._tell(header, records)

    def _read_headers(self, header: SlabHeader, first: int, count: int) -> _Stretch:
        sectors = allocate(count * SECTOR_BYTES)
        for index in range(count):
            offset = self._geometry.slot_offset(header.slab, first + index, header.slot_bytes)
            read_full(self._fd, sectors[index * SECTOR_BYTES : (index + 1) * SECTOR_BYTES], offset, f"slot {first + index} of slab {header.slab}")
        raw = np.frombuffer(sectors, dtype=np.uint8).reshape(count, SECTOR_BYTES)
        return pick_blocks(raw, header, first, self._geometry.volume_uuid, len(sectors))

    def _read_span(self, header: SlabHeader, first: int, count: int) -> _Stretch:
        span = allocate(count * header.slot_bytes)
        read_full(self._fd, span, self._geometry.slot_offset(header.slab, first, header.slot_bytes), f"slots from {first} of slab {header.slab}")
        raw = np.frombuffer(span, dtype=np.uint8).reshape(count, header.slot_bytes)[:, :SECTOR_BYTES]
        return pick_blocks(raw, header, first, self._geometry.volume_uuid, len(span))


def pick_blocks(raw: npt.NDArray[np.uint8], header: SlabHeader, first: int, volume_uuid: bytes, bytes_read: int) -> _Stretch:
    """What the slot headers in `raw`, shape (count, 4096), say about the slots from `first` on.

    A header counts if it is sound and names this volume, this cut, this slab, its own slot, a generation, and a payload of the slab's slot size. One
    that carries our magic or this cut's nonce and does not count is bad. Everything else is space not used since the cut: zeros, or, in a slab
    that was cut before, old payload and old headers.
    """
    has_magic = (raw[:, : len(SLOT_MAGIC)] == np.frombuffer(SLOT_MAGIC, dtype=np.uint8)).all(axis=1)
    has_nonce = (raw[:, _NONCE_OFFSET : _NONCE_OFFSET + 16] == np.frombuffer(header.nonce, dtype=np.uint8)).all(axis=1)
    records = np.zeros(len(raw), dtype=SUMMARY_DTYPE)
    generation_max = headers_bad = 0
    for index in np.flatnonzero(has_magic | has_nonce):
        sector = raw[index]
        if not is_sound(sector.data, SLOT_MAGIC):
            headers_bad += 1
            continue
        row = sector.view(SLOT_DTYPE)[0]
        if not has_nonce[index]:
            continue
        of_this_slab = row["volume_uuid"].tobytes() == volume_uuid and int(row["slab"]) == header.slab
        generation = int(row["generation"])
        if of_this_slab:
            generation_max = max(generation_max, generation)
        payload_bytes = int(row["payload_bytes"])
        of_this_slot = of_this_slab and int(row["slot"]) == first + int(index) and int(row["format_version"]) == FORMAT_VERSION and generation > 0
        if not of_this_slot or not header.slot_bytes - 2 * SECTOR_BYTES < payload_bytes <= header.slot_bytes - SECTOR_BYTES:
            headers_bad += 1
            continue
        record = records[index]
        for name in ("key", "generation", "namespace_ordinal", "namespace_epoch", "flags", "payload_bytes"):
            record[name] = row[name]
    return _Stretch(records=records, generation_max=generation_max, headers_bad=headers_bad, bytes_read=bytes_read)

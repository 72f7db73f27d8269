"""An open volume: its epoch, its slab headers, and the order of writes that makes each change of them safe against a crash.

uncut ──cut──▶ open (dirty) ──close: summary, then header──▶ clean ──open: header──▶ open (dirty)
  ▲              │ cut                                         │ cut
  └──(zeros)─────┴─────────────────────────────────────────────┘
"""

import hashlib
import os
import secrets
import socket
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from offloadd.errors import InvalidRequest
from offloadd.keeper.namespaces import NamespaceTable
from offloadd.tiers.format import CHUNK_COUNT_MAX, Array, Geometry, chunk_count_for, slot_count_for, summary_bytes_for
from offloadd.tiers.slab_header import SlabHeader, read_slab_headers
from offloadd.tiers.superblock import Superblock, check_geometry, read_superblock, write_record, write_superblocks
from offloadd.tiers.volume_io import VolumeFile, adopt_volume, allocate, open_volume, sync, write_full
from offloadd.transfer.checksum import crc32c
from offloadd.units import MIB, SECTOR_BYTES

#: A mover of the daemon before us may still be dying with the lock in its hands.
LOCK_WAIT_S = 3.0
#: Bytes of one prewrite: long enough for full bandwidth, short enough that a closing keeper waits for little.
PREWRITE_BYTES = 4 * MIB


class Volume:
    """One open volume. `headers` belongs to the main thread; `cut`, `open_slab` and `close_slab` only write, and return the header that now stands."""

    def __init__(
        self, *, file: VolumeFile, geometry: Geometry, epoch: int, namespaces: NamespaceTable, headers: list[SlabHeader], headers_damaged: int
    ) -> None:
        self.file = file
        self.geometry = geometry
        self.epoch = epoch
        self.namespaces = namespaces
        #: By slab. Never claims dirty what may be clean on the device: after a failed write, the next opening of the slab writes again.
        self.headers = headers
        #: Slab headers that were unreadable or not sound when the volume was opened; their slabs count as uncut.
        self.headers_damaged = headers_damaged

    def cut(self, before: SlabHeader, slot_bytes: int, *, prewrite: bool, check_stop: Callable[[], None]) -> SlabHeader:
        """Cut a slab into slots of `slot_bytes` with a new nonce. `check_stop` is called between writes and may raise. OSError: the slab is uncut.

        What a crash leaves behind, step by step (P: prewrite, only if the slab was never written in this volume's life):

            before 1              the old cut, as it was; whoever reads it finds true blocks of before
            within 1 (torn)       an unsound header: the slab is uncut
            after 1, within P     uncut, `written` not set: nothing of the slab counts, and the next cut prewrites again from the start
            after P, before its   the same: zeros may still be in the device's cache
              fdatasync
            within 2 (torn)       uncut; without P this is step 1
            after 2               cut and dirty, with a nonce that no slot on the volume carries: the scan finds it empty

        The old header goes first. Were the slots zeroed first, a clean slab's summary would go on promising blocks that are zeros; and were the new
        header (state cut) written before the prewrite, a crash would leave a slab open for writing with unwritten extents. Old payloads that
        imitate slot headers can only carry nonces that were known when they were written; the new one is drawn here.
        """
        slot_count = self.check_slot_bytes(slot_bytes)
        after = SlabHeader(
            slab=before.slab, cut=True, slot_bytes=slot_bytes, slot_count=slot_count, nonce=secrets.token_bytes(16), dirty=True, written=before.written
        )
        if prewrite and not before.written:
            self._write_header(SlabHeader(slab=before.slab))
            self._prewrite(before.slab, check_stop)
            after = replace(after, written=True)
        self._write_header(after)
        return after

    def open_slab(self, header: SlabHeader) -> SlabHeader:
        """Set the dirty bit: after a crash the slots are read instead of the summary. OSError: it may or may not be set."""
        if header.dirty:
            return header
        after = replace(header, dirty=True)
        self._write_header(after)
        return after

    def close_slab(self, header: SlabHeader, records: Array) -> SlabHeader:
        """Write the summary (SUMMARY_DTYPE, one record a slot) and clear the dirty bit.

        The first fdatasync covers the slots as well: the summary never tells of a block that is still in the device's cache. A crash before the header
        is written leaves the slab dirty, and it is scanned. OSError: the slab may be dirty or clean, and both are true.
        """
        summary = allocate(summary_bytes_for(header.slot_count))
        raw = records.tobytes()
        summary[: len(raw)] = raw
        write_full(self.file.data_fd, summary, self.geometry.slab_offset(header.slab) + SECTOR_BYTES, f"summary of slab {header.slab}")
        sync(self.file.data_fd, f"summary of slab {header.slab}")
        after = replace(header, dirty=False, summary_crc=crc32c(summary))
        self._write_header(after)
        return after

    def check_slab(self, slab: int) -> SlabHeader:
        """The slab's header; raises `InvalidRequest` if there is no such slab."""
        if not 0 <= slab < self.geometry.slab_count:
            raise InvalidRequest(f"slab {slab} does not exist; the volume has {self.geometry.slab_count}")
        return self.headers[slab]

    def check_slot_bytes(self, slot_bytes: int) -> int:
        """The slot count of a slab cut into slots of `slot_bytes`; raises `InvalidRequest` if that can't be."""
        if slot_bytes < 2 * SECTOR_BYTES or slot_bytes % SECTOR_BYTES:
            raise InvalidRequest(f"slot_bytes is {slot_bytes}; a multiple of {SECTOR_BYTES}, at least {2 * SECTOR_BYTES}, is needed")
        slot_count = slot_count_for(self.geometry.slab_bytes, slot_bytes)
        if slot_count < 1:
            raise InvalidRequest(f"a slot of {slot_bytes} bytes does not fit into a slab of {self.geometry.slab_bytes}")
        if chunk_count_for(slot_bytes - SECTOR_BYTES) > CHUNK_COUNT_MAX:
            raise InvalidRequest(f"a slot of {slot_bytes} bytes has {chunk_count_for(slot_bytes - SECTOR_BYTES)} chunks; its header holds {CHUNK_COUNT_MAX}")
        return slot_count

    def _write_header(self, header: SlabHeader) -> None:
        record = header.record(self.geometry, self.epoch)
        write_record(self.file.synced_fd, record, self.geometry.slab_offset(header.slab), f"header of slab {header.slab}")

    def _prewrite(self, slab: int, check_stop: Callable[[], None]) -> None:
        """Zeros over everything behind the header, summary included: another slot size puts slots where this one has its summary."""
        start = self.geometry.slab_offset(slab)
        zeros = allocate(min(PREWRITE_BYTES, self.geometry.slab_bytes))
        for first in range(0, self.geometry.slab_bytes, PREWRITE_BYTES):
            check_stop()
            skipped = SECTOR_BYTES if first == 0 else 0
            length = min(PREWRITE_BYTES, self.geometry.slab_bytes - first) - skipped
            write_full(self.file.data_fd, zeros[:length], start + first + skipped, f"zeros of slab {slab}")
        sync(self.file.data_fd, f"zeros of slab {slab}")


def open_kept_volume(path: str, fds: list[int], *, io_threads: int, on_answer: Callable[[], None] = lambda: None) -> Volume:
    """Open and lock the volume (or adopt the two descriptors in `fds`), read its tables, and begin a new epoch. `on_answer()`: it is locked, and was read from.

    Raises the leaves of `VolumeError`, `InvalidRequest` or OSError; then nothing stays open, and `fds` are closed too.
    """
    if len(fds) == 2:
        file = adopt_volume(path, fds[0], fds[1])
    elif fds:
        for fd in fds:
            os.close(fd)
        raise InvalidRequest(f"{len(fds)} descriptors came with the volume; 0 or 2 are needed")
    else:
        file = open_volume(path, busy_wait_s=LOCK_WAIT_S)
    try:
        superblock = read_superblock(file.data_fd, path)
        on_answer()
        geometry = superblock.geometry
        check_geometry(geometry, file.size_bytes, path)
        namespaces = NamespaceTable(file.synced_fd, geometry)
        namespaces.read(file.data_fd)
        found = read_slab_headers(file.data_fd, geometry, range(geometry.slab_count), threads=io_threads)
        headers = [header or SlabHeader(slab=slab) for slab, header in enumerate(found)]
        epoch = _begin_epoch(file, superblock)
    except BaseException:
        file.close()
        raise
    damaged = sum(header is None for header in found)
    return Volume(file=file, geometry=geometry, epoch=epoch, namespaces=namespaces, headers=headers, headers_damaged=damaged)


def _begin_epoch(file: VolumeFile, superblock: Superblock) -> int:
    record = superblock.record
    row = record[0]
    epoch = int(row["epoch"]) + 1
    row["epoch"] = epoch
    row["owner_host"] = np.void(_host_id())
    row["owner_boot"] = np.void(_boot_id())
    write_superblocks(file.synced_fd, record, counting_copy=superblock.copy, name=file.path)
    return epoch


def _host_id() -> bytes:
    """A hash, since the machine id itself is not for publishing (machine-id(5))."""
    try:
        name = Path("/etc/machine-id").read_bytes().strip()
    except OSError:
        name = b""
    return hashlib.sha256(name or socket.gethostname().encode()).digest()[:16]


def _boot_id() -> bytes:
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)

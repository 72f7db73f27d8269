"""Spill and prefetch between arena and volume without a staging slot: the kernel takes header pages and arena slots as one vector."""

import numpy as np

from offloadd.clock import wall_ns
from offloadd.memory.mapping import Bytes
from offloadd.model.enums import Reason
from offloadd.mover import headers as slot_headers
from offloadd.mover.arena import Arena
from offloadd.mover.slices import Slice
from offloadd.mover.tools import Tools
from offloadd.transfer.checksum import crc32c
from offloadd.units import SECTOR_BYTES


def _slot(arena: Arena, piece: Slice, index: int) -> tuple[Bytes, int]:
    """A block's arena slot, padding included, and its payload's length."""
    record = piece.records[index]
    payload_bytes = int(record["payload_bytes"])
    return arena.slot(int(record["arena_offset"]), payload_bytes), payload_bytes


def _vector(pages: Bytes, arena: Arena, piece: Slice, begin: int, end: int) -> list[Bytes]:
    buffers: list[Bytes] = []
    for index in range(begin, end):
        buffers += pages[index * SECTOR_BYTES : (index + 1) * SECTOR_BYTES], _slot(arena, piece, index)[0]
    return buffers


def spill(tools: Tools, piece: Slice) -> None:
    """Arena → volume. A block whose bytes no longer have the checksum of its record is not written."""
    volume, arena, job, records = tools.the_volume(), tools.the_arena(), piece.job, piece.records
    count = len(records)
    arena.check(records)
    offset = volume.slot_offset(records, job.slot_bytes)
    for index in range(count):
        slot, payload_bytes = _slot(arena, piece, index)
        piece.checksums[index] = crc32c(slot[:payload_bytes])
        slot[payload_bytes:] = 0
    piece.reasons[piece.checksums != records["checksum"]] = Reason.CHECKSUM_MISMATCH
    slot_headers.blank(tools.staging, count, SECTOR_BYTES)
    heads = slot_headers.headers_in(tools.staging, count, SECTOR_BYTES)
    slot_headers.fill(heads, records, volume_uuid=volume.volume_uuid, written_ns=wall_ns(), checksums=piece.checksums)
    piece.spent_on_checksum()
    good = piece.good()
    # One write unless a bad block lies in between.
    for run in np.split(good, np.flatnonzero(np.diff(good) != 1) + 1):
        if run.size:
            begin, end = int(run[0]), int(run[-1]) + 1
            tools.write(piece, _vector(tools.staging, arena, piece, begin, end), offset + begin * job.slot_bytes)


def prefetch(tools: Tools, piece: Slice) -> None:
    """Volume → arena, verified in place. The checksum of each result is the one that later restores from the arena check."""
    volume, arena, job, records = tools.the_volume(), tools.the_arena(), piece.job, piece.records
    count = len(records)
    arena.check(records)
    offset = volume.slot_offset(records, job.slot_bytes)
    tools.read(piece, _vector(tools.staging, arena, piece, 0, count), offset)
    heads = slot_headers.headers_in(tools.staging, count, SECTOR_BYTES)
    if job.verify:
        piece.reasons[~slot_headers.judge(heads, records, volume_uuid=volume.volume_uuid)] = Reason.HEADER_MISMATCH
    for index in piece.good().tolist():
        slot, payload_bytes = _slot(arena, piece, index)
        piece.checksums[index] = crc32c(slot[:payload_bytes])
        if job.verify and piece.checksums[index] != heads["checksum"][index]:
            piece.reasons[index] = Reason.CHECKSUM_MISMATCH
    piece.spent_on_checksum()

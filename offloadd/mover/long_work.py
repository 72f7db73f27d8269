"""Moves of long slots: one block a slice, chunk by chunk, each chunk with a CRC of its own in the header.

Writes put chunk 0 together with the header last: until then the slot has no header of this block. Reads begin with them, and hand no chunk over unverified.
The payload's own checksum is combined from those of the chunks, so no byte is read twice for it.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from offloadd.clock import wall_ns
from offloadd.memory.mapping import Bytes
from offloadd.model.enums import Reason
from offloadd.mover import headers as slot_headers
from offloadd.mover.messages import Copied
from offloadd.mover.slices import Slice
from offloadd.mover.tools import Tools, differs_in_engine, gather_blocks, scatter_blocks
from offloadd.tiers.format import CHUNK_BYTES
from offloadd.transfer.checksum import crc32c
from offloadd.transfer.combine import combine
from offloadd.transfer.gather import Payloads
from offloadd.units import SECTOR_BYTES, align_up

ChunkCrcs = npt.NDArray[np.uint32]
#: Number of a chunk, the first payload byte in it, and the one behind its last.
Chunk = tuple[int, int, int]


def _chunks(piece: Slice) -> list[Chunk]:
    payload_bytes = int(piece.records["payload_bytes"][0])
    return [(first // CHUNK_BYTES, first, min(first + CHUNK_BYTES, payload_bytes)) for first in range(0, payload_bytes, CHUNK_BYTES)]


def _whole_crc(crcs: ChunkCrcs, chunks: Sequence[Chunk]) -> int:
    value = 0
    for number, first, last in chunks:
        value = combine(value, int(crcs[number]), last - first)
    return value


def _place(staging: Bytes) -> Payloads:
    """Where a chunk lies in the staging slot: behind the header."""
    return Payloads(staging, np.array([SECTOR_BYTES]), staging.size)


def _padded(size_bytes: int) -> int:
    return align_up(size_bytes, SECTOR_BYTES)


def _seal_header(page: Bytes, piece: Slice, volume_uuid: bytes, crcs: ChunkCrcs) -> None:
    slot_headers.blank(page, 1, SECTOR_BYTES)
    head = slot_headers.headers_in(page, 1, SECTOR_BYTES)
    slot_headers.fill_chunked(head, piece.records, volume_uuid=volume_uuid, written_ns=wall_ns(), chunk_crcs=crcs)


def evict(tools: Tools, piece: Slice) -> None:
    """Region → volume. COPIED is sent after the last chunk has been gathered."""
    volume, job, staging = tools.the_volume(), piece.job, tools.staging
    offset = volume.slot_offset(piece.records, job.slot_bytes)
    chunks = _chunks(piece)
    crcs = np.zeros(len(chunks), dtype=np.uint32)
    for number, first, last in [*chunks[1:], chunks[0]]:
        ours = staging[SECTOR_BYTES : SECTOR_BYTES + last - first]
        with tools.memories.engine.borrow(job.move, piece.regions) as regions:
            if regions is None:
                piece.fail(Reason.CANCELLED)
                return
            gather_blocks(piece, regions, _place(staging), first, last)
            if piece.sampled(0) and differs_in_engine(piece, regions, 0, ours, first, last):
                piece.fail(Reason.TARGET_MISMATCH)
                return
        piece.spent_on_copy()
        if number == 0:
            tools.send(Copied(job=job.job, count=1))
        crcs[number] = crc32c(ours)
        staging[SECTOR_BYTES + last - first : SECTOR_BYTES + _padded(last - first)] = 0
        piece.spent_on_checksum()
        if number:
            tools.write(piece, [staging[SECTOR_BYTES : SECTOR_BYTES + _padded(last - first)]], offset + SECTOR_BYTES + first)
    piece.checksums[0] = _whole_crc(crcs, chunks)
    _seal_header(staging[:SECTOR_BYTES], piece, volume.volume_uuid, crcs)
    piece.spent_on_checksum()
    tools.write(piece, [staging[: SECTOR_BYTES + _padded(chunks[0][2])]], offset)


def restore(tools: Tools, piece: Slice) -> None:
    """Volume → region. A bad chunk stops the block; chunks before it have been handed over, which the outcome tells."""
    staging, job = tools.staging, piece.job
    for _, first, last, ours in _verified(tools, piece, lambda _first, size: staging[SECTOR_BYTES : SECTOR_BYTES + size]):
        with tools.memories.engine.borrow(job.move, piece.regions) as regions:
            if regions is None:
                piece.fail(Reason.CANCELLED)
                return
            if piece.expired():
                piece.fail(Reason.DEADLINE)
                return
            scatter_blocks(piece, regions, _place(staging), np.zeros(1, dtype=np.intp), first, last)
            piece.spent_on_copy()
            if piece.sampled(0):
                if differs_in_engine(piece, regions, 0, ours, first, last):
                    piece.fail(Reason.TARGET_MISMATCH)
                    return
                piece.spent_on_checksum()


def prefetch(tools: Tools, piece: Slice) -> None:
    """Volume → arena, each chunk straight to its place and verified there."""
    arena = tools.the_arena()
    arena.check(piece.records)
    slot = arena.slot(int(piece.records["arena_offset"][0]), int(piece.records["payload_bytes"][0]))
    for _ in _verified(tools, piece, lambda first, size: slot[first : first + size]):
        pass


def _verified(tools: Tools, piece: Slice, target: Callable[[int, int], Bytes]) -> Iterator[tuple[int, int, int, Bytes]]:
    """Read chunk by chunk into `target(first, padded size)` and yield (number, first, last, bytes) of each good one; a bad one fails the block and ends it.

    The block's checksum is set after the last chunk.
    """
    volume, job = tools.the_volume(), piece.job
    offset = volume.slot_offset(piece.records, job.slot_bytes)
    chunks = _chunks(piece)
    crcs = np.zeros(len(chunks), dtype=np.uint32)
    page = tools.staging[:SECTOR_BYTES]
    head = slot_headers.headers_in(page, 1, SECTOR_BYTES)
    for number, first, last in chunks:
        buffer = target(first, _padded(last - first))
        if number == 0:
            tools.read(piece, [page, buffer], offset)
            if job.verify and not slot_headers.judge_chunked(head, piece.records, volume_uuid=volume.volume_uuid, chunk_count=len(chunks)):
                piece.fail(Reason.HEADER_MISMATCH)
                return
        else:
            tools.read(piece, [buffer], offset + SECTOR_BYTES + first)
        crcs[number] = crc32c(buffer[: last - first])
        piece.spent_on_checksum()
        if job.verify and crcs[number] != head["chunk_crcs"][0, number]:
            piece.fail(Reason.CHECKSUM_MISMATCH)
            return
        yield number, first, last, buffer[: last - first]
    piece.checksums[0] = _whole_crc(crcs, chunks)


def spill(tools: Tools, piece: Slice) -> None:
    """Arena → volume, straight from the arena's pages, unless the bytes no longer have the checksum of their record."""
    volume, arena, job = tools.the_volume(), tools.the_arena(), piece.job
    arena.check(piece.records)
    offset = volume.slot_offset(piece.records, job.slot_bytes)
    payload_bytes = int(piece.records["payload_bytes"][0])
    slot = arena.slot(int(piece.records["arena_offset"][0]), payload_bytes)
    chunks = _chunks(piece)
    crcs = np.array([crc32c(slot[first:last]) for _, first, last in chunks], dtype=np.uint32)
    piece.checksums[0] = _whole_crc(crcs, chunks)
    if piece.checksums[0] != piece.records["checksum"][0]:
        piece.fail(Reason.CHECKSUM_MISMATCH)
        return
    slot[payload_bytes:] = 0
    page = tools.staging[:SECTOR_BYTES]
    _seal_header(page, piece, volume.volume_uuid, crcs)
    piece.spent_on_checksum()
    for _, first, last in chunks[1:]:
        tools.write(piece, [slot[first : first + _padded(last - first)]], offset + SECTOR_BYTES + first)
    tools.write(piece, [page, slot[: _padded(chunks[0][2])]], offset)


def read_only(tools: Tools, piece: Slice) -> None:
    """Volume → staging slot and no further, in the steps of a restore."""
    volume, staging = tools.the_volume(), tools.staging
    offset = volume.slot_offset(piece.records, piece.job.slot_bytes)
    for number, first, last in _chunks(piece):
        begin = 0 if number == 0 else SECTOR_BYTES
        tools.read(piece, [staging[begin : SECTOR_BYTES + _padded(last - first)]], offset + begin + first)

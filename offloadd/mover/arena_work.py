"""Evict to and restore from the arena: one copy, and a checksum that travels in the front's index."""

import numpy as np

from offloadd.memory.mapping import Bytes
from offloadd.model.enums import Reason
from offloadd.mover.arena import Arena
from offloadd.mover.messages import Copied
from offloadd.mover.slices import Slice
from offloadd.mover.tools import Tools, differs_in_engine, gather_blocks
from offloadd.mover.volume_work import hand_over
from offloadd.transfer.checksum import crc32c
from offloadd.transfer.gather import Payloads
from offloadd.units import SECTOR_BYTES, align_up


def _payloads(arena: Arena, piece: Slice) -> Payloads:
    arena.check(piece.records)
    return Payloads(arena.bytes, piece.records["arena_offset"].astype(np.int64), align_up(int(piece.records["payload_bytes"][0]), SECTOR_BYTES))


def _payload(arena: Arena, piece: Slice, index: int) -> Bytes:
    record = piece.records[index]
    return arena.bytes[int(record["arena_offset"]) : int(record["arena_offset"]) + int(record["payload_bytes"])]


def evict(tools: Tools, piece: Slice) -> None:
    """Region → arena slot."""
    arena = tools.the_arena()
    target = _payloads(arena, piece)
    with tools.memories.engine.borrow(piece.job.move, piece.regions) as regions:
        if regions is None:
            piece.fail(Reason.CANCELLED)
            return
        gather_blocks(piece, regions, target)
        for index in range(len(piece.records)):
            if piece.sampled(index) and differs_in_engine(piece, regions, index, _payload(arena, piece, index)):
                piece.reasons[index] = Reason.TARGET_MISMATCH
    piece.spent_on_copy()
    if piece.good().size:
        tools.send(Copied(job=piece.job.job, count=int(piece.good().size)))
    for index in range(len(piece.records)):
        piece.checksums[index] = crc32c(_payload(arena, piece, index))
    piece.spent_on_checksum()


def restore(tools: Tools, piece: Slice) -> None:
    """Arena slot → region, each payload checked against the checksum in its record."""
    arena = tools.the_arena()
    hand_over(tools, piece, _payloads(arena, piece), lambda index: _payload(arena, piece, index), piece.records["checksum"])

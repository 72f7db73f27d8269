"""Evict to and restore from the arena: one copy, and a checksum that travels in the front's index."""

import numpy as np

from offloadd.mover.handover import hand_over, take_over
from offloadd.mover.slices import Slice
from offloadd.mover.tools import Tools
from offloadd.transfer.gather import Payloads
from offloadd.units import SECTOR_BYTES, align_up


def _payloads(tools: Tools, piece: Slice) -> Payloads:
    arena = tools.the_arena()
    arena.check(piece.records)
    offsets, stride_bytes = piece.records["arena_offset"].astype(np.int64), align_up(int(piece.records["payload_bytes"][0]), SECTOR_BYTES)
    # On 2 cores 17.6 GB/s instead of 12.7. On a volume's lane the same stores cost 0.01 to 0.05 of the reads in six of eight A/B series: they share memory,
    # and an evict's write finds what was just gathered in the last-level cache.
    return Payloads(arena.bytes, offsets, stride_bytes, past_caches=True)


def evict(tools: Tools, piece: Slice) -> None:
    """Region → arena slot."""
    if take_over(tools, piece, _payloads(tools, piece), is_last=True):
        piece.spent_on_checksum()


def restore(tools: Tools, piece: Slice) -> None:
    """Arena slot → region, each payload checked against the checksum in its record."""
    hand_over(tools, piece, _payloads(tools, piece), piece.records["checksum"])

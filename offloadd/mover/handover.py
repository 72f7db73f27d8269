"""Payloads out of engine memory and back into it, each with its checksum.

    take_over  gather, COPIED, checksums
    hand_over  checksums, scatter of what is right

A region that can takes checksums while it copies (`MappedRegion.checks`): the bytes are read once, and the whole slice is one call. Otherwise they are
taken in steps of their own.
"""

from collections.abc import Iterator

import numpy as np

from offloadd.model.enums import Reason
from offloadd.mover.messages import Copied
from offloadd.mover.slices import Slice
from offloadd.mover.tools import Indices, Regions, Tools, differs_in_engine, gather_blocks, scatter_blocks
from offloadd.transfer.checksum import crc32c
from offloadd.transfer.combine import combine
from offloadd.transfer.gather import Bytes, Checks, Checksums, Payloads
from offloadd.units import MIB

#: Payloads are checked and then scattered in steps that stay in the last-level cache in between. Steps of one block (17 µs of Python each, with the GIL held)
#: cost a fifth of the throughput of 640 KiB blocks.
IN_CACHE_BYTES = 4 * MIB


def _payload(piece: Slice, places: Payloads, index: int) -> Bytes:
    begin = int(places.offsets[index])
    return places.buffer[begin : begin + int(piece.records["payload_bytes"][index])]


def _can_check(regions: Regions) -> bool:
    return all(region.checks for region in regions.values())


def take_over(tools: Tools, piece: Slice, target: Payloads, *, is_last: bool = False) -> bool:
    """Copy every block to its place, tell the front, and set the slice's checksums. False: fenced, and no byte was copied.

    `is_last`: nothing comes after it, so that the slice's end tells of the copies, too, if no time passes between them.
    """
    count = len(piece.records)
    checks = None
    with tools.memories.engine.borrow(piece.job.move, piece.regions) as regions:
        if regions is None:
            piece.fail(Reason.CANCELLED)
            return False
        checks = Checks(piece.checksums) if _can_check(regions) else None
        gather_blocks(piece, regions, target, checks=checks)
        for index in range(count if piece.job.verify_target else 0):
            if piece.sampled(index) and differs_in_engine(piece, regions, index, _payload(piece, target, index)):
                piece.reasons[index] = Reason.TARGET_MISMATCH
    piece.spent_on_copy(checksum_ns=checks.spent_ns if checks else 0)
    if piece.good().size and not (is_last and checks):
        tools.send(Copied(job=piece.job.job, count=int(piece.good().size)))
    if checks is None:
        for index in range(count):
            piece.checksums[index] = crc32c(_payload(piece, target, index))
    return True


def hand_over(tools: Tools, piece: Slice, source: Payloads, stored: Checksums) -> None:
    """Check the payload of every good block against `stored` (unless the job says not to) and scatter it, unless fence or deadline came first."""
    with tools.memories.engine.borrow(piece.job.move, piece.regions) as regions:
        if regions is None:
            piece.fail(Reason.CANCELLED)
            return
        if piece.expired():
            piece.fail(Reason.DEADLINE)
            return
        good = piece.good()
        if not piece.job.verify:
            scatter_blocks(piece, regions, source, good)
            piece.spent_on_copy()
        elif _can_check(regions):
            good = _scatter_checked(piece, regions, source, good, stored)
        else:
            for chosen in _steps(piece, good):
                right = _right(piece, chosen, source, stored)
                piece.spent_on_checksum()
                scatter_blocks(piece, regions, source, right)
                piece.spent_on_copy()
            good = piece.good()
        if piece.job.verify_target:
            _compare_targets(piece, regions, source, good)


def _scatter_checked(piece: Slice, regions: Regions, source: Payloads, chosen: Indices, stored: Checksums) -> Indices:
    """Scatter those of the chosen blocks whose payload has the stored checksum, and return them; the others get their reason."""
    checks = Checks(np.zeros(chosen.size, dtype=np.uint32), np.ascontiguousarray(stored[chosen], dtype=np.uint32))
    scatter_blocks(piece, regions, source, chosen, checks=checks)
    piece.checksums[chosen] = checks.checksums
    piece.reasons[chosen[checks.checksums != checks.expected]] = Reason.CHECKSUM_MISMATCH
    piece.spent_on_copy(checksum_ns=checks.spent_ns)
    return piece.good()


def _right(piece: Slice, chosen: Indices, source: Payloads, stored: Checksums) -> Indices:
    """Those of the chosen blocks whose payload has the stored checksum; the others get their reason."""
    if _all_right(piece, chosen, source, stored):
        piece.checksums[chosen] = stored[chosen]
        return chosen
    for index in chosen.tolist():
        piece.checksums[index] = crc32c(_payload(piece, source, index))
    right = piece.checksums[chosen] == stored[chosen]
    piece.reasons[chosen[~right]] = Reason.CHECKSUM_MISMATCH
    good: Indices = chosen[right]
    return good


def _all_right(piece: Slice, chosen: Indices, source: Payloads, stored: Checksums) -> bool:
    """Whether payloads that are neighbours have, with what lies between them, as one run of bytes the checksum that follows from the stored ones.

    One call instead of one a block: threads that leave and enter the interpreter every 30 µs spend more time at its door than on the bytes. A block that
    changed changes the checksum of the run as surely as its own. What lies between (the next header and padding, 4 to 8 KiB) is read for its own checksum.
    False says nothing of any one block: then each is checked by itself.
    """
    size_bytes, stride_bytes = int(piece.records["payload_bytes"][0]), source.stride_bytes
    offsets = source.offsets[chosen]
    if len(chosen) < 2 or (np.diff(offsets) != stride_bytes).any() or (piece.records["payload_bytes"] != size_bytes).any():
        return False
    first, *others = stored[chosen].tolist()
    expected: int = first
    end = int(offsets[0]) + size_bytes
    for checksum in others:
        between = source.buffer[end : end + stride_bytes - size_bytes]
        if between.size:
            expected = combine(expected, crc32c(between), between.size)
        expected = combine(expected, checksum, size_bytes)
        end += stride_bytes
    return crc32c(source.buffer[int(offsets[0]) : end]) == expected


def _steps(piece: Slice, good: Indices) -> Iterator[Indices]:
    """The good blocks, in steps that stay in the cache between check and scatter."""
    if not good.size:
        return
    length = max(1, IN_CACHE_BYTES // int(piece.records["payload_bytes"].max()))
    for begin in range(0, good.size, length):
        yield good[begin : begin + length]


def _compare_targets(piece: Slice, regions: Regions, source: Payloads, scattered: Indices) -> None:
    for index in scattered.tolist():
        if piece.sampled(index) and differs_in_engine(piece, regions, index, _payload(piece, source, index)):
            piece.reasons[index] = Reason.TARGET_MISMATCH
    piece.spent_on_checksum()

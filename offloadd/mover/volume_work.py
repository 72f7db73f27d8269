"""Evict to and restore from a volume through a staging slot, for slots that are verified as a whole.

    evict    gather → COPIED → checksums, headers, zeroed padding → one write
    restore  one read → headers → checksum, scatter, checksum, scatter, …

A slice lies in the staging slot as it does on the volume: [header | payload | padding] * m.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from offloadd.clock import wall_ns
from offloadd.memory.mapping import Bytes
from offloadd.model.enums import Reason
from offloadd.mover import headers as slot_headers
from offloadd.mover.messages import Copied
from offloadd.mover.slices import Slice
from offloadd.mover.tools import Indices, Regions, Tools, differs_in_engine, gather_blocks, scatter_blocks
from offloadd.transfer.checksum import crc32c
from offloadd.transfer.combine import combine
from offloadd.transfer.gather import Payloads
from offloadd.units import MIB, SECTOR_BYTES

#: Payloads are checked and then scattered in steps that stay in the last-level cache in between. Steps of one block (17 µs of Python each, with the GIL held)
#: cost a fifth of the throughput of 640 KiB blocks.
IN_CACHE_BYTES = 4 * MIB

PayloadOf = Callable[[int], Bytes]
Checksums = npt.NDArray[np.uint32]


def _staged(tools: Tools, piece: Slice) -> Bytes:
    """The part of the staging slot that the slice fills. Raises ValueError when it is longer than that."""
    size_bytes = len(piece.records) * piece.job.slot_bytes
    if size_bytes > tools.staging.size:
        raise ValueError(f"a slice of {size_bytes} bytes does not fit into a staging slot of {tools.staging.size}")
    return tools.staging[:size_bytes]


def _payloads(staged: Bytes, piece: Slice) -> Payloads:
    slot_bytes = piece.job.slot_bytes
    return Payloads(staged, np.arange(len(piece.records)) * slot_bytes + SECTOR_BYTES, slot_bytes)


def _payload(staged: Bytes, piece: Slice, index: int) -> Bytes:
    begin = index * piece.job.slot_bytes + SECTOR_BYTES
    return staged[begin : begin + int(piece.records["payload_bytes"][index])]


def evict(tools: Tools, piece: Slice) -> None:
    """Region → staging slot → volume."""
    volume, job, records = tools.the_volume(), piece.job, piece.records
    staged = _staged(tools, piece)
    offset = volume.slot_offset(records, job.slot_bytes)
    with tools.memories.engine.borrow(job.move, piece.regions) as regions:
        if regions is None:
            piece.fail(Reason.CANCELLED)
            return
        gather_blocks(piece, regions, _payloads(staged, piece))
        _compare_sources(piece, regions, staged)
    piece.spent_on_copy()
    if piece.good().size:
        tools.send(Copied(job=job.job, count=int(piece.good().size)))
    for index in range(len(records)):
        piece.checksums[index] = crc32c(_payload(staged, piece, index))
    _zero_padding(staged, piece)
    slot_headers.blank(staged, len(records), job.slot_bytes)
    heads = slot_headers.headers_in(staged, len(records), job.slot_bytes)
    slot_headers.fill(heads, records, volume_uuid=volume.volume_uuid, written_ns=wall_ns(), checksums=piece.checksums)
    for index in np.flatnonzero(piece.reasons).tolist():
        # A block that was not copied faithfully must not come back under its key after a restart: no header, no block.
        staged[index * job.slot_bytes : index * job.slot_bytes + SECTOR_BYTES] = 0
    piece.spent_on_checksum()
    piece.spent_on_io(volume.write([staged], offset, durable=job.durable))


def _compare_sources(piece: Slice, regions: Regions, staged: Bytes) -> None:
    if not piece.job.verify_target:
        return
    for index in range(len(piece.records)):
        if piece.sampled(index) and differs_in_engine(piece, regions, index, _payload(staged, piece, index)):
            piece.reasons[index] = Reason.TARGET_MISMATCH


def _zero_padding(staged: Bytes, piece: Slice) -> None:
    """What lies behind a payload in the staging slot is some other block's: it must not reach the volume."""
    slot_bytes = piece.job.slot_bytes
    by_slot = staged.reshape(len(piece.records), slot_bytes)
    sizes = piece.records["payload_bytes"]
    if (sizes == sizes[0]).all():
        by_slot[:, SECTOR_BYTES + int(sizes[0]) :] = 0
        return
    for index, size_bytes in enumerate(sizes.tolist()):
        by_slot[index, SECTOR_BYTES + size_bytes :] = 0


def restore(tools: Tools, piece: Slice) -> None:
    """Volume → staging slot → region. Only blocks whose header and checksum are right are scattered."""
    volume, job, records = tools.the_volume(), piece.job, piece.records
    staged = _staged(tools, piece)
    offset = volume.slot_offset(records, job.slot_bytes)
    piece.spent_on_io(volume.read([staged], offset))
    heads = slot_headers.headers_in(staged, len(records), job.slot_bytes)
    if job.verify:
        piece.reasons[~slot_headers.judge(heads, records, volume_uuid=volume.volume_uuid)] = Reason.HEADER_MISMATCH
    stored = heads["checksum"].copy()
    piece.spent_on_checksum()
    hand_over(tools, piece, _payloads(staged, piece), lambda index: _payload(staged, piece, index), stored)


def hand_over(tools: Tools, piece: Slice, source: Payloads, payload: PayloadOf, stored: Checksums) -> None:
    """Check the payload of every good block against `stored` (unless the job says not to) and scatter it, unless fence or deadline came first."""
    with tools.memories.engine.borrow(piece.job.move, piece.regions) as regions:
        if regions is None:
            piece.fail(Reason.CANCELLED)
            return
        if piece.expired():
            piece.fail(Reason.DEADLINE)
            return
        for chosen in _steps(piece):
            if piece.job.verify:
                chosen = _right(piece, chosen, source, payload, stored)
                piece.spent_on_checksum()
            scatter_blocks(piece, regions, source, chosen)
            piece.spent_on_copy()
            if piece.job.verify_target:
                _compare_targets(piece, regions, chosen, payload)


def _right(piece: Slice, chosen: Indices, source: Payloads, payload: PayloadOf, stored: Checksums) -> Indices:
    """Those of the chosen blocks whose payload has the stored checksum; the others get their reason."""
    if _all_right(piece, chosen, source, stored):
        piece.checksums[chosen] = stored[chosen]
        return chosen
    for index in chosen.tolist():
        piece.checksums[index] = crc32c(payload(index))
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


def _steps(piece: Slice) -> Iterator[Indices]:
    """The good blocks, in steps that stay in the cache between check and scatter; all at once when nothing is checked."""
    good = piece.good()
    if not good.size:
        return
    length = max(1, IN_CACHE_BYTES // int(piece.records["payload_bytes"].max())) if piece.job.verify else good.size
    for begin in range(0, good.size, length):
        yield good[begin : begin + length]


def _compare_targets(piece: Slice, regions: Regions, chosen: Indices, payload: PayloadOf) -> None:
    for index in chosen.tolist():
        if piece.sampled(index) and differs_in_engine(piece, regions, index, payload(index)):
            piece.reasons[index] = Reason.TARGET_MISMATCH
    piece.spent_on_checksum()


def read_only(tools: Tools, piece: Slice) -> None:
    """Volume → staging slot and no further."""
    volume = tools.the_volume()
    staged = _staged(tools, piece)
    piece.spent_on_io(volume.read([staged], volume.slot_offset(piece.records, piece.job.slot_bytes)))

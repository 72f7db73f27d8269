"""Evict to and restore from a volume through a staging slot, for slots that are verified as a whole.

    evict    take over (gather, COPIED, checksums) → headers, zeroed padding → one write
    restore  one read → headers → hand over (checksums, scatter)

A slice lies in the staging slot as it does on the volume: [header | payload | padding] * m.
"""

import numpy as np

from offloadd.clock import wall_ns
from offloadd.memory.mapping import Bytes
from offloadd.model.enums import Reason
from offloadd.mover import headers as slot_headers
from offloadd.mover.handover import hand_over, take_over
from offloadd.mover.slices import Slice
from offloadd.mover.tools import Tools
from offloadd.transfer.gather import Payloads
from offloadd.units import SECTOR_BYTES


def _staged(tools: Tools, piece: Slice) -> Bytes:
    """The part of the staging slot that the slice fills. Raises ValueError when it is longer than that."""
    size_bytes = len(piece.records) * piece.job.slot_bytes
    if size_bytes > tools.staging.size:
        raise ValueError(f"a slice of {size_bytes} bytes does not fit into a staging slot of {tools.staging.size}")
    return tools.staging[:size_bytes]


def _payloads(staged: Bytes, piece: Slice) -> Payloads:
    slot_bytes = piece.job.slot_bytes
    return Payloads(staged, np.arange(len(piece.records)) * slot_bytes + SECTOR_BYTES, slot_bytes)


def evict(tools: Tools, piece: Slice) -> None:
    """Region → staging slot → volume."""
    volume, job, records = tools.the_volume(), piece.job, piece.records
    staged = _staged(tools, piece)
    offset = volume.slot_offset(records, job.slot_bytes)
    if not take_over(tools, piece, _payloads(staged, piece)):
        return
    _zero_padding(staged, piece)
    slot_headers.blank(staged, len(records), job.slot_bytes)
    heads = slot_headers.headers_in(staged, len(records), job.slot_bytes)
    slot_headers.fill(heads, records, volume_uuid=volume.volume_uuid, written_ns=wall_ns(), checksums=piece.checksums)
    for index in np.flatnonzero(piece.reasons).tolist():
        # A block that was not copied faithfully must not come back under its key after a restart: no header, no block.
        staged[index * job.slot_bytes : index * job.slot_bytes + SECTOR_BYTES] = 0
    piece.spent_on_checksum()
    tools.write(piece, [staged], offset)


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
    tools.read(piece, [staged], offset)
    heads = slot_headers.headers_in(staged, len(records), job.slot_bytes)
    if job.verify:
        piece.reasons[~slot_headers.judge(heads, records, volume_uuid=volume.volume_uuid)] = Reason.HEADER_MISMATCH
    stored = heads["checksum"].copy()
    piece.spent_on_checksum()
    hand_over(tools, piece, _payloads(staged, piece), stored)


def read_only(tools: Tools, piece: Slice) -> None:
    """Volume → staging slot and no further."""
    volume = tools.the_volume()
    staged = _staged(tools, piece)
    tools.read(piece, [staged], volume.slot_offset(piece.records, piece.job.slot_bytes))

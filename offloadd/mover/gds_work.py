"""Moves between GPU memory and a volume with no copy through the host: the payload is staged, checked and scattered on the GPU.

Only the header sectors pass the host, which makes and judges them as on every other path. Slots that are longer than a staging slot do not come here.
"""

import numpy as np
import numpy.typing as npt

from offloadd.clock import wall_ns
from offloadd.model.enums import Reason
from offloadd.mover import headers as slot_headers
from offloadd.mover.cuda_device import CudaMappedRegion
from offloadd.mover.gds_bench import GdsBench
from offloadd.mover.messages import Copied
from offloadd.mover.slices import Slice
from offloadd.mover.tools import Indices, Regions, Tools, by_region
from offloadd.units import SECTOR_BYTES

Checksums = npt.NDArray[np.uint32]


def _bench(tools: Tools) -> GdsBench:
    assert isinstance(tools.bench, GdsBench)
    return tools.bench


def _regions(piece: Slice, regions: Regions, chosen: Indices) -> list[tuple[CudaMappedRegion, Indices]]:
    pairs = []
    for region, mine in by_region(piece, regions, chosen):
        assert isinstance(region, CudaMappedRegion)
        pairs.append((region, mine))
    return pairs


def evict(tools: Tools, piece: Slice) -> None:
    """Region → GPU staging slot → volume."""
    volume, job, records, bench = tools.the_volume(), piece.job, piece.records, _bench(tools)
    count, slot_bytes = len(records), job.slot_bytes
    offset = volume.slot_offset(records, slot_bytes)
    with tools.memories.engine.borrow(job.move, piece.regions) as regions:
        if regions is None:
            piece.fail(Reason.CANCELLED)
            return
        # What lies behind a payload in the slot is some other block's: it must not reach the volume.
        bench.clear(count * slot_bytes)
        for region, mine in _regions(piece, regions, np.arange(count)):
            region.gather_to(records["block_index"][mine], bench.payloads(mine, slot_bytes))
        piece.spent_on_copy()
        if job.verify_target:
            _compare(piece, regions, np.arange(count), bench.checksums(records["payload_bytes"], slot_bytes))
    if piece.good().size:
        tools.send(Copied(job=job.job, count=int(piece.good().size)))
    piece.checksums[:] = bench.checksums(records["payload_bytes"], slot_bytes)
    pages = bench.pages(count)
    slot_headers.blank(pages, count, SECTOR_BYTES)
    heads = slot_headers.headers_in(pages, count, SECTOR_BYTES)
    slot_headers.fill(heads, records, volume_uuid=volume.volume_uuid, written_ns=wall_ns(), checksums=piece.checksums)
    for index in np.flatnonzero(piece.reasons).tolist():
        # A block that was not copied faithfully must not come back under its key after a restart: no header, no block.
        pages[index * SECTOR_BYTES : (index + 1) * SECTOR_BYTES] = 0
    bench.put_pages(count, slot_bytes)
    piece.spent_on_checksum()
    with volume.gate.passing(count * slot_bytes, lambda: tools.called_off(piece)):
        piece.spent_on_io(bench.write(count * slot_bytes, offset, durable=job.durable))
    _tell_the_way(piece, bench)


def restore(tools: Tools, piece: Slice) -> None:
    """Volume → GPU staging slot → region. Only blocks whose header and checksum are right are scattered."""
    volume, job, records, bench = tools.the_volume(), piece.job, piece.records, _bench(tools)
    count, slot_bytes = len(records), job.slot_bytes
    with volume.gate.passing(count * slot_bytes, lambda: tools.called_off(piece)):
        piece.spent_on_io(bench.read(count * slot_bytes, volume.slot_offset(records, slot_bytes)))
    _tell_the_way(piece, bench)
    if job.verify:
        heads = slot_headers.headers_in(bench.fetch_pages(count, slot_bytes), count, SECTOR_BYTES)
        piece.reasons[~slot_headers.judge(heads, records, volume_uuid=volume.volume_uuid)] = Reason.HEADER_MISMATCH
        piece.checksums[:] = bench.checksums(records["payload_bytes"], slot_bytes)
        piece.reasons[(piece.reasons == 0) & (piece.checksums != heads["checksum"])] = Reason.CHECKSUM_MISMATCH
    piece.spent_on_checksum()
    with tools.memories.engine.borrow(job.move, piece.regions) as regions:
        if regions is None:
            piece.fail(Reason.CANCELLED)
            return
        if piece.expired():
            piece.fail(Reason.DEADLINE)
            return
        good = piece.good()
        for region, mine in _regions(piece, regions, good):
            if mine.size:
                region.scatter_from(records["block_index"][mine], bench.payloads(mine, slot_bytes))
        piece.spent_on_copy()
        if job.verify and job.verify_target:
            _compare(piece, regions, good, piece.checksums)
            piece.spent_on_checksum()


def read_only(tools: Tools, piece: Slice) -> None:
    """Volume → GPU staging slot and no further."""
    volume, bench, size_bytes = tools.the_volume(), _bench(tools), len(piece.records) * piece.job.slot_bytes
    with volume.gate.passing(size_bytes, lambda: tools.called_off(piece)):
        piece.spent_on_io(bench.read(size_bytes, volume.slot_offset(piece.records, piece.job.slot_bytes)))
    # The ceiling of `gds` is one only if it went that way itself.
    _tell_the_way(piece, bench)


def _tell_the_way(piece: Slice, bench: GdsBench) -> None:
    piece.way = bench.way
    if not piece.way.is_gds and piece.job.require_path:
        piece.fail(Reason.WRONG_PATH)


def _compare(piece: Slice, regions: Regions, chosen: Indices, checksums: Checksums) -> None:
    """The sampled blocks, where they lie in engine memory, against the checksums of their staged bytes."""
    for index in chosen.tolist():
        record = piece.records[index]
        if piece.sampled(index) and regions[int(record["region"])].block_crc(int(record["block_index"]), 0, None) != checksums[index]:
            piece.reasons[index] = Reason.TARGET_MISMATCH

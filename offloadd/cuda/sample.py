"""A small region with the geometry of an engine's: what copies are measured over, so that no byte of the engine's is touched."""

from collections.abc import Sequence

from offloadd.cuda.region import CudaRegion
from offloadd.memory.planes import PlaneGroup
from offloadd.units import MIB, align_up

#: Payload of a sample: the shortest slice of a large move. Less would measure the call and not the copy.
SAMPLE_BYTES = 4 * MIB
#: Blocks of a sample; a job has at most some 700.
SAMPLE_BLOCKS_MAX = 256
#: Memory that a sample may lie in, gaps between its pieces included.
SAMPLE_EXTENT_BYTES = 16 * MIB
#: Planes of a region that is sampled: engines have some 200. Bounds what is kept of a shape, and the table that kernels are told.
PLANES_MAX = 1024
#: Addresses and distances keep their rest by it: more than any access of a copy engine or of a warp (16 bytes a lane in copy.cu) can tell apart.
_ALIGNMENT_BYTES = 256


def sample_of(region: CudaRegion) -> CudaRegion | None:
    """A region at addresses from 0 to SAMPLE_EXTENT_BYTES; None if the region has more planes than PLANES_MAX.

    It has the region's pieces, or those of the payload's first SAMPLE_BYTES, and as many blocks as make SAMPLE_BYTES. What touches, touches; longer distances
    are shortened to the next equally aligned one. So regions of one shape have equal samples, wherever they lie and however many blocks they have.
    """
    if sum(group.plane_count for group in region.groups) > PLANES_MAX:
        return None
    payload_bytes = min(region.payload_bytes, SAMPLE_BYTES)
    groups = [group for group, _ in region.windows(0, payload_bytes)]
    count = min(region.block_count, SAMPLE_BLOCKS_MAX, SAMPLE_BYTES // payload_bytes)
    placed, extent = _placed(groups, count)
    # One block fits: its pieces are SAMPLE_BYTES, and the gaps of PLANES_MAX less than a MiB.
    while extent > SAMPLE_EXTENT_BYTES:
        count //= 2
        placed, extent = _placed(groups, count)
    return CudaRegion(placed, count, payload_bytes)


def _placed(groups: Sequence[PlaneGroup], block_count: int) -> tuple[tuple[PlaneGroup, ...], int]:
    """The groups one behind the other, and where the last one ends."""
    placed, end = [], 0
    for group in groups:
        others, piece, span = group.plane_count - 1, group.piece_bytes, abs(group.plane_step_bytes)
        if group.plane_count * span <= group.block_stride_bytes:
            step = _distance(span, piece) if others else 0
            stride = _distance(group.block_stride_bytes, others * step + piece)
        else:
            stride = _distance(group.block_stride_bytes, piece)
            step = _distance(span, (block_count - 1) * stride + piece)
        first = align_up(end, _ALIGNMENT_BYTES) + group.offset_bytes % _ALIGNMENT_BYTES
        end = first + others * step + (block_count - 1) * stride + piece
        if group.plane_step_bytes < 0:
            first, step = first + others * step, -step
        placed.append(PlaneGroup(first, group.plane_count, step, stride, piece))
    return tuple(placed), end


def _distance(distance_bytes: int, used_bytes: int) -> int:
    """The shortest distance, not below `used_bytes`, that is aligned as this one is and leaves a gap where this one does."""
    short = used_bytes + (distance_bytes - used_bytes) % _ALIGNMENT_BYTES
    return short + _ALIGNMENT_BYTES if short == used_bytes < distance_bytes else short

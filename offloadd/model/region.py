"""Engine memory registered once: a block count and a list of planes, one affine formula each."""

from dataclasses import dataclass

from offloadd.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Plane:
    """One piece of every block: `address = memory + offset_bytes + block_index * block_stride_bytes`, `block_bytes` long.

    `memory` is the position in the region's list of memories.
    """

    memory: int
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a region. A block's payload is its planes' pieces, one after the other, in the order of `planes`."""

    block_count: int
    planes: tuple[Plane, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return sum(plane.block_bytes for plane in self.planes)


def validate_layout(layout: Layout, memory_bytes: tuple[int, ...], *, planes_max: int) -> None:
    """Raise `InvalidRequest` unless every block of every plane lies inside its memory; afterwards no block index < block_count can address outside.

    `memory_bytes` are the real sizes of the mappings (fstat of the descriptor), not what the client says. Blocks of one plane may not
    overlap each other (stride >= bytes): a scatter into one block would change its neighbour.
    """
    if layout.block_count < 1:
        raise InvalidRequest(f"region has block_count {layout.block_count}; at least 1 is needed")
    if not layout.planes:
        raise InvalidRequest("region has no planes; at least 1 is needed")
    if len(layout.planes) > planes_max:
        raise InvalidRequest(f"region has {len(layout.planes)} planes; planes_per_region_max is {planes_max}")
    for number, plane in enumerate(layout.planes):
        if not 0 <= plane.memory < len(memory_bytes):
            raise InvalidRequest(f"plane {number} names memory {plane.memory}; the region has {len(memory_bytes)}")
        if plane.block_bytes < 1:
            raise InvalidRequest(f"plane {number} has block_bytes {plane.block_bytes}; at least 1 is needed")
        if plane.offset_bytes < 0:
            raise InvalidRequest(f"plane {number} has offset_bytes {plane.offset_bytes}; it may not be negative")
        if layout.block_count > 1 and plane.block_stride_bytes < plane.block_bytes:
            raise InvalidRequest(
                f"plane {number} has block_stride_bytes {plane.block_stride_bytes} below its block_bytes {plane.block_bytes}: blocks would overlap"
            )
        end = plane.offset_bytes + (layout.block_count - 1) * plane.block_stride_bytes + plane.block_bytes
        if end > memory_bytes[plane.memory]:
            raise InvalidRequest(f"plane {number} ends at byte {end}; its memory {plane.memory} has {memory_bytes[plane.memory]} bytes")
    _refuse_overlapping_planes(layout)


def _refuse_overlapping_planes(layout: Layout) -> None:
    """Two planes that touch the same bytes would let one block's scatter change another block.

    Planes of one memory either interleave (same stride, disjoint windows inside it) or lie apart (disjoint extents). Anything else is refused:
    it is no layout of a paged KV cache, and proving it disjoint would need number theory instead of a comparison.
    """
    by_memory: dict[int, list[tuple[int, int, int, int]]] = {}
    for number, plane in enumerate(layout.planes):
        end = plane.offset_bytes + (layout.block_count - 1) * plane.block_stride_bytes + plane.block_bytes
        by_memory.setdefault(plane.memory, []).append((plane.offset_bytes, end, number, plane.block_stride_bytes))
    for extents in by_memory.values():
        extents.sort()
        #: Planes whose extent reaches beyond the current plane's start.
        open_planes: list[tuple[int, int, int, int]] = []
        for extent in extents:
            open_planes = [other for other in open_planes if other[1] > extent[0]]
            for other in open_planes:
                if not _interleave(layout, layout.planes[other[2]], layout.planes[extent[2]]):
                    raise InvalidRequest(f"planes {other[2]} and {extent[2]} overlap in memory {layout.planes[extent[2]].memory}")
            open_planes.append(extent)


def _interleave(layout: Layout, first: Plane, second: Plane) -> bool:
    stride = first.block_stride_bytes
    if layout.block_count == 1 or stride != second.block_stride_bytes:
        return False
    distance = (second.offset_bytes - first.offset_bytes) % stride
    return distance >= first.block_bytes and distance + second.block_bytes <= stride

"""Engine memory for tests: layouts as engines have them, filled with bytes that name their block, and compared byte for byte."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from offloadd.client import AckLevel, Blocks, Client, HostMemory, Namespace, Plane, Region
from offloadd.units import KIB


@dataclass
class Shape:
    """A region's layout: planes over memories of these sizes."""

    block_count: int
    memory_bytes: tuple[int, ...]
    planes: tuple[Plane, ...]


def flat(block_count: int, block_bytes: int) -> Shape:
    """One plane, blocks one after the other."""
    return Shape(block_count, (block_count * block_bytes,), (Plane(0, 0, block_bytes, block_bytes),))


def layered(block_count: int, layers: int, piece_bytes: int, *, split_kv: bool) -> Shape:
    """K and V (and layers) apart: planes one after the other in one memory, or K in one memory and V in another."""
    span = block_count * piece_bytes
    if not split_kv:
        return Shape(block_count, (layers * span,), tuple(Plane(0, layer * span, piece_bytes, piece_bytes) for layer in range(layers)))
    planes = [Plane(which, layer * span, piece_bytes, piece_bytes) for layer in range(layers) for which in (0, 1)]
    return Shape(block_count, (layers * span, layers * span), tuple(planes))


def each_apart(block_count: int, layers: int, piece_bytes: int) -> Shape:
    """K and V of each layer in a memory of their own."""
    count = 2 * layers
    return Shape(block_count, (block_count * piece_bytes,) * count, tuple(Plane(number, 0, piece_bytes, piece_bytes) for number in range(count)))


def padded(block_count: int, block_bytes: int, stride_bytes: int, offset_bytes: int) -> Shape:
    """Blocks with gaps between them: what lies in the gaps may not change."""
    return Shape(block_count, (offset_bytes + block_count * stride_bytes,), (Plane(0, offset_bytes, stride_bytes, block_bytes),))


SHAPES = {
    "cross-layer": flat(24, 96 * KIB),
    "layers apart": layered(24, 6, 16 * KIB, split_kv=False),
    "K and V in two memories": layered(24, 3, 12 * KIB, split_kv=True),
    "K and V of 80 layers, each in its memory": each_apart(6, 80, 4 * KIB),
    "not a multiple of 4 KiB": flat(24, 10_000),
    "odd pieces with gaps": padded(24, 5_001, 6_007, 13),
    "one byte": flat(24, 1),
    "longer than a staging slot": flat(6, (9 << 20) + 4096 + 17),
}


NAMESPACE = Namespace(model="test", weights="commit-1", engine="test")


@dataclass
class Engine:
    """One region of one client, and the bytes that its blocks should have."""

    client: Client
    shape: Shape
    cache_group: int = 0
    namespace: Namespace = NAMESPACE
    region: Region = field(init=False)

    def __post_init__(self) -> None:
        self.memories = [HostMemory.allocate(size) for size in self.shape.memory_bytes]
        self.bytes = [memory.numpy(np.uint8, (memory.memory_bytes,)) for memory in self.memories]
        self.region = self.client.register_region(
            block_count=self.shape.block_count,
            planes=self.shape.planes,
            memories=self.memories,
            namespace=self.namespace,
            cache_group=self.cache_group,
        )

    def views(self, index: int) -> list[np.ndarray]:
        views = []
        for plane in self.shape.planes:
            start = plane.offset_bytes + index * plane.block_stride_bytes
            views.append(self.bytes[plane.memory][start : start + plane.block_bytes])
        return views

    def fill(self, index: int, name: str) -> bytes:
        """Put bytes that `name` determines into a block; returns its block hash."""
        seed = hashlib.sha256(name.encode()).digest()
        rng = np.random.default_rng(list(seed))
        for view in self.views(index):
            view[:] = rng.integers(0, 256, view.shape[0], dtype=np.uint8)
        return seed

    def expect(self, name: str) -> list[np.ndarray]:
        rng = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
        return [rng.integers(0, 256, plane.block_bytes, dtype=np.uint8) for plane in self.shape.planes]

    def holds(self, index: int, name: str) -> bool:
        return all(np.array_equal(view, want) for view, want in zip(self.views(index), self.expect(name), strict=True))

    def wipe(self) -> None:
        for array in self.bytes:
            array[:] = 0xA5

    def blocks(self, indices: Sequence[int], names: Sequence[str]) -> Blocks:
        return Blocks(self.region, indices, [hashlib.sha256(name.encode()).digest() for name in names])

    def evict(self, indices: Sequence[int], names: Sequence[str], *, fill: bool = True, ack: AckLevel = AckLevel.COPIED, **options):  # type: ignore[no-untyped-def]
        if fill:
            for index, name in zip(indices, names, strict=True):
                self.fill(index, name)
        return self.client.evict(self.blocks(indices, names), ack=ack, **options)

    def restore(self, indices: Sequence[int], names: Sequence[str], **options):  # type: ignore[no-untyped-def]
        return self.client.restore(self.blocks(indices, names), **options)

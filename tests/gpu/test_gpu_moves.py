"""Blocks of GPU memory go out and come back, byte for byte, through the real daemon, its GPU's mover and the real bindings of the driver."""

from collections.abc import Callable

import pytest

from offloadd.units import KIB, MIB

from .conftest import Node, settled_gds

LAYERS, COUNT = 6, 24


def _layers(piece_bytes: int, count: int = COUNT) -> dict[str, object]:
    span = count * piece_bytes
    return {"block_count": count, "memory_bytes": [LAYERS * span], "planes": [(0, layer * span, piece_bytes, piece_bytes) for layer in range(LAYERS)]}


def _apart(piece_bytes: int, count: int = COUNT) -> dict[str, object]:
    span = count * piece_bytes
    planes = [(which, layer * span, piece_bytes, piece_bytes) for layer in range(3) for which in (0, 1)]
    return {"block_count": count, "memory_bytes": [3 * span, 3 * span], "planes": planes}


def _flat(block_bytes: int, count: int = COUNT, stride_bytes: int = 0) -> dict[str, object]:
    stride_bytes = stride_bytes or block_bytes
    return {"block_count": count, "memory_bytes": [count * stride_bytes], "planes": [(0, 0, stride_bytes, block_bytes)]}


SHAPES = {
    "cross-layer": _flat(96 * KIB),
    "layers apart": _layers(16 * KIB),
    "K and V in two memories": _apart(12 * KIB),
    "odd pieces with gaps": _flat(5_001, stride_bytes=6_007),
    "longer than a staging slot": _flat((9 << 20) + 4096 + 17, count=6),
}
WAYS = {
    "ddr": ("tier='ARENA'", "path='DDR', require_path=True", ["ARENA", "DDR"]),
    "gds": ("durable=True, path='GDS', require_path=True", "path='GDS', require_path=True", ["VOLUME", "GDS"]),
    "bounce": ("durable=True, path='BOUNCE', require_path=True", "path='BOUNCE', require_path=True", ["VOLUME", "BOUNCE"]),
}


#: Blocks longer than a staging slot do not go by gds.
CASES = [(shape, way) for shape in SHAPES for way in WAYS if (shape, way) != ("longer than a staging slot", "gds")]


@pytest.mark.parametrize(("shape", "way"), CASES)
def test_blocks_come_back_into_other_places(node: Node, make_engine: Callable[..., None], shape: str, way: str) -> None:
    daemon, engine = node.daemon(arena_bytes=128 * MIB, slab_bytes=64 * MIB, volume_bytes=512 * MIB), node.engine()
    if way == "gds":
        available, why = settled_gds(daemon)
        if not available and node.control is None:
            pytest.skip(f"this machine has no way past the host: {why}")
    make_engine(engine, daemon, **SHAPES[shape])
    half = int(SHAPES[shape]["block_count"]) // 2  # type: ignore[call-overload]
    evict, restore, path = WAYS[way]
    evicted, restored, wrong, disturbed, untouched = engine.run(f"""
        half = {half}
        names = [f"block {{number}}" for number in range(half)]
        for number, name in enumerate(names):
            engine.write(number, name)
        evicted = engine.evict(range(half), names, {evict})
        for number in range(half):
            engine.write(number, "something else")
        order = list(reversed(range(half, 2 * half)))
        restored = engine.restore(order, names, {restore})
        result = [evicted, restored, engine.wrong(order, names), engine.wrong(range(half), ["something else"] * half), engine.margins()]
    """)
    assert {outcome[0] for outcome in evicted["outcomes"]} == {"STORED"}
    assert {outcome[0] for outcome in restored["outcomes"]} == {"RESTORED"}
    assert evicted["paths"] == [[*path, half]] and restored["paths"] == [[*path, half]]
    assert (wrong, disturbed, untouched) == ([], [], True)


def test_blocks_longer_than_a_staging_slot_do_not_go_by_gds(standin_node: Node, make_engine: Callable[..., None]) -> None:
    daemon = standin_node.daemon(slab_bytes=64 * MIB, volume_bytes=512 * MIB)
    assert settled_gds(daemon) == (True, "")
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPES["longer than a staging slot"])
    engine.run("engine.write(0, 'long')")
    assert engine.run("result = engine.evict([0], ['long'], durable=True, path='GDS')")["paths"] == [["VOLUME", "BOUNCE", 1]]
    with pytest.raises(RuntimeError, match="path gds is not available for blocks whose slots have 9449472 bytes; 8388608 is the most"):
        engine.run("engine.restore([1], ['long'], path='GDS', require_path=True)")
    assert engine.run("result = [engine.restore([1], ['long'], path='GDS')['paths'], engine.wrong([1], ['long'])]") == [[["VOLUME", "BOUNCE", 1]], []]

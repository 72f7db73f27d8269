"""Moves that Hypothesis draws: layouts of engines, blocks, places and windows, with the bytes on both sides and what the host mover makes of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from offloadd.memory.planes import plane_views
from offloadd.model.region import Layout, Plane, validate_layout
from offloadd.transfer import gather as host


@dataclass(frozen=True, slots=True)
class MoveCase:
    """`engine`: all memories in one buffer, memory i at `memory_offsets[i]`."""

    layout: Layout
    memory_offsets: list[int]
    memory_bytes: list[int]
    engine: npt.NDArray[np.uint8]
    ours: npt.NDArray[np.uint8]
    blocks: npt.NDArray[Any]
    places: npt.NDArray[np.int64]
    stride_bytes: int
    first: int
    last: int | None


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    blocks = draw(st.integers(1, 12))
    piece = draw(st.sampled_from([1, 3, 16, 100]))
    count = draw(st.integers(1, 12))
    gap = draw(st.sampled_from([0, 1, 24]))
    stride = piece + gap
    match draw(st.sampled_from(["apart", "per layer", "stacked", "cross-layer", "interleaved", "descending", "mixed"])):
        case "apart":  # K and V in a memory each
            planes = [Plane(0, 0, stride, piece), Plane(1, 7, stride, piece)]
        case "per layer":  # a memory a layer, K and V in it
            planes = [Plane(layer, half * blocks * stride, stride, piece) for layer in range(count) for half in range(2)]
        case "stacked":  # all planes in one memory, at equal distances
            planes = [Plane(0, 5 + number * (blocks * stride + gap), stride, piece) for number in range(count)]
        case "cross-layer":  # one long piece a block
            planes = [Plane(0, gap + number * piece, count * piece, piece) for number in range(count)]
        case "interleaved":
            planes = [Plane(0, number * stride, count * stride + 5, piece) for number in draw(st.permutations(range(count)))]
        case "descending":
            planes = [Plane(0, (count - 1 - number) * blocks * stride, stride, piece) for number in range(count)]
        case _:  # scales behind each layer's piece, other lengths between
            planes = [Plane(0, 0, piece, piece), Plane(1, 2, 9, 4), Plane(0, blocks * piece + gap, piece, piece), Plane(1, 9 * blocks + 10, 13, 13)]
    return Layout(blocks, tuple(planes))


@st.composite
def cases(draw: st.DrawFn) -> MoveCase:
    layout = draw(layouts())
    sizes = []
    for memory in range(max(plane.memory for plane in layout.planes) + 1):
        ends = [p.offset_bytes + (layout.block_count - 1) * p.block_stride_bytes + p.block_bytes for p in layout.planes if p.memory == memory]
        sizes.append(max(ends))
    validate_layout(layout, tuple(sizes), planes_max=100)
    step = max(sizes) + draw(st.integers(0, 3))
    blocks = draw(st.one_of(st.just(list(range(layout.block_count))), st.lists(st.integers(0, layout.block_count - 1), min_size=1, unique=True)))
    first = draw(st.integers(0, layout.payload_bytes - 1))
    last = draw(st.one_of(st.none(), st.integers(first + 1, layout.payload_bytes)))
    window = (layout.payload_bytes if last is None else last) - first
    stride = window + draw(st.integers(0, 3))
    hole = draw(st.sampled_from([0, 0, 1]))
    places = np.cumsum([draw(st.integers(0, 5))] + [stride + (hole if number % 3 == 2 else 0) for number in range(len(blocks) - 1)])
    random = np.random.default_rng(draw(st.integers(0, 99)))
    return MoveCase(
        layout=layout,
        memory_offsets=[number * step for number in range(len(sizes))],
        memory_bytes=sizes,
        engine=random.integers(0, 256, step * len(sizes), dtype=np.uint8),
        ours=random.integers(0, 256, int(places[-1]) + stride, dtype=np.uint8),
        blocks=np.array(blocks, dtype="<u4"),
        places=places,
        stride_bytes=stride,
        first=first,
        last=last,
    )


def host_result(case: MoveCase, *, out: bool) -> npt.NDArray[np.uint8]:
    """What the host mover's gather makes of `ours`, or its scatter of `engine`."""
    engine, ours = case.engine.copy(), case.ours.copy()
    views = plane_views(engine, case.layout, case.memory_offsets)
    payloads = host.Payloads(ours, case.places, case.stride_bytes)
    move = host.gather if out else host.scatter
    move(views, case.blocks, payloads, case.first, case.last)
    return ours if out else engine

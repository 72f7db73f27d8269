"""Gather and scatter on the GPU against a device-to-device copy of as many bytes: by copy engines and by kernels, for both layouts of engines."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.device import EngineMemory, Gpu, Timed
from bench.gpu.figures import Figures
from bench.support.mover import layout_of
from bench.support.report import Target
from bench.support.stats import Paired, Summary
from bench.support.workload import Blocks
from offloadd.cuda.copies import CopyEngines
from offloadd.cuda.memory import DeviceMemory
from offloadd.cuda.region import CudaRegion, MemoryPart, Places
from offloadd.tiers.format import slot_bytes_for
from offloadd.transfer.kernels.base import Blocks as KernelBlocks
from offloadd.transfer.kernels.base import DeviceKernels, Slots, plane_table
from offloadd.transfer.kernels.base import Region as KernelRegion
from offloadd.units import SECTOR_BYTES

#: Of a device-to-device copy.
RATIO_MIN = 0.7

Indices = npt.NDArray[np.uint32]
Work = Callable[[], None]


@dataclass(slots=True)
class Way:
    """One implementation: what queues a gather and a scatter of all blocks, and its times."""

    name: str
    gather: Work
    scatter: Work
    gathers: list[Timed] = field(default_factory=list)
    scatters: list[Timed] = field(default_factory=list)
    calls: int = 1


def gather_and_scatter(figures: Figures, gpu: Gpu, work: Blocks, kernels: DeviceKernels | None) -> None:
    """A figure a way and order of blocks. `kernels` None: why there are none was told before."""
    layout = layout_of(work.block_bytes, work.block_count, work.plane_count)
    slot_bytes = slot_bytes_for(work.block_bytes)
    for order, indices in _orders(work.block_count).items():
        with EngineMemory(gpu, layout) as engine, contextlib.ExitStack() as held:
            staged = gpu.allocate(slot_bytes * work.block_count)
            held.callback(staged.close)
            ways = [_by_copy_engines(gpu, engine, staged, indices, slot_bytes)]
            if kernels is not None:
                ways.append(_by_kernels(gpu, engine, staged, indices, slot_bytes, kernels, held))
            for way in ways:
                # What another way has gathered must not be taken for this one's.
                gpu.wipe(staged.address, staged.size_bytes)
                gpu.time(way.gather)
                _require_gathered(gpu, engine, staged, indices, slot_bytes, way.name)
                engine.wipe()
                gpu.time(way.scatter)
                engine.require_original(f"{work.name}, gather and scatter by {way.name}")
                way.calls = gpu.calls_for(way.gather)

            def plain(engine: EngineMemory = engine, staged: DeviceMemory = staged) -> None:
                gpu.queue_copy(staged.address, engine.address, engine.size_bytes)

            plain_calls = gpu.calls_for(plain)
            plains: list[Timed] = []
            for _ in range(work.round_count * work.start_count):
                plains.append(gpu.time(plain, plain_calls))
                for way in ways:
                    way.gathers.append(gpu.time(way.gather, way.calls))
                    way.scatters.append(gpu.time(way.scatter, way.calls))
            for way in ways:
                _tell(figures, work, order, way, plains)


def _require_gathered(gpu: Gpu, engine: EngineMemory, staged: DeviceMemory, indices: Indices, slot_bytes: int, way: str) -> None:
    """Raise RuntimeError unless the first and the last block lie in their slots as payloads: what goes wrong both ways alike would come back right."""
    found = np.empty(engine.layout.payload_bytes, dtype=np.uint8)
    for place in (0, len(indices) - 1):
        gpu.get(staged.address + place * slot_bytes + SECTOR_BYTES, found)
        if (found != engine.payload(int(indices[place]))).any():
            raise RuntimeError(f"block {int(indices[place])} was gathered wrong by {way}")


def _orders(count: int) -> dict[str, Indices]:
    """A sequence that was admitted into an empty cache has its blocks side by side; one that came later has what others left."""
    return {"blocks side by side": np.arange(count, dtype=np.uint32), "blocks in no order": np.random.default_rng(5).permutation(count).astype(np.uint32)}


def _by_copy_engines(gpu: Gpu, engine: EngineMemory, staged: DeviceMemory, indices: Indices, slot_bytes: int) -> Way:
    copies = CopyEngines.of(gpu.device)
    region = CudaRegion.over(engine.layout, [MemoryPart(engine.address, engine.size_bytes)], planes_max=len(engine.layout.planes))
    places = Places(staged.address, staged.size_bytes, np.arange(len(indices)) * slot_bytes + SECTOR_BYTES, slot_bytes, on_device=True)
    return Way("copy engines", lambda: copies.gather(region, indices, places, gpu.stream), lambda: copies.scatter(region, indices, places, gpu.stream))


def _by_kernels(
    gpu: Gpu, engine: EngineMemory, staged: DeviceMemory, indices: Indices, slot_bytes: int, kernels: DeviceKernels, held: contextlib.ExitStack
) -> Way:
    def there(values: npt.NDArray[Any]) -> int:
        memory = gpu.upload(values)
        held.callback(memory.close)
        return memory.address

    table = plane_table(engine.layout, [engine.address])
    region = KernelRegion(there(table), len(table), engine.layout.block_count, engine.layout.payload_bytes)
    blocks = KernelBlocks(len(indices), there(indices), there(np.ones(len(indices), np.uint8)))
    slots = Slots(staged.address, slot_bytes, SECTOR_BYTES)
    return Way(
        "kernels",
        lambda: kernels.gather(region, blocks, slots, stream=gpu.handle),
        lambda: kernels.scatter(region, blocks, slots, stream=gpu.handle),
    )


def _tell(figures: Figures, work: Blocks, order: str, way: Way, plains: list[Timed]) -> None:
    both = [one.seconds + other.seconds for one, other in zip(way.gathers, way.scatters, strict=True)]
    ceiling = [2 * one.seconds for one in plains]
    moved_bytes = 2 * work.payload_bytes
    pairs = Paired.of(ceiling, both)
    figures.add(
        f"{work.name}, {order}: gather and scatter by {way.name}",
        moved_bytes / Summary.of(both).median / 1e9,
        "GB/s",
        way=f"{way.name}, between memories of the GPU; every byte compared",
        ceiling=moved_bytes / Summary.of(ceiling).median / 1e9,
        ratio=pairs.ratio,
        target=Target(RATIO_MIN, on_ratio=True),
        detail={
            "ceiling": "one device-to-device copy of as many bytes",
            **Summary.of(one.seconds for one in way.gathers).detail(1e3, "gather_ms_"),
            **Summary.of(one.seconds for one in way.scatters).detail(1e3, "scatter_ms_"),
            "queued_ms_median": Summary.of(one.queued_s for one in (*way.gathers, *way.scatters)).median * 1e3,
            **pairs.detail,
        },
    )

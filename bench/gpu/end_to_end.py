"""The whole daemon over a GPU, by the client library over gRPC: a COPIED evict against a page-locked copy, and the stages of evicts and restores by path."""

import contextlib
import hashlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.gpu.device import EngineMemory, Gpu
from bench.gpu.figures import Figures
from bench.support.client import NAMESPACE
from bench.support.mover import layout_of
from bench.support.outcomes import not_moved
from bench.support.page_locked import page_locked
from bench.support.report import Target
from bench.support.restoring import make_volume
from bench.support.service import Service
from bench.support.settled import settled_paths
from bench.support.stats import Paired, Summary
from bench.support.ways import way_of
from bench.support.workload import Blocks
from offloadd.client import AckLevel, Client, EvictResult, Region, RestoreResult, StageTimes, Tier
from offloadd.client import Blocks as Chosen
from offloadd.client import Path as Way
from offloadd.errors import PathUnavailable
from offloadd.offload.mover_link import ARENA_LOCKED
from offloadd.units import MIB, align_up

#: A COPIED evict takes at most this many times as long as one page-locked copy of as many bytes.
COPIED_RATIO_MAX = 1.25
DEADLINE_S = 300.0

STAGES = ("copy_s", "checksum_s", "io_s", "queue_s")


class NotMovedError(RuntimeError):
    """Blocks of a request were not moved, or not by the path asked for; says how many, and why."""


class Requests:
    """An engine's requests, each evict of blocks that the daemon has not seen. None is sent by another path than asked: a figure of that has the wrong name."""

    def __init__(self, client: Client, region: Region, count: int) -> None:
        self._client = client
        self._region = region
        self._count = count
        self._numbers = itertools.count()
        self._names = self._fresh()

    def _fresh(self) -> list[bytes]:
        number = next(self._numbers)
        return [hashlib.sha256(b"gpu figures %d %d" % (number, block)).digest() for block in range(self._count)]

    def evict(self, *, ack: AckLevel, tier: Tier, path: Way) -> tuple[float, EvictResult]:
        """All blocks of the region, under new names; seconds and the answer. NotMovedError unless every block was stored by this path."""
        self._names = self._fresh()
        blocks = Chosen(self._region, range(self._count), self._names)
        start = time.perf_counter()
        result = self._client.evict(blocks, ack=ack, tier=tier, path=path, require_path=True, deadline_s=DEADLINE_S)
        seconds = time.perf_counter() - start
        if why := not_moved(result):
            raise NotMovedError(why)
        return seconds, result

    def restore(self, path: Way) -> tuple[float, RestoreResult]:
        """What was evicted last, into the blocks that it came from. NotMovedError unless every block was restored by this path."""
        blocks = Chosen(self._region, range(self._count), self._names)
        start = time.perf_counter()
        result = self._client.restore(blocks, path=path, require_path=True, deadline_s=DEADLINE_S)
        seconds = time.perf_counter() - start
        if why := not_moved(result):
            raise NotMovedError(why)
        return seconds, result


@contextlib.contextmanager
def requests(gpu: Gpu, engine: EngineMemory, *, volume: Path | None, arena_bytes: int) -> Iterator[tuple[Client, Requests]]:
    """A daemon with these tiers and the GPU, and this process as the engine."""
    with Service(
        volumes=[] if volume is None else [volume], open_slabs=8, index_bytes_max=1 << 30, arena_bytes=arena_bytes, gpus=(gpu.device.uuid,)
    ) as service:
        service.ready_s()
        if volume is not None:
            service.event("volume is recovered")
        if arena_bytes:
            # Copies to and from what is not yet page-locked take a way around.
            service.event(ARENA_LOCKED)
        with Client.connect(service.runtime_dir, instance="bench", process="bench", timeout_s=60) as client:
            settled_paths(client, [gpu.device.uuid])
            with engine.export() as memory:
                region = client.register_region(block_count=engine.layout.block_count, planes=engine.layout.planes, memories=[memory], namespace=NAMESPACE)
                yield client, Requests(client, region, engine.layout.block_count)
                client.unregister_region(region)
        service.stop()


@dataclass(slots=True)
class Told:
    """What answers said: seconds at the client, the daemon's stages, and the ways."""

    seconds: list[float] = field(default_factory=list)
    times: list[StageTimes] = field(default_factory=list)
    ways: set[str] = field(default_factory=set)

    def take(self, seconds: float, result: EvictResult | RestoreResult) -> None:
        """One more answer."""
        self.seconds.append(seconds)
        self.times.append(result.times)
        self.ways |= {f"{way_of(use)} ({use.tier.name.lower()})" for use in result.paths}

    @property
    def way(self) -> str:
        """As the daemon's answers say it."""
        return f"{' and '.join(sorted(self.ways)) or 'none told'}, by the daemon's answers"


def _arena_bytes(work: Blocks) -> int:
    return align_up(2 * work.payload_bytes + 64 * MIB, 64 * MIB)


def copied(figures: Figures, gpu: Gpu, work: Blocks) -> None:
    """A COPIED evict into the arena, end to end. The daemon has no volume: spills in the background would take a disk's share of the memory's bandwidth."""
    told, ceiling = Told(), []
    with EngineMemory(gpu, layout_of(work.block_bytes, work.block_count, work.plane_count)) as engine, page_locked(gpu.device, work.payload_bytes) as host:

        def copy_out() -> None:
            gpu.queue_copy(host, engine.address, work.payload_bytes)

        for _ in range(work.start_count):
            with requests(gpu, engine, volume=None, arena_bytes=_arena_bytes(work)) as (_, engine_requests):
                engine_requests.evict(ack=AckLevel.COPIED, tier=Tier.ARENA, path=Way.DDR)
                engine.wipe()
                engine_requests.restore(Way.DDR)
                engine.require_original("evict and restore by ddr, end to end")
                gpu.time(copy_out)
                for _ in range(work.round_count):
                    ceiling.append(gpu.time(copy_out).seconds)
                    told.take(*engine_requests.evict(ack=AckLevel.COPIED, tier=Tier.ARENA, path=Way.DDR))
    pairs = Paired.of(told.seconds, ceiling)
    figures.add(
        f"{work.name}: evict of {work.block_count} blocks, COPIED, over gRPC",
        float(np.median(told.seconds)) * 1e3,
        "ms",
        way=told.way,
        ceiling=float(np.median(ceiling)) * 1e3,
        ratio=pairs.ratio,
        target=Target(COPIED_RATIO_MAX, at_least=False, on_ratio=True),
        detail={"ceiling": "one page-locked device-to-host copy of as many bytes", **Summary.of(told.seconds).detail(1e3, "ms_"), **pairs.detail},
    )


def stages(figures: Figures, gpu: Gpu, work: Blocks, directory: Path) -> None:
    """The time of each stage of evicts and restores by each path, as the daemon tells it."""
    volume = directory / f"{work.name}-stages.volume"
    found: dict[tuple[Way, str], Told] = {}
    missing: dict[Way, str] = {}
    try:
        for _ in range(work.start_count):
            make_volume(volume, work)
            with (
                EngineMemory(gpu, layout_of(work.block_bytes, work.block_count, work.plane_count)) as engine,
                requests(gpu, engine, volume=volume, arena_bytes=_arena_bytes(work)) as (client, engine_requests),
            ):
                missing |= {way.path: way.note for way in settled_paths(client, [gpu.device.uuid]) if not way.available}
                for path in (Way.DDR, Way.BOUNCE, Way.GDS):
                    if path in missing:
                        continue
                    try:
                        _by(path, work, engine, engine_requests, found)
                    except (NotMovedError, PathUnavailable) as error:
                        # Of this path nothing is told; what others did before it, and do after it, holds.
                        missing[path] = str(error)
            volume.unlink()
    finally:
        volume.unlink(missing_ok=True)
    for path, why in missing.items():
        figures.skip(f"{work.name}: stages of evict and restore by {path.name.lower()}, end to end", why)
    for name, told in ((name, told) for (path, name), told in found.items() if path not in missing):
        spent = {stage: float(np.median([getattr(times, stage) for times in told.times])) * 1e3 for stage in (*STAGES, "total_s")}
        words = ", ".join(f"{stage.removesuffix('_s')} {spent[stage]:.2f}" for stage in STAGES)
        figures.add(
            f"{work.name}: stages of {name}, end to end ({words} ms)",
            float(np.median(told.seconds)) * 1e3,
            "ms",
            way=told.way,
            detail={**Summary.of(told.seconds).detail(1e3, "ms_"), **{stage.replace("_s", "_ms"): value for stage, value in spent.items()}},
        )


def _by(path: Way, work: Blocks, engine: EngineMemory, engine_requests: Requests, found: dict[tuple[Way, str], Told]) -> None:
    durable = path != Way.DDR
    ack, tier = (AckLevel.DURABLE, Tier.VOLUME) if durable else (AckLevel.COPIED, Tier.ARENA)
    evicts = found.setdefault((path, f"evict by {path.name.lower()}, {ack.name}"), Told())
    restores = found.setdefault((path, f"restore by {path.name.lower()}"), Told())
    engine_requests.evict(ack=ack, tier=tier, path=path)
    engine.wipe()
    engine_requests.restore(path)
    engine.require_original(f"evict and restore by {path.name}, end to end")
    for _ in range(work.round_count):
        evicts.take(*engine_requests.evict(ack=ack, tier=tier, path=path))
        restores.take(*engine_requests.restore(path))

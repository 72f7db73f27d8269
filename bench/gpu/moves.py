"""A GPU's mover alone: restores by each path against what bounds that path, and the time of each stage of its evicts and restores."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.gpu.bare_kvikio import BareReads
from bench.gpu.device import EngineMemory, Gpu
from bench.gpu.figures import Figures
from bench.support.bare_kvikio import not_past_the_host
from bench.support.ios import slices_of
from bench.support.mover import LaneEnd, LaneRefusedError, MoverProcess, Records, layout_of, make_records
from bench.support.process import CommandedError
from bench.support.report import Detail, Target
from bench.support.restoring import PresentMemory, Series, make_volume
from bench.support.stats import Paired, Summary
from bench.support.workload import Blocks
from offloadd.cuda.memory import HostRegistration
from offloadd.memory.mapping import Mapping
from offloadd.memory.memfd import create_sealed
from offloadd.mover.messages import ArenaLocked, Operation
from offloadd.tiers.format import Geometry, slot_bytes_for
from offloadd.tiers.volume_io import VolumeFile, open_volume
from offloadd.units import MIB, SECTOR_BYTES, align_up

#: Of what bounds the path.
RATIO_MIN = {"ddr": 0.85, "bounce": 0.90, "gds": 0.90}

STAGES = ("copy_ns", "checksum_ns", "io_ns", "queue_ns")


@dataclass(slots=True)
class Runs:
    """The series of one path by name, and how many slices there were in all and how many of them bounced."""

    records: Records
    slot_bytes: int
    series: dict[str, Series] = field(default_factory=dict)
    slice_count: int = 0
    bounced_count: int = 0
    #: Why the ceiling bounds nothing; empty if it does.
    ceiling_fault: str = ""

    def take(self, name: str, mover: MoverProcess, lane: LaneEnd, operation: Operation, *, verify: bool = True) -> None:
        """Move all blocks, and add to the series `name`."""
        self.series.setdefault(name, Series()).take(mover, lane, operation, self.records, self.slot_bytes, verify=verify)
        self.slice_count += lane.slice_count
        self.bounced_count += lane.bounced_count

    def prove(self, engine: EngineMemory, lane: LaneEnd, out: Operation, back: Operation) -> None:
        """Evict, wipe, restore, and compare every byte; warms everything up as well."""
        lane.run(out, self.records, self.slot_bytes)
        engine.wipe()
        lane.run(back, self.records, self.slot_bytes)
        engine.require_original(f"{out.name} and {back.name}")
        lane.run(back, self.records, self.slot_bytes, verify=False)

    def take_seconds(self, name: str, seconds: float) -> None:
        """Add what was measured without the mover."""
        self.series.setdefault(name, Series()).seconds.append(seconds)


def stage_detail(series: Series) -> Detail:
    """Milliseconds of all threads together that one run spent in each stage; queue: the waits of all slices, added up."""
    return {stage.replace("_ns", "_ms"): series.stage_ns.get(stage, 0) / 1e6 / len(series.seconds) for stage in STAGES}


@contextlib.contextmanager
def gpu_mover(gpu: Gpu, engine: EngineMemory) -> Iterator[MoverProcess]:
    """A mover of the GPU that has the engine's memory as region 1."""
    with MoverProcess(gpu.device.uuid) as mover:
        mover.map_device_memory(1, engine.piece(), engine.layout, engine.size_bytes)
        yield mover


@contextlib.contextmanager
def arena_memory(work: Blocks) -> Iterator[tuple[int, Mapping]]:
    """The descriptor of an arena that takes all blocks, and its mapping in this process."""
    arena_bytes = align_up(align_up(work.block_bytes, SECTOR_BYTES) * work.block_count, 2 * MIB)
    fd = create_sealed("arena", arena_bytes)
    try:
        with PresentMemory(fd, arena_bytes) as mapping:
            yield fd, mapping
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[VolumeFile]:
    """The volume's descriptors, for movers."""
    file = open_volume(str(path), busy_wait_s=5.0)
    try:
        yield file
    finally:
        file.close()


def read_slices(geometry: Geometry, work: Blocks) -> list[tuple[int, int]]:
    """Offset and bytes of each I/O that a mover makes to read the blocks of the workload from slab 0."""
    slot_bytes = slot_bytes_for(work.block_bytes)
    return list(slices_of([geometry.slot_offset(0, slot, slot_bytes) for slot in range(work.block_count)], slot_bytes))


def arena_way(told: Iterable[ArenaLocked]) -> str:
    """The way of restores from the arena by movers that have told this of it before."""
    refused = next((locked for locked in told if locked.why), None)
    if refused is None:
        return "ddr: copy engines and the arena, all of it page-locked, says the mover"
    return f"ddr: copy engines and the arena, NOT page-locked, says the mover: {refused.locked_bytes} of {refused.arena_bytes} bytes are: {refused.why}"


def ddr(figures: Figures, gpu: Gpu, work: Blocks) -> None:
    """Restores from the page-locked arena against one copy of as many bytes from the same pages."""
    runs, way = _arena_runs(gpu, work)
    _tell(figures, work, "ddr", runs, way, "one copy of as many bytes from the page-locked arena")


def _arena_runs(gpu: Gpu, work: Blocks) -> tuple[Runs, str]:
    """`ceiling`, `unverified`, `restore` and `evict` in turn, and their way."""
    runs = Runs(make_records(work.block_bytes, work.block_count), align_up(work.block_bytes, SECTOR_BYTES))
    told: list[ArenaLocked] = []
    with arena_memory(work) as (arena_fd, arena), EngineMemory(gpu, layout_of(work.block_bytes, work.block_count, work.plane_count)) as engine:
        ours = HostRegistration.register(gpu.device, arena.bytes.ctypes.data, arena.bytes.nbytes)
        try:

            def copy_in() -> None:
                gpu.queue_copy(engine.address, arena.bytes.ctypes.data, work.payload_bytes)

            for _ in range(work.start_count):
                engine.fill()
                with gpu_mover(gpu, engine) as mover:
                    told.append(mover.map_locked_arena(arena_fd, arena.bytes.nbytes))
                    lane = mover.add_lane(1)
                    runs.prove(engine, lane, Operation.ARENA_EVICT, Operation.ARENA_RESTORE)
                    gpu.time(copy_in)
                    for _ in range(work.round_count):
                        runs.take_seconds("ceiling", gpu.time(copy_in).seconds)
                        for name, verify in (("unverified", False), ("restore", True)):
                            runs.take(name, mover, lane, Operation.ARENA_RESTORE, verify=verify)
                        runs.take("evict", mover, lane, Operation.ARENA_EVICT)
        finally:
            ours.close()
    return runs, arena_way(told)


def bounce(figures: Figures, gpu: Gpu, work: Blocks, directory: Path) -> None:
    """Restores through page-locked staging slots against O_DIRECT reads into the same ones."""
    try:
        runs = _volume_runs(gpu, work, directory, "bounce", lambda *_: contextlib.nullcontext(None))
    except LaneRefusedError as error:
        figures.skip(f"{work.name}: restore by bounce", f"the mover refused its lane: {error}")
        return
    way = "bounce: O_DIRECT into page-locked staging slots (a lane that can't page-lock them does not open), copy engines"
    _tell(figures, work, "bounce", runs, way, "O_DIRECT reads through the same page-locked slots (READ_ONLY of the same mover)")


def gds(figures: Figures, gpu: Gpu, work: Blocks, directory: Path) -> None:
    """Restores past the host against bare KvikIO; where there is no such way, why, and what KvikIO's own bounce does."""

    def bare(path: Path, slices: list[tuple[int, int]]) -> contextlib.AbstractContextManager[BareReads | None]:
        return BareReads(gpu.device.uuid, path, slices, compat=False)

    try:
        runs = _volume_runs(gpu, work, directory, "gds", bare)
    except LaneRefusedError as error:
        figures.skip(f"{work.name}: restore by gds", f"the mover refused its lane: {error}")
        _compat(figures, gpu, work, directory)
        return
    counted = f"{runs.bounced_count} of {runs.slice_count} slices bounced, by cuFile's and KvikIO's counts"
    if runs.bounced_count or runs.ceiling_fault:
        # A ceiling that bounced is a low one, and would flatter what is measured against it.
        figures.skip(f"{work.name}: restore by gds", "; ".join(filter(None, (counted if runs.bounced_count else "", runs.ceiling_fault))))
        return
    _tell(figures, work, "gds", runs, f"gds: {counted}", "bare KvikIO, compat mode OFF, same slices, threads and file")
    raw = runs.series["raw"]
    pairs = Paired.of(runs.series["ceiling"].seconds, raw.seconds)
    figures.add(
        f"{work.name}: reads by the gds lane and no further",
        raw.rate(work.payload_bytes) / 1e9,
        "GB/s",
        way=f"gds: {counted}",
        ceiling=runs.series["ceiling"].rate(work.payload_bytes) / 1e9,
        ratio=pairs.ratio,
        detail={**Summary.of(raw.seconds).detail(1e3, "ms_"), **pairs.detail},
    )


def _volume_runs(
    gpu: Gpu, work: Blocks, directory: Path, way: str, bare: Callable[[Path, list[tuple[int, int]]], contextlib.AbstractContextManager[BareReads | None]]
) -> Runs:
    """`ceiling`, `raw`, `restore`, `unverified` and `evict` in turn. The ceiling is that of `bare`, else reads by the lane itself."""
    path = directory / f"{work.name}-{way}.volume"
    geometry = make_volume(path, work)
    runs = Runs(make_records(work.block_bytes, work.block_count), slot_bytes_for(work.block_bytes))
    slices = read_slices(geometry, work)
    try:
        with EngineMemory(gpu, layout_of(work.block_bytes, work.block_count, work.plane_count)) as engine:
            for _ in range(work.start_count):
                engine.fill()
                with opened(path) as file, gpu_mover(gpu, engine) as mover:
                    lane = mover.add_lane(1, file, geometry, path=way)
                    runs.prove(engine, lane, Operation.EVICT, Operation.RESTORE)
                    with bare(path, slices) as reads:
                        for _ in range(work.round_count):
                            if reads is not None:
                                seconds, ways = reads.run()
                                runs.take_seconds("ceiling", seconds)
                                runs.ceiling_fault = runs.ceiling_fault or not_past_the_host(ways)
                            runs.take("raw", mover, lane, Operation.READ_ONLY)
                            for name, verify in (("restore", True), ("unverified", False)):
                                runs.take(name, mover, lane, Operation.RESTORE, verify=verify)
                        for _ in range(work.round_count):
                            runs.take("evict", mover, lane, Operation.EVICT)
    finally:
        path.unlink(missing_ok=True)
    runs.series.setdefault("ceiling", runs.series["raw"])
    return runs


def _compat(figures: Figures, gpu: Gpu, work: Blocks, directory: Path) -> None:
    """Information for machines without a way past the host: what KvikIO makes of the same reads by itself."""
    path = directory / f"{work.name}-compat.volume"
    geometry = make_volume(path, work)
    slices = read_slices(geometry, work)
    first, last = slices[0][0], slices[-1][0] + slices[-1][1]
    try:
        # Unwritten extents are not read from the device.
        with path.open("r+b") as file:
            file.seek(first)
            file.write(np.random.default_rng(4).bytes(last - first))
            os.fsync(file.fileno())
        with BareReads(gpu.device.uuid, path, slices, compat=True) as reads:
            found = [reads.run() for _ in range(1 + work.round_count * work.start_count)][1:]
    except CommandedError as error:
        figures.skip(f"{work.name}: bare KvikIO in compat mode", str(error))
        return
    finally:
        path.unlink(missing_ok=True)
    ways = ", ".join(f"{way.label} {count}" for way, count in found[-1][1].items())
    seconds = Summary.of(one for one, _ in found)
    figures.add(
        f"{work.name}: bare KvikIO in compat mode (information: not the way of gds)",
        work.payload_bytes / seconds.median / 1e9,
        "GB/s",
        way=f"I/Os of a run by the counts: {ways or 'none counted'}",
        detail=seconds.detail(1e3, "ms_"),
    )


def _tell(figures: Figures, work: Blocks, path: str, runs: Runs, way: str, ceiling_name: str) -> None:
    size = work.payload_bytes
    ceiling = runs.series["ceiling"]
    figures.add(f"{work.name}: ceiling of {path}", ceiling.rate(size) / 1e9, "GB/s", way=ceiling_name, detail=Summary.of(ceiling.seconds).detail(1e3, "ms_"))
    for title, name in (("restore without verification", "unverified"), ("restore", "restore")):
        series = runs.series[name]
        pairs = Paired.of(ceiling.seconds, series.seconds)
        figures.add(
            f"{work.name}: {title} by {path}, mover alone",
            series.rate(size) / 1e9,
            "GB/s",
            way=way,
            ceiling=ceiling.rate(size) / 1e9,
            ratio=pairs.ratio,
            target=Target(RATIO_MIN[path], on_ratio=True),
            detail={
                "ceiling": ceiling_name,
                "cpu_s_per_gb": series.cpu_per_gb(size),
                **Summary.of(series.seconds).detail(1e3, "ms_"),
                **stage_detail(series),
                **pairs.detail,
            },
        )
    for name in ("restore", "evict"):
        series = runs.series[name]
        spent = stage_detail(series)
        # DURABLE evicts are among those of the whole daemon.
        kind: Detail = {"writes": "O_DIRECT, not synced"} if name == "evict" and path != "ddr" else {}
        figures.add(
            f"{work.name}: stages of {name} by {path}, mover alone ({told_stages(spent)})",
            float(np.median(series.seconds)) * 1e3,
            "ms",
            way=way,
            detail={**Summary.of(series.seconds).detail(1e3, "ms_"), **spent, **kind},
        )


def told_stages(spent: Detail) -> str:
    """For a name: what is in brackets there is left out where figures of two runs are compared."""
    return ", ".join(f"{stage.removesuffix('_ms')} {float(milliseconds):.2f}" for stage, milliseconds in spent.items()) + " ms of all threads"

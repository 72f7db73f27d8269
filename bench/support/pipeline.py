"""The promises of the host's pipeline: a restore runs at the speed of the device, and what verification costs where no device hides it.

Three ceilings, each measured in the same processes and interleaved with what is compared to it: reads through the same staging slots and no further
(READ_ONLY) for volumes, on disk and in memory; `np.copyto` with the mover's threads and glibc tunable for the arena; an empty call and a raw read for
a single block.
"""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench.support import sketch
from bench.support.client import ClientProcess, block_hash
from bench.support.cpu import cpu_seconds
from bench.support.daemon import DaemonThread, make_config
from bench.support.fio import fio_bytes_per_s
from bench.support.mover import ARENA_THREADS, STAGING_SLOT_BYTES, THREADS
from bench.support.report import Detail, Figure, Report, Target, seconds_figure
from bench.support.restoring import Series, arena_restores, make_volume, shared_memory_dir, volume_restores
from bench.support.service import Service
from bench.support.stats import Paired, Summary
from bench.support.workload import Blocks, load_workload
from offloadd.client import Path as Way
from offloadd.client import Tier
from offloadd.model.namespace import KeyMaker
from offloadd.tiers.format import Geometry, geometry_of, slot_bytes_for
from offloadd.tiers.slab_header import read_slab_headers
from offloadd.tiers.superblock import read_superblock
from offloadd.tiers.volume_io import open_read_only
from offloadd.units import MIB, align_up

#: What the share of one device's bandwidth in a node of eight GPUs would be asked for.
NODE_BYTES_PER_S = 50e9


@dataclass(slots=True)
class Singles:
    """Seconds of empty calls, of raw reads of a slot, and of restores of one block; `stages`: what the daemon says of the latter."""

    empty: list[float] = field(default_factory=list)
    slot_read: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)


def detail_of(series: Series, size_bytes: int) -> Detail:
    """Latencies in ms, CPU per GB, and where the threads' time went."""
    detail = Summary.of(series.seconds).detail(1e3, "ms_")
    detail["cpu_s_per_gb"] = series.cpu_per_gb(size_bytes)
    detail["cores_for_50_gb_per_s"] = series.cpu_per_gb(size_bytes) * NODE_BYTES_PER_S / 1e9
    spent = sum(nanoseconds for name, nanoseconds in series.stage_ns.items() if name != "queue_ns") or 1
    detail.update({name.replace("_ns", "_share"): round(value / spent, 3) for name, value in series.stage_ns.items() if name != "queue_ns"})
    return detail


def mover_alone(report: Report, work: Blocks, directory: Path, where: str, *, target: float | None) -> None:
    """The mover's restore from a volume in `directory` against READ_ONLY of the same mover."""
    path = directory / f"{work.name}.volume"
    report.say(f"{work.name}: mover alone, volume {where}, {work.start_count} starts")
    try:
        found = volume_restores(path, work)
        outside = fio_read(path, work)
    finally:
        path.unlink(missing_ok=True)
    size = work.payload_bytes
    raw, restore, unverified = found["raw"], found["restore"], found["unverified"]
    name = f"{work.name}, {where}: "
    if outside is not None:
        report.add(Figure(f"{name}fio, {THREADS} threads, O_DIRECT", outside / 1e9, "GB/s"))
    elif where == "disk":
        report.facts["fio"] = "not installed, or it failed"
    in_memory = where != "disk"
    rates = (sketch.COPY_BYTES_PER_S * 2,) if in_memory else (sketch.DISK_BYTES_PER_S,)
    work_rates = (*rates, 2 * sketch.CRC_BYTES_PER_S, 2 * sketch.COPY_BYTES_PER_S) if in_memory else rates
    report.add(Figure(f"{name}raw reads by the mover", raw.rate(size) / 1e9, "GB/s", size / sketch.stages(size, *rates) / 1e9, detail=detail_of(raw, size)))
    # A restore copies every byte once, and on some machines the volume's reads suffer from any copies: then no pipeline reaches the reads alone.
    beside = found["raw_beside_copies"]
    pairs = Paired.of(raw.seconds, beside.seconds)
    report.add(
        Figure(
            f"{name}raw reads beside a process that copies as many bytes",
            beside.rate(size) / 1e9,
            "GB/s",
            ceiling=raw.rate(size) / 1e9,
            ratio=pairs.ratio,
            detail={**Summary.of(beside.seconds).detail(1e3, "ms_"), **pairs.detail},
        )
    )
    for title, series, limit in (("restore", restore, target), ("restore without verification", unverified, None)):
        pairs = Paired.of(raw.seconds, series.seconds)
        report.add(
            Figure(
                f"{name}{title} by the mover",
                series.rate(size) / 1e9,
                "GB/s",
                size / sketch.stages(size, *work_rates) / 1e9,
                "bytes / (disk) on disk; bytes / (copy, checksum, copy) on two cores in memory",
                raw.rate(size) / 1e9,
                pairs.ratio,
                None if limit is None else Target(limit, on_ratio=True),
                {**detail_of(series, size), **pairs.detail},
            )
        )
    cpu = restore.cpu_per_gb(size)
    report.add(Figure(f"{name}CPU of the mover", cpu, "s/GB", detail={"raw": raw.cpu_per_gb(size), "unverified": unverified.cpu_per_gb(size)}))
    report.add(Figure(f"{name}cores that 50 GB/s would need", cpu * NODE_BYTES_PER_S / 1e9, "cores"))


def fio_read(path: Path, work: Blocks) -> float | None:
    """fio over the slots that the mover reads, with I/Os as long as its slices."""
    geometry = geometry_at(path)
    slot_bytes = slot_bytes_for(work.block_bytes)
    io_bytes = max(1, STAGING_SLOT_BYTES // slot_bytes) * slot_bytes
    offset = geometry.slot_offset(0, 0, slot_bytes)
    size_bytes = slot_bytes * work.block_count
    return fio_bytes_per_s(path, offset=offset, size_bytes=size_bytes, io_bytes=min(io_bytes, size_bytes // THREADS), threads=THREADS, rounds=work.round_count)


def geometry_at(path: Path) -> Geometry:
    """The geometry of a volume."""
    fd, _ = open_read_only(str(path))
    try:
        return geometry_of(read_superblock(fd, str(path)).record)
    finally:
        os.close(fd)


def arena(report: Report, work: Blocks, *, targets: bool = True) -> None:
    """The arena's restore against memcpy, and what NumPy's copies reach."""
    report.say(f"{work.name}: mover alone, arena, {work.start_count} starts")
    found = arena_restores(work)
    size = work.payload_bytes
    memcpy = found["memcpy"]
    copy_rate = 2 * sketch.COPY_BYTES_PER_S
    report.add(Figure(f"{work.name}, arena: memcpy, {ARENA_THREADS} threads", memcpy.rate(size) / 1e9, "GB/s", copy_rate / 1e9, detail=detail_of(memcpy, size)))
    for title, key, limit, rates in (
        ("restore without verification", "unverified", 0.80, (copy_rate,)),
        ("restore", "restore", 0.50, (copy_rate, 2 * sketch.CRC_BYTES_PER_S)),
        ("restore, copied with NumPy,", "numpy", None, (copy_rate, 2 * sketch.CRC_BYTES_PER_S)),
    ):
        series = found[key]
        pairs = Paired.of(memcpy.seconds, series.seconds)
        report.add(
            Figure(
                f"{work.name}, arena: {title} by the mover",
                series.rate(size) / 1e9,
                "GB/s",
                size / sketch.stages(size, *rates) / 1e9,
                "bytes / (copy [, checksum]) on two cores",
                memcpy.rate(size) / 1e9,
                pairs.ratio,
                Target(limit, on_ratio=True) if targets and limit else None,
                {**detail_of(series, size), **pairs.detail},
            )
        )


def daemon(report: Report, work: Blocks, directory: Path, where: str) -> None:
    """The whole daemon, from the client library's call to its return: long restores, and single blocks against an empty call and a raw read."""
    raw, restore, ddr = Series(), Series(), Series()
    singles = Singles()
    for start in range(work.start_count):
        report.say(f"{work.name}: whole daemon, volume {where}, start {start + 1} of {work.start_count}")
        path = directory / "daemon.volume"
        make_volume(path, work)
        try:
            _one_start(work, path, raw, restore, ddr)
            if where == "disk":
                _single_blocks(work, path, singles)
        finally:
            path.unlink(missing_ok=True)
    size = work.payload_bytes
    name = f"{work.name}, {where}: "
    expected_s = size / sketch.DISK_BYTES_PER_S + sketch.CALL_S + sketch.HOP_S
    pairs = Paired.of(raw.seconds, restore.seconds)
    report.add(
        Figure(
            f"{name}restore end to end",
            restore.rate(size) / 1e9,
            "GB/s",
            size / expected_s / 1e9 if where == "disk" else None,
            "bytes / disk + call + hop",
            raw.rate(size) / 1e9,
            pairs.ratio,
            detail={**detail_of(restore, size), **pairs.detail},
        )
    )
    report.add(Figure(f"{name}restore from the arena end to end", ddr.rate(size) / 1e9, "GB/s", detail=detail_of(ddr, size)))
    if where != "disk":
        return
    calls, reads, blocks = Summary.of(singles.empty), Summary.of(singles.slot_read), Summary.of(singles.restore)
    report.add(seconds_figure("an empty call", calls, expected=sketch.CALL_S))
    report.add(seconds_figure("a raw read of one slot", reads, expected=sketch.SLOT_READ_S))
    work_s = sketch.stages(work.block_bytes, sketch.CRC_BYTES_PER_S, sketch.COPY_BYTES_PER_S)
    report.add(
        seconds_figure(
            f"{work.name}, {where}: restore of one block",
            blocks,
            expected=sketch.CALL_S + sketch.HOP_S + sketch.SLOT_READ_S + work_s,
            sketch="call + hop + read + checksum + copy",
            target_s=calls.median + reads.median + 1e-3,
        )
    )
    for name, values in singles.stages.items():
        report.add(seconds_figure(f"{work.name}, {where}: restore of one block, of which {name.removesuffix('_s')} in the daemon", Summary.of(values)))


def _one_start(work: Blocks, path: Path, raw: Series, restore: Series, ddr: Series) -> None:
    arena_bytes = align_up(work.payload_bytes + 64 * MIB, 64 * MIB)
    with tempfile.TemporaryDirectory(prefix="offloadd-bench-") as directory:
        config = make_config(Path(directory), volumes=(path,), arena_bytes=arena_bytes)
        with DaemonThread(config) as front, ClientProcess(Path(directory), "bench") as engine:
            region = engine.ask("register", block_bytes=work.block_bytes, block_count=work.block_count, plane_count=work.plane_count)
            evicted = engine.ask("evict", first=0, count=work.block_count, durable=True)
            checked = engine.ask("check", count=work.block_count)
            if evicted["stored_count"] != work.block_count or not checked["equal"]:
                raise RuntimeError(f"stored {evicted['stored_count']}, restored {checked['restored_count']} of {work.block_count}, equal {checked['equal']}")
            maker = KeyMaker(bytes.fromhex(region["namespace_id"]), 0)
            keys = [maker.key(block_hash(number)) for number in range(work.block_count)]
            pids = [os.getpid(), engine.pid, *front.worker_pids]
            _rounds(work, front, engine, keys, region["slot_bytes"], pids, raw, restore)
            engine.ask("evict", first=0, count=work.block_count, tier=int(Tier.ARENA))
            for _ in range(work.round_count):
                before = cpu_seconds(pids)
                ddr.seconds += _restored(engine, work.block_count, [0], work.block_count, Way.DDR)
                ddr.cpu_s += cpu_seconds(pids) - before


def _rounds(
    work: Blocks, front: DaemonThread, engine: ClientProcess, keys: list[bytes], slot_bytes: int, pids: list[int], raw: Series, restore: Series
) -> None:
    for _ in range(work.round_count):
        before = cpu_seconds(pids)
        raw.seconds.append(front.read_only(keys, slot_bytes=slot_bytes))
        between = cpu_seconds(pids)
        restore.seconds += _restored(engine, work.block_count, [0], work.block_count, Way.HOST)
        raw.cpu_s += between - before
        restore.cpu_s += cpu_seconds(pids) - between


def _restored(engine: ClientProcess, expected: int, firsts: list[int], count: int, way: Way, stages: dict[str, list[float]] | None = None) -> list[float]:
    answer = engine.ask("restore", firsts=firsts, count=count, path=int(way))
    if answer["restored_count"] != expected:
        raise RuntimeError(f"{answer['restored_count']} of {expected} blocks were restored")
    if stages is not None:
        for name, values in answer["stages"].items():
            stages.setdefault(name, []).extend(values)
    seconds: list[float] = answer["seconds"]
    return seconds


def _single_blocks(work: Blocks, path: Path, singles: Singles) -> None:
    """By `offloadd serve` itself, which finds the blocks on the volume."""
    geometry = geometry_at(path)
    slot_bytes = slot_bytes_for(work.block_bytes)
    count = work.round_count * 30
    with Service(volumes=[path], open_slabs=8, index_bytes_max=1 << 30) as service:
        service.ready_s()
        service.event("volume is recovered")
        fd, _ = open_read_only(str(path))
        try:
            headers = read_slab_headers(fd, geometry, range(geometry.slab_count), threads=1)
        finally:
            os.close(fd)
        first_slab = next(header.slab for header in headers if header is not None and header.slot_bytes == slot_bytes)
        with ClientProcess(service.runtime_dir, "bench") as engine:
            engine.ask("register", block_bytes=work.block_bytes, block_count=work.block_count, plane_count=work.plane_count)
            # Touches every page of the new region as well: the mover's first copy to a page maps it.
            checked = engine.ask("check", count=work.block_count)
            if checked["restored_count"] != work.block_count or not checked["equal"]:
                raise RuntimeError(f"restored {checked['restored_count']} of {work.block_count} after a restart, equal {checked['equal']}")
            firsts = [number * 7 % work.block_count for number in range(count)]
            offsets = [geometry.slot_offset(first_slab, first, slot_bytes) for first in firsts]
            found = engine.ask("singles", volume=str(path), offsets=offsets, size_bytes=slot_bytes, firsts=firsts, path=int(Way.HOST))
            if found["restored_count"] != count:
                raise RuntimeError(f"{found['restored_count']} of {count} single blocks were restored")
            singles.empty += found["empty"]
            singles.slot_read += found["slot_read"]
            singles.restore += found["seconds"]
            for name, values in found["stages"].items():
                singles.stages.setdefault(name, []).extend(values)
        service.stop()


def run_pipeline(report: Report) -> None:
    """All parts. This process must run under the mover's glibc tunable, since the memcpy that the arena is compared with is its own."""
    main_work = load_workload(Blocks, "restore_320mib", tiny=report.tiny)
    layers = load_workload(Blocks, "restore_320mib_layers", tiny=report.tiny)
    large = load_workload(Blocks, "llama3_8b", tiny=report.tiny)
    memory = shared_memory_dir(6 * main_work.payload_bytes)
    mover_alone(report, main_work, report.directory, "disk", target=0.95)
    daemon(report, main_work, report.directory, "disk")
    arena(report, main_work)
    arena(report, layers, targets=False)
    mover_alone(report, layers, report.directory, "disk", target=None)
    mover_alone(report, large, report.directory, "disk", target=0.95)
    if memory is None:
        report.facts["memory_backed"] = "no room in /dev/shm"
        return
    with tempfile.TemporaryDirectory(prefix="offloadd-bench-", dir=memory) as directory:
        mover_alone(report, main_work, Path(directory), "memory", target=None)
        daemon(report, main_work, Path(directory), "memory")

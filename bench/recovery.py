"""How long after kill -9 does a daemon with a million slots serve, and does it read only the slabs that were open?

A sparse volume with blocks at their real distances: the real daemon starts on it (ready: READY by sd_notify; recovered: all slabs told), is killed, starts
again, is stopped in order, and starts once more. Smaller volumes with ever more dirty slabs show what the header bytes follow.
"""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.support.cpu import children_of, cpu_seconds, resident_bytes
from bench.support.full_volume import make_full_volume
from bench.support.report import Figure, Report, Target, benchmark, seconds_figure
from bench.support.service import Service
from bench.support.stats import Summary
from bench.support.workload import load_workload
from offloadd.tiers.format import slot_bytes_for, slot_count_for, summary_bytes_for
from offloadd.units import MIB, SECTOR_BYTES

#: Interpreter, imports and gRPC up to READY, without any volume to speak of.
START_S = 0.9
#: One 4 KiB read by one of four threads, header checked; and one summary record entered into the index.
HEADER_S = 60e-6
RECORD_S = 1.5e-6


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`dirty_counts`: dirty slabs of the large volume, `small_dirty_counts` of the small ones."""

    name: str
    slab_count: int
    slab_bytes: int
    block_bytes: int
    dirty_counts: list[int]
    small_slab_count: int
    small_dirty_counts: list[int]
    start_count: int


@dataclass(slots=True)
class Starts:
    """What several starts of one kind took and read."""

    ready_s: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    header_bytes: int = 0
    slabs_scanned: int = 0
    slabs_from_summary: int = 0
    blocks: int = 0
    front_bytes: int = 0
    front_cpu_s: list[float] = field(default_factory=list)
    worker_cpu_s: list[float] = field(default_factory=list)


def start(path: Path, work: Work, blocks: int, found: Starts, *, kill: bool) -> float:
    """Start on the volume, wait for the recovery, and kill or stop; returns the seconds that the stop took."""
    with Service(volumes=[path], open_slabs=8, index_bytes_max=max(4 * MIB, blocks * 160)) as service:
        found.ready_s.append(service.ready_s())
        seconds, told = service.event("volume is recovered")
        found.recovered_s.append(seconds)
        found.front_cpu_s.append(cpu_seconds([service.process.pid]))
        found.worker_cpu_s.append(cpu_seconds(children_of(service.process.pid)))
        found.header_bytes, found.slabs_scanned = told["header_bytes_read"], told["slabs_scanned"]
        found.slabs_from_summary, found.blocks = told["slabs_from_summary"], told["blocks"]
        found.front_bytes = resident_bytes(service.process.pid)
        if found.blocks != blocks:
            raise RuntimeError(f"{found.blocks} of {blocks} blocks were recovered; {told['headers_bad']} bad headers")
        if kill:
            service.kill()
            return 0.0
        return service.stop()


def tell(report: Report, name: str, found: Starts, work: Work, slab_count: int, dirty: int, *, target_s: float | None) -> None:
    """The figures of one kind of start."""
    slots = slot_count_for(work.slab_bytes, slot_bytes_for(work.block_bytes))
    ready, recovered = Summary.of(found.ready_s), Summary.of(found.recovered_s)
    expected_s = START_S + dirty * slots * HEADER_S + slab_count * slots * RECORD_S
    report.add(seconds_figure(f"{name}: ready", ready, expected=START_S, target_s=target_s))
    sketched = "start + dirty slots × header read + slots × record"
    report.add(seconds_figure(f"{name}: recovered", recovered, expected=expected_s, sketch=sketched, target_s=target_s))
    front_cpu, worker_cpu = Summary.of(found.front_cpu_s).median, Summary.of(found.worker_cpu_s).median
    report.add(Figure(f"{name}: CPU of the front (and of its workers {worker_cpu:.2f}) until recovered", front_cpu, "s", detail={"workers_s": worker_cpu}))
    report.add(
        Figure(
            f"{name}: header bytes read",
            found.header_bytes / MIB,
            "MiB",
            dirty * slots * SECTOR_BYTES / MIB,
            "dirty slabs × slots × 4 KiB",
            target=Target(dirty * slots * SECTOR_BYTES / MIB, at_least=False),
            detail={
                "slabs_scanned": found.slabs_scanned,
                "slabs_from_summary": found.slabs_from_summary,
                "summary_mib": found.slabs_from_summary * (summary_bytes_for(slots) + SECTOR_BYTES) / MIB,
                "headers_of_all_slots_mib": slab_count * slots * SECTOR_BYTES / MIB,
            },
        )
    )


def large(report: Report, work: Work, dirty: int) -> None:
    """Killed, killed again, stopped, started."""
    path = report.directory / "large.volume"
    report.say(f"making {work.slab_count} slabs, {dirty} dirty")
    blocks = make_full_volume(path, slab_count=work.slab_count, slab_bytes=work.slab_bytes, block_bytes=work.block_bytes, dirty_count=dirty)
    report.facts["blocks"] = blocks
    report.facts["file_gib_apparent"] = round(path.stat().st_size / (1 << 30), 1)
    report.facts["file_mib_allocated"] = round(path.stat().st_blocks * 512 / MIB, 1)
    crashed, clean = Starts(), Starts()
    try:
        for number in range(work.start_count + 1):
            report.say(f"start {number + 1} after a kill")
            stop_s = start(path, work, blocks, crashed, kill=number < work.start_count)
        for number in range(work.start_count):
            report.say(f"start {number + 1} after an orderly stop")
            start(path, work, blocks, clean, kill=False)
    finally:
        path.unlink()
    name = f"{blocks:,} blocks, {dirty} of {work.slab_count} slabs dirty"
    tell(report, f"{name}, after kill -9", crashed, work, work.slab_count, dirty, target_s=3.0)
    tell(report, f"{name}, after an orderly stop", clean, work, work.slab_count, 0, target_s=3.0)
    report.add(Figure("an orderly stop, summaries written", stop_s * 1e3, "ms"))
    report.add(Figure("resident memory of the front", crashed.front_bytes / MIB, "MiB"))


def small(report: Report, work: Work) -> None:
    """The same number of slabs, ever more of them dirty."""
    path = report.directory / "small.volume"
    base: tuple[int, int] | None = None
    for dirty in work.small_dirty_counts:
        report.say(f"{work.small_slab_count} slabs, {dirty} dirty")
        blocks = make_full_volume(path, slab_count=work.small_slab_count, slab_bytes=work.slab_bytes, block_bytes=work.block_bytes, dirty_count=dirty)
        found = Starts()
        try:
            for _ in range(work.start_count):
                start(path, work, blocks, found, kill=True)
        finally:
            path.unlink()
        name = f"{blocks:,} blocks, {dirty} of {work.small_slab_count} slabs dirty, after kill -9"
        tell(report, name, found, work, work.small_slab_count, dirty, target_s=None)
        base = base or (dirty, found.header_bytes)
        report.add(
            Figure(
                f"{name}: header bytes against the first of these rows, by dirty slab",
                found.header_bytes / dirty / (base[1] / base[0]),
                "×",
                1.0,
                target=Target(1.0, at_least=False),
            )
        )


def main() -> None:
    """Run it."""
    with benchmark("recovery", "How long after kill -9 does a daemon with a million slots serve, and what does it read?") as report:
        work = load_workload(Work, "recovery_1m", tiny=report.tiny)
        for dirty in work.dirty_counts:
            large(report, work, dirty)
        small(report, work)


if __name__ == "__main__":
    main()

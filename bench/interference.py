"""How long does a restore take while others are at work: evicts without end, a session that restores 2 GiB? And a preemption while restores run without end?

In one run over a real daemon, from the volume and from the arena; engines are processes of their own. The states (nothing else, loaded, and loaded with lanes
in the order of arrival, for contrast) take turns in rounds, so that what drifts in the machine hits all of them alike. Figures are medians over the rounds.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.support.contention import ARRIVAL, SCHEDULED, Scene, Work
from bench.support.report import Figure, Report, Target, benchmark
from bench.support.service import Service
from bench.support.stats import Paired, Summary
from bench.support.workload import load_workload
from offloadd.client import Path as Way
from offloadd.scheduler.arbiter import QUIET_NS
from offloadd.tiers.volume_file import format_volume
from offloadd.units import GIB, MIB

QUESTION = "How long does a restore take while evicts or a long restore are under way, and a preemption while restores are?"
#: What the volume's lane leaves evicts of what it restores (`scheduler/job_class.py`): one byte for eight.
EVICT_SHARE = 1 / 8
#: How much worse the order of arrival must be, or the comparison proves nothing.
VISIBLY = 2.0

#: Longer than the scheduler expects another restore after one.
QUIET_S = 1.5 * QUIET_NS / 1e9


@dataclass(slots=True)
class Series:
    """Seconds of the requests of one state, by round."""

    rounds: list[list[float]] = field(default_factory=list)

    def add(self, seconds: list[float]) -> None:
        """One more round."""
        self.rounds.append(seconds)

    @property
    def medians(self) -> list[float]:
        """By round."""
        return [Summary.of(one).median for one in self.rounds]

    @property
    def p99s(self) -> list[float]:
        """By round; of fewer than a hundred requests the slowest."""
        return [Summary.of(one).p99 for one in self.rounds]

    @property
    def all(self) -> Summary:
        """All rounds as one."""
        return Summary.of(seconds for one in self.rounds for seconds in one)


TIERS = {"volume": Way.HOST, "arena": Way.DDR}


@dataclass(slots=True)
class Found:
    """What the rounds measured, by tier and state."""

    restores: dict[tuple[str, str], Series] = field(default_factory=dict)
    #: From the volume beside evicts, when no restore was about for some time.
    first: Series = field(default_factory=Series)
    slices: dict[str, Series] = field(default_factory=dict)
    firsts: dict[tuple[str, str], Series] = field(default_factory=dict)
    ends: dict[tuple[str, str], Series] = field(default_factory=dict)
    longs: dict[tuple[str, str], Series] = field(default_factory=dict)
    copied: dict[str, Series] = field(default_factory=dict)
    durable: dict[str, Series] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)
    evict_rates: list[float] = field(default_factory=list)
    restore_rates: list[float] = field(default_factory=list)


def one_round(scene: Scene, found: Found) -> None:
    """Every state once."""
    for tier, path in TIERS.items():
        found.slices.setdefault(tier, Series()).add([scene.slice(volume=tier == "volume") for _ in range(5)])
        restores = {state: found.restores.setdefault((tier, state), Series()) for state in ("idle", "evicts", "evicts" + ARRIVAL, "long", "long" + ARRIVAL)}
        restores["idle"].add(scene.series(path))
        for order in (SCHEDULED, ARRIVAL):
            with scene.order(order):
                with scene.evicts(volume=tier == "volume"):
                    restores["evicts" + order].add(scene.series(path))
                    if tier == "volume" and order == SCHEDULED:
                        time.sleep(QUIET_S)
                        found.first.add(scene.series(path, requests_max=1))
                with scene.restores(path=path, count=scene.work.long_count, threads=1):
                    restores["long" + order].add(scene.series(path))
                answer, long_s = scene.small_ones_beside_a_long_one(path)
            for name, values in (("firsts", answer["first_s"]), ("ends", answer["seconds"]), ("longs", [long_s])):
                getattr(found, name).setdefault((tier, order), Series()).add(values)
    preemptions(scene, found)
    durable(scene, found)
    share(scene, found)


def durable(scene: Scene, found: Found) -> None:
    """An evict that waits for the volume: when no restore was about for some time, and right after one."""
    for state in ("alone", "after"):
        time.sleep(QUIET_S)
        if state == "after":
            scene.series(Way.HOST, requests_max=1)
        seconds = scene.preempted.ask("stored", count=scene.work.preempted_count, volume=True)["seconds"]
        found.durable.setdefault(state, Series()).add([seconds])


def preemptions(scene: Scene, found: Found) -> None:
    """COPIED alone, and beside restores from each tier, in both orders."""
    for state in ("idle", "volume", "arena", "volume" + ARRIVAL, "arena" + ARRIVAL):
        with ExitStack() as held:
            held.enter_context(scene.order(ARRIVAL if state.endswith(ARRIVAL) else SCHEDULED))
            if state != "idle":
                held.enter_context(scene.restores(path=TIERS[state.removesuffix(ARRIVAL)]))
            seconds = [scene.copied()]
        scene.spilled(scene.work.preempted_count)
        found.copied.setdefault(state, Series()).add(seconds)


def share(scene: Scene, found: Found) -> None:
    """Bytes evicted and restored while both want all that there is of the volume."""
    with scene.restores(path=Way.HOST), scene.evicts(volume=True):
        engines = (scene.writing, scene.long)
        before = [engine.ask("moved")["bytes"] for engine in engines]
        start = time.perf_counter()
        time.sleep(scene.work.share_seconds)
        evicted, restored = (engine.ask("moved")["bytes"] - old for engine, old in zip(engines, before, strict=True))
        seconds = time.perf_counter() - start
    found.shares.append(evicted / max(1, restored))
    found.evict_rates.append(evicted / seconds / 1e9)
    found.restore_rates.append(restored / seconds / 1e9)


# -- telling ---------------------------------------------------------------------------------------------------------------------------


def tell(report: Report, found: Found, work: Work) -> None:
    """All figures."""
    for tier in TIERS:
        tell_restores(report, found, tier, work)
    tell_preemptions(report, found, work)
    shares = Summary.of(found.shares)
    detail = shares.detail() | {"evicted_gb_per_s": Summary.of(found.evict_rates).median, "restored_gb_per_s": Summary.of(found.restore_rates).median}
    report.add(
        Figure(
            "evicts' share beside steady restores from the volume: bytes written a byte restored",
            shares.median,
            "×",
            EVICT_SHARE,
            "the class's share",
            target=Target(0.9 * EVICT_SHARE),
            detail=detail,
        )
    )
    report.facts["restores under scrub"] = "not there yet: there is no scrub"


def _ms(name: str, rounds: list[float], target: Target | None = None, **detail: float | int | str) -> Figure:
    summary = Summary.of(rounds)
    return Figure(name, summary.median * 1e3, "ms", target=target, detail=summary.detail(1e3) | detail)


def tell_restores(report: Report, found: Found, tier: str, work: Work) -> None:
    """Small restores from one tier."""
    idle, slice_s = found.restores[tier, "idle"], found.slices[tier].all.median
    idle_p99 = Summary.of(idle.p99s).median
    limit_ms = (2 * idle_p99 + slice_s) * 1e3
    what = f"restore of {work.small_count} blocks from the {tier}"
    report.add(_ms(f"one slice of evicts to the {tier}, alone", found.slices[tier].medians))
    long_size = f"{work.long_count * work.block_bytes / GIB:.2g} GiB"
    titles = {"idle": "nothing else", "evicts": "evicts without end", "long": f"another session's restores of {long_size}"}
    for state, title in titles.items():
        for order in (SCHEDULED, ARRIVAL) if state != "idle" else (SCHEDULED,):
            series = found.restores[tier, state + order]
            whole = series.all
            told = {"all_p50_ms": whole.median * 1e3, "all_p99_ms": whole.p99 * 1e3, "all_max_ms": whole.maximum * 1e3, "requests": whole.count}
            name = f"{what}, beside {title}{order}"
            report.add(_ms(f"{name}: p50", series.medians))
            target = Target(limit_ms, at_least=False) if state == "evicts" and not order else None
            report.add(_ms(f"{name}: p99", series.p99s, target, **told))
    if tier == "volume":
        name = f"{what}, beside evicts without end, the first one after {QUIET_S:g} s without any"
        report.add(_ms(name, found.first.medians, Target(limit_ms, at_least=False)))
    for state, title in ("evicts", "evicts"), ("long", "long restores"):
        worse = Paired.of(found.restores[tier, state + ARRIVAL].p99s, found.restores[tier, state].p99s)
        # Into the arena preemptions go first in either order.
        target = Target(VISIBLY) if (tier, state) != ("arena", "evicts") else None
        report.add(Figure(f"{what}, beside {title}: p99 by arrival to that with the scheduler", worse.ratio, "×", target=target, detail=worse.detail))
    for order in (SCHEDULED, ARRIVAL):
        firsts, longs = found.firsts[tier, order], found.longs[tier, order]
        slowest = [max(one) for one in firsts.rounds]
        long_s = longs.all.median
        ends = [max(one) for one in found.ends[tier, order].rounds]
        name = f"{work.crowd_size} small restores from the {tier} beside one of {long_size}{order}"
        report.add(_ms(f"{name}: first block of the last of them", slowest, ends_ms=Summary.of(ends).median * 1e3, long_ms=long_s * 1e3))
        part = Paired.of(slowest, [one[0] for one in longs.rounds])
        target = Target(0.5, at_least=False) if not order else None
        report.add(Figure(f"{name}: the same to the time of the long one", part.ratio, "times", target=target, detail=part.detail))


def tell_preemptions(report: Report, found: Found, work: Work) -> None:
    """COPIED."""
    size = f"{work.preempted_count * work.block_bytes // MIB} MiB"
    idle = found.copied["idle"].medians
    report.add(_ms(f"COPIED of {size}, nothing else", idle))
    for state in ("volume", "arena", "volume" + ARRIVAL, "arena" + ARRIVAL):
        name = f"COPIED of {size}, beside restores without end from the {state}"
        report.add(_ms(name, found.copied[state].medians))
        ratio = Paired.of(found.copied[state].medians, idle)
        target = None if state.endswith(ARRIVAL) else Target(1.5, at_least=False)
        report.add(Figure(f"{name}, to the time alone", ratio.ratio, "times", target=target, detail=ratio.detail))
    alone, after = found.durable["alone"].medians, found.durable["after"].medians
    report.add(_ms(f"DURABLE of {size}, no restore before it", alone))
    ratio = Paired.of(after, alone)
    report.add(Figure(f"DURABLE of {size} right after a restore, to the time without one", ratio.ratio, "times", detail=ratio.detail))


def run(report: Report, work: Work, path: Path) -> None:
    """Rounds over one daemon."""
    format_volume(str(path), volume_bytes=work.volume_mib * MIB, slab_bytes=work.slab_mib * MIB)
    found = Found()
    with ExitStack() as held:
        service = held.enter_context(
            Service(
                volumes=[path],
                open_slabs=8,
                index_bytes_max=GIB,
                arena_bytes=work.arena_mib * MIB,
                command=("-m", "bench.support.switched_front"),
            )
        )
        service.ready_s()
        engines = held.enter_context(ExitStack())
        scene = Scene(service, work, engines)
        report.say("filling the tiers")
        scene.prepare()
        for number in range(work.round_count):
            report.say(f"round {number + 1} of {work.round_count}")
            one_round(scene, found)
        scene.crowd.ask("disperse")
        engines.close()
        service.stop()
    tell(report, found, work)


def main() -> None:
    """Run it."""
    with benchmark("interference", QUESTION) as report:
        work = load_workload(Work, "interference", tiny=report.tiny)
        run(report, work, report.directory / "interference.volume")


if __name__ == "__main__":
    main()

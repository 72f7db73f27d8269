"""How much memory does a block take in the index, and does any operation at a million blocks stop the event loop for more than 5 ms?

The catalog alone, in this process: one volume, filled through reservations and publications, with a keeper that answers at once. Every call is timed by
itself. The catalog neither sleeps nor waits, so what it stops the loop for is its CPU time; wall time, which other processes of the machine lengthen, stands
beside it in the record.
"""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bench.support.cpu import resident_bytes
from bench.support.fakes import Keys, add_volume, grant, random_keys
from bench.support.report import Figure, Report, Target, benchmark
from bench.support.stats import Summary
from bench.support.workload import load_workload
from offloadd.catalog.catalog import Catalog
from offloadd.catalog.pool import Pool, Shortage
from offloadd.catalog.warm_up import warm_up
from offloadd.offload.evict import RESERVE_BLOCKS
from offloadd.tiers.format import slot_bytes_for, slot_count_for

PAUSE_S = 5e-3
BYTES_PER_BLOCK_MAX = 150.0
NAMESPACE = 1
HOLDER = 7

Rows = npt.NDArray[np.uint32]


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`batch_counts`: blocks of one request; `call_count`: calls of each kind with each of them."""

    name: str
    block_count: int
    block_bytes: int
    slab_bytes: int
    open_slabs: int
    batch_counts: list[int]
    call_count: int


@dataclass(slots=True)
class Series:
    """Seconds of calls of one kind."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)


class Scale:
    """A full catalog, and the clock around each call on it."""

    def __init__(self, report: Report, work: Work) -> None:
        self.report = report
        self.work = work
        self.slot_bytes = slot_bytes_for(work.block_bytes)
        self.slots_per_slab = slot_count_for(work.slab_bytes, self.slot_bytes)
        self.slab_count = -(-work.block_count // self.slots_per_slab)
        self.block_count = self.slab_count * self.slots_per_slab
        start = time.perf_counter()
        self.catalog = Catalog(capacity=self.block_count + 8192)
        self.construction_s = time.perf_counter() - start
        self.pool: Pool = add_volume(self.catalog, slab_count=self.slab_count, slab_bytes=work.slab_bytes, open_slabs=work.open_slabs)
        self.random = np.random.default_rng(5)
        self._seeds = 0
        #: The same small computation again and again: what its longest run takes beyond its median is the machine's doing, not the catalog's.
        self.noise = Series()
        self._reference = self.random.integers(0, 1 << 63, 16384, dtype=np.uint64)
        self._calls = 0

    # -- timing ----------------------------------------------------------------------------------------------------------------------

    def timed(self, series: Series, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call, and append its seconds."""
        start, start_cpu = time.perf_counter(), time.thread_time()
        result = call(*arguments)
        series.cpu_s.append(time.thread_time() - start_cpu)
        series.wall_s.append(time.perf_counter() - start)
        if series is not self.noise:
            self._calls += 1
            if self._calls % 4 == 0:
                self.timed(self.noise, np.sort, self._reference)
        return result

    def tell(self, name: str, series: Series) -> None:
        """One figure: the longest call in ms of CPU, with median and p99 beside it."""
        summary = Summary.of(series.cpu_s)
        self.report.add(
            Figure(
                f"{name} (median {summary.median * 1e3:.3f}, p99 {summary.p99 * 1e3:.3f})",
                summary.maximum * 1e3,
                "ms max",
                target=Target(PAUSE_S * 1e3, at_least=False),
                detail=summary.detail(1e3, "cpu_ms_") | Summary.of(series.wall_s).detail(1e3, "wall_ms_"),
            )
        )

    # -- work ------------------------------------------------------------------------------------------------------------------------

    def new_keys(self, count: int) -> Keys:
        """Keys that were never seen."""
        self._seeds += 1
        return random_keys(count, 1000 + self._seeds)

    def some_rows(self, count: int) -> Rows:
        """Live rows of neighbouring blocks, as requests name them."""
        live = self.live_rows()
        first = int(self.random.integers(0, len(live) - count))
        return live[first : first + count]

    def live_rows(self) -> Rows:
        """All rows that hold a block, by row."""
        return self.catalog.rows_of_namespace(NAMESPACE)

    def store(self, count: int, reserve_s: Series, publish_s: Series) -> int:
        """Evict `count` new blocks as the front does, RESERVE_BLOCKS at a time; returns how many got a slot."""
        stored = 0
        keys = self.new_keys(count)
        while stored < count:
            reservation = self.timed(reserve_s, self.catalog.reserve_volume, 0, self.slot_bytes, min(RESERVE_BLOCKS, count - stored))
            taken = len(reservation)
            mine = keys[stored : stored + taken]
            if taken:
                self.timed(publish_s, self._publish, mine, reservation)
                stored += taken
            grant(self.pool)
            if reservation.shortage == Shortage.FULL:
                break
        return stored

    def _publish(self, keys: Keys, reservation: Any) -> None:
        self.catalog.publish_volume(
            0, keys, reservation.slabs, reservation.slots, payload_bytes=self.work.block_bytes, namespace=NAMESPACE, keep=False, durable=True
        )

    def fill(self) -> None:
        """A million blocks, request by request."""
        before = resident_bytes(_pid())
        reserve_s = Series()
        publish_s = Series()
        while self.catalog.block_count < self.block_count:
            self.store(min(512, self.block_count - self.catalog.block_count), reserve_s, publish_s)
        blocks = self.catalog.block_count
        per_block = self.catalog.bytes_per_block() + self.pool.bytes_allocated / self.block_count
        self.report.facts["blocks"] = blocks
        self.report.facts["slabs"] = self.slab_count
        self.report.add(
            Figure(
                "memory a block, index and pool's arrays",
                per_block,
                "B",
                expected=128.0,
                sketch="32 key + 12 × 2 table + 4 free + columns 37 + pool 8",
                target=Target(BYTES_PER_BLOCK_MAX, at_least=False),
                detail={"index": self.catalog.bytes_per_block(), "pool": self.pool.bytes_allocated / self.block_count},
            )
        )
        self.report.add(Figure("resident memory that filling added, a block", max(0, resident_bytes(_pid()) - before) / blocks, "B"))
        self.tell("reserve 512 free slots while filling", reserve_s)
        self.tell("publish (insert) 512 while filling", publish_s)
        self.report.add(Figure("making the empty index", self.construction_s * 1e3, "ms", sketch="before serving"))


def _pid() -> int:
    return os.getpid()


def reads(scale: Scale, count: int) -> None:
    """Lookup, plan and unpin, touch."""
    catalog = scale.catalog
    names = ("lookup, all held", "lookup, none held", "plan_restore (lookup and pin)", "unpin", "touch", "describe")
    series = {name: Series() for name in names}
    live = scale.live_rows()
    for _ in range(scale.work.call_count):
        first = int(scale.random.integers(0, len(live) - count))
        rows = live[first : first + count]
        keys = catalog.index.keys_of(rows)
        strangers = scale.new_keys(count)
        scale.timed(series[names[0]], catalog.lookup, keys)
        scale.timed(series[names[1]], catalog.lookup, strangers)
        sources = scale.timed(series[names[2]], catalog.plan_restore, keys)
        scale.timed(series[names[3]], catalog.unpin, sources.rows)
        scale.timed(series[names[4]], catalog.touch, rows)
        scale.timed(series[names[5]], catalog.describe, rows)
    for name in names:
        scale.tell(f"{name}, {count} blocks", series[name])


def victims(scale: Scale, count: int) -> None:
    """Reservations on a full volume, where each takes victims: nothing kept."""
    reserve_s = Series()
    publish_s = Series()
    for _ in range(scale.work.call_count):
        if scale.store(count, reserve_s, publish_s) != count:
            raise RuntimeError("a volume with nothing kept has no room")
    scale.tell(f"reserve on a full volume (victims), {count} blocks, {RESERVE_BLOCKS} at a time", reserve_s)
    scale.tell(f"publish on a full volume, {count} blocks", publish_s)


def drops(scale: Scale, count: int) -> None:
    """Delete blocks, then fill the gaps again."""
    drop_s = Series()
    refill = Series()
    for _ in range(max(1, scale.work.call_count // 4)):
        rows = scale.some_rows(count)
        scale.timed(drop_s, scale.catalog.drop, rows)
        scale.store(count, refill, refill)
    scale.tell(f"drop (delete), {count} blocks", drop_s)


def worst_cases(scale: Scale) -> None:
    """What happens seldom, once each, from the mildest to the end of everything."""
    catalog, pool, holds = scale.catalog, scale.pool, scale.catalog.holds
    live = scale.live_rows()
    half = live[::2]
    one: dict[str, Series] = {}

    def once(name: str, call: Callable[[], Any]) -> Any:
        series = one.setdefault(name, Series())
        result = scale.timed(series, call)
        scale.tell(name, series)
        return result

    batch = live[:4096]
    once("hold 4,096 blocks", lambda: holds.hold(HOLDER, batch, 1e9))
    once("release 4,096 blocks", lambda: holds.release(HOLDER, batch))
    holds.hold(HOLDER, batch, 1e9)
    once("drop 4,096 held blocks (holds.forget), 1 holder", lambda: catalog.drop(batch))
    scale.store(len(batch), Series(), Series())
    for first in range(0, len(half), 4096):
        holds.hold(HOLDER, half[first : first + 4096], 100.0)
    live = scale.live_rows()
    catalog.touch(live)
    seconds = Series()
    scale.store(512, seconds, Series())
    scale.tell(f"reserve 512, {RESERVE_BLOCKS} at a time, with every other block kept and all used since the hand passed", seconds)
    expiries = Series()
    while scale.timed(expiries, holds.expire, 200.0):
        pass
    scale.tell("expire, every other block's hold at one moment", expiries)
    before = resident_bytes(os.getpid())
    stored = 1
    seconds = Series()
    # Free slots are used up first; what is stored is kept as well.
    while stored:
        rest = scale.live_rows()
        for first in range(0, len(rest), 4096):
            holds.hold(HOLDER, rest[first : first + 4096], 1e9)
        seconds = Series()
        stored = scale.store(512, seconds, Series())
    scale.report.add(Figure("memory that a hold adds", max(0, resident_bytes(os.getpid()) - before) / max(1, len(scale.live_rows())), "B"))
    scale.tell("reserve 512 with every block kept (answer: full)", seconds)
    seconds = Series()
    reservation = scale.timed(seconds, catalog.reserve_volume, 0, scale.slot_bytes * 2, 512)
    assert len(reservation) == 0
    scale.tell("reserve 512 of another slot size with every block kept", seconds)
    seconds = Series()
    while scale.timed(seconds, holds.release_all, HOLDER):
        continue
    scale.tell("a portion of release_all of every block's hold", seconds)
    reservation = once("reserve 512 of another slot size (re-cut of the coldest slab)", lambda: catalog.reserve_volume(0, scale.slot_bytes * 2, 512))
    grant(pool)
    once("rows_of_namespace, all of one", lambda: catalog.rows_of_namespace(NAMESPACE))
    once("arena_only (drain)", lambda: catalog.arena_only(held=True))
    once("open_slabs", pool.open_slabs)
    once("next_to_close", pool.next_to_close)
    once("drop_volume, a first part of a volume that is gone", lambda: catalog.drop_volume(0))


def main() -> None:
    """Run it."""
    with benchmark("index_scale", "What does a block take in the index, and what stops the event loop at a million of them?") as report:
        work = load_workload(Work, "index_1m", tiny=report.tiny)
        # As the daemon does when it starts: NumPy's first calls, and a full collection over all modules would be charged to whichever call it happens in.
        warm_up()
        gc.collect()
        gc.freeze()
        scale = Scale(report, work)
        report.say(f"filling {scale.block_count:,} blocks in {scale.slab_count} slabs")
        scale.fill()
        for count in work.batch_counts:
            report.say(f"{work.call_count} calls of each kind with {count} blocks")
            reads(scale, count)
            victims(scale, count)
            drops(scale, count)
        report.say("worst cases")
        worst_cases(scale)
        noise = Summary.of(scale.noise.cpu_s)
        scale.report.add(
            Figure(
                f"for comparison, one fixed NumPy sort (median {noise.median * 1e3:.3f}, p99 {noise.p99 * 1e3:.3f}, {noise.count:,} calls)",
                noise.maximum * 1e3,
                "ms max",
                detail=noise.detail(1e3, "cpu_ms_") | Summary.of(scale.noise.wall_s).detail(1e3, "wall_ms_"),
            )
        )
        if report.tiny:
            scale.catalog.check()


if __name__ == "__main__":
    main()

"""A daemon and engines that stand in each other's way: each a process of its own, commanded one by one."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from bench.support.client import Answer, ClientProcess
from bench.support.service import Service
from bench.support.switched_front import FIFO
from offloadd.client import AdminClient
from offloadd.client import Path as Way
from offloadd.units import MIB

TIMEOUT_S = 120.0

#: The orders in which lanes send, as they end the names of figures.
SCHEDULED, ARRIVAL = "", " by arrival"


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts are blocks. `small`: a timed restore; `long`: the one of another session; `load`: a request of a load; `preempted`: an evict of COPIED; `slice`:
    about as long as one. A series ends after `seconds` or `requests_max`, `pause_s` between two; a load runs `lead_s` before anything is measured."""

    name: str
    block_bytes: int
    small_count: int
    small_stored_count: int
    long_count: int
    load_count: int
    load_threads: int
    preempted_count: int
    crowd_size: int
    slice_count: int
    volume_mib: int
    slab_mib: int
    arena_mib: int
    round_count: int
    seconds: float
    requests_max: int
    pause_s: float
    lead_s: float
    share_seconds: float


class Scene:
    """The daemon and its engines: `small`, whose restores are timed, `long`, which has kept the blocks and restores many, `writing`, `preempted`, `crowd`."""

    def __init__(self, service: Service, work: Work, held: ExitStack) -> None:
        self.service = service
        self.work = work
        self.admin = held.enter_context(AdminClient(service.runtime_dir, timeout_s=TIMEOUT_S))
        self.small, self.long, self.writing, self.preempted, self.crowd = (
            held.enter_context(ClientProcess(service.runtime_dir, name, module="bench.support.contender"))
            for name in ("small", "long", "writing", "preempted", "crowd")
        )
        self.copied_count = 0
        self._seeds = iter(range(1 << 30))
        self._wait(lambda: all(volume.state == "serving" for volume in self.admin.volumes()), "the volume")

    def _counter(self, name: str) -> int:
        return next((counter.value for counter in self.admin.status().counters if counter.name == name), 0)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"{what} did not come within {TIMEOUT_S:g} s: {self.service.log()[-20:]}")
            time.sleep(0.005)

    def prepare(self) -> None:
        """Register, keep the blocks that are restored in both tiers, and fill what room there is: from then on evicts take the place of older ones."""
        work = self.work
        counts = {
            self.small: work.small_stored_count,
            self.long: work.long_count,
            self.writing: work.load_threads * work.load_count,
            self.preempted: work.preempted_count,
        }
        for engine, count in counts.items():
            engine.ask("register", block_bytes=work.block_bytes, block_count=count, fill=False)
        for volume, room_mib in ((True, work.volume_mib), (False, work.arena_mib)):
            self.long.ask("keep", count=work.long_count, volume=volume)
            self._fill(volume=volume, room_bytes=room_mib * MIB)
        self.crowd.ask("gather_crowd", size=work.crowd_size, block_bytes=work.block_bytes, count=work.small_count)
        # The mover's first copy to a page maps it.
        self.small.ask("begin_restores", threads=1, count=work.small_stored_count, stored_count=work.small_stored_count, path=int(Way.DDR))
        self.small.ask("end")
        self.crowd.ask("crowd", count=work.small_count, path=int(Way.DDR), name=0)
        self.copied()
        self.spilled(work.preempted_count)

    def _fill(self, *, volume: bool, room_bytes: int) -> None:
        self.writing.ask("begin_evicts", threads=self.work.load_threads, count=self.work.load_count, volume=volume)
        self._wait(lambda: self.writing.ask("moved")["bytes"] >= room_bytes, "a full tier")
        self.writing.ask("end")

    @contextmanager
    def order(self, name: str) -> Iterator[None]:
        """The order in which lanes send inside: SCHEDULED or ARRIVAL."""
        self._switch(fifo=name == ARRIVAL)
        try:
            yield
        finally:
            self._switch(fifo=False)

    def _switch(self, *, fifo: bool) -> None:
        if self._counter(FIFO) != int(fifo):
            self.service.process.send_signal(signal.SIGUSR2 if fifo else signal.SIGUSR1)
            self._wait(lambda: self._counter(FIFO) == int(fifo), "the change of order")

    @contextmanager
    def evicts(self, *, volume: bool) -> Iterator[None]:
        """Evicts without end."""
        self.writing.ask("begin_evicts", threads=self.work.load_threads, count=self.work.load_count, volume=volume)
        with self._loaded(self.writing):
            yield

    @contextmanager
    def restores(self, *, path: Way, count: int = 0, threads: int = 0) -> Iterator[None]:
        """Restores without end by another session: `count` blocks a request (default: a load's), so many at a time."""
        count, threads = count or self.work.load_count, threads or self.work.load_threads
        self.long.ask("begin_restores", threads=threads, count=count, stored_count=self.work.long_count, path=int(path))
        with self._loaded(self.long):
            yield

    @contextmanager
    def _loaded(self, engine: ClientProcess) -> Iterator[None]:
        time.sleep(self.work.lead_s)
        try:
            yield
        finally:
            engine.ask("end")

    def series(self, path: Way, requests_max: int = 0) -> list[float]:
        """Seconds of small restores, one after the other with pauses."""
        work = self.work
        answer = self.small.ask(
            "series",
            seconds=work.seconds,
            requests_max=requests_max or work.requests_max,
            count=work.small_count,
            stored_count=work.small_stored_count,
            path=int(path),
            pause_s=0.0 if requests_max else work.pause_s,
            seed=next(self._seeds),
        )
        seconds: list[float] = answer["seconds"]
        return seconds

    def slice(self, *, volume: bool) -> float:
        """Seconds of an evict as long as a slice, with nothing beside it, as the daemon tells."""
        total_s: float = self.writing.ask("stored", count=self.work.slice_count, volume=volume)["total_s"]
        self.spilled(0 if volume else self.work.slice_count)
        return total_s

    def copied(self) -> float:
        """Seconds until a preemption is COPIED."""
        seconds: float = self.preempted.ask("stored", count=self.work.preempted_count, volume=False)["seconds"]
        return seconds

    def spilled(self, count: int) -> None:
        """Wait until what was copied into the arena, `count` blocks more than before, lies on the volume: it takes room in the arena until then."""
        self.copied_count += count
        self._wait(lambda: self._counter("spilled_blocks") + self._counter("spill_blocks_failed") >= self.copied_count, "the spills")

    def small_ones_beside_a_long_one(self, path: Way) -> tuple[Answer, float]:
        """Ten engines restore at once when a long restore has just begun: what came of them, and the seconds of the long one."""
        self.long.ask("begin_long", count=self.work.long_count, path=int(path))
        answer = self.crowd.ask("crowd", count=self.work.small_count, path=int(path), name=0)
        return answer, self.long.ask("end_long")["seconds"]

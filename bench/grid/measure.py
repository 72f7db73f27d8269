"""One case measured: verified bytes, latencies beside the ceiling in turn, CPU and memory traffic, and the ways that bytes really went."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.grid.bounds import Ceiling, bound_of, seconds_of
from bench.grid.ceilings import NoCeiling
from bench.grid.counters import TrafficCounter
from bench.grid.node import Engines, Node, Skip
from bench.support.rows import Case, Operation, Row, quantiles_of
from bench.support.stats import Paired
from offloadd.tiers.format import slot_bytes_for
from offloadd.units import GIB, MIB, format_bytes

#: Short requests are repeated within a round until it moves so much, so that the tail of single blocks is seen.
ROUND_BYTES = 64 * MIB
REQUESTS_PER_PLACE_MAX = 16
#: Volumes up to this size are filled before anything is measured.
FILL_BYTES_MAX = 64 * GIB


@dataclass(slots=True)
class _Rounds:
    """What the rounds of a case showed. `walls`: seconds of all requests of a round, those of all engines together."""

    walls: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0


def requests_per_round(case: Case) -> int:
    """Requests of one engine in one round: as many at each place in flight."""
    return case.queue_depth * max(1, min(REQUESTS_PER_PLACE_MAX, ROUND_BYTES // (case.payload_bytes * case.queue_depth)))


class Measurement:
    """Measures the cases of one region. `counter` None: nothing counts memory traffic here, and `counter_note` says why."""

    def __init__(self, node: Node, engines: Engines, *, rounds: int, counter: TrafficCounter | None, counter_note: str) -> None:
        self._node = node
        self._engines = engines
        self._rounds = rounds
        self._counter = counter
        self._counter_note = counter_note

    def row(self, case: Case) -> Row:
        """Run the case. A row says why it was not run where the daemon refused. Raises RuntimeError for a wrong byte."""
        try:
            self._prepare(case)
            with ExitStack() as stack:
                ceiling, why_none = None, ""
                try:
                    ceiling = stack.enter_context(bound_of(case, self._node.volumes, self._engines))
                    # Once before it counts: memory is there then, and files are open.
                    seconds_of(ceiling, requests_per_round(case))
                except (NoCeiling, OSError) as error:
                    ceiling, why_none = None, f"none: {error}"
                found = self._measure(case, ceiling)
                memory_bytes, memory_note = self._traffic(case)
                self._verify(case)
        except (Skip, NoCeiling) as reason:
            return Row(case, skipped=str(reason))
        return self._told(case, found, ceiling, why_none, memory_bytes, memory_note)

    def fill(self, case: Case) -> str:
        """Evict by this case's path until every slab was written once. What was done, for the facts.

        The first write of a slab costs an evict a second one, and raw reads of what was never written are none of the device's: file systems answer with zeros.

        Volumes above FILL_BYTES_MAX are left as they are: that would take longer than the measurements, and is what their first evicts meet anyway.
        """
        volumes = self._node.volumes
        largest = max(volume.geometry.volume_bytes for volume in volumes)
        if largest > FILL_BYTES_MAX:
            return f"no: one has {format_bytes(largest)}, and {format_bytes(FILL_BYTES_MAX)} is the most; evicts include first writes of slabs"
        slots = sum(volume.slots(slot_bytes_for(case.block_bytes)) for volume in volumes)
        per_place = -(-slots // (case.block_count * case.queue_depth * len(self._engines.processes)))
        self._engines.all(
            "run", operation=Operation.EVICT, path=case.path, count=case.block_count, depth=case.queue_depth, request_count=per_place * case.queue_depth
        )
        return "once before anything was measured"

    def _prepare(self, case: Case) -> None:
        """Blocks to restore are stored, and one round has been run: slabs are cut, pages are there, connections open."""
        if case.operation is Operation.RESTORE:
            self._engines.all("store", path=case.path, count=case.block_count, depth=case.queue_depth)
        self._run(case)

    def _run(self, case: Case) -> list[dict[str, Any]]:
        return self._engines.all(
            "run", operation=case.operation, path=case.path, count=case.block_count, depth=case.queue_depth, request_count=requests_per_round(case)
        )

    def _verify(self, case: Case) -> None:
        for answer in self._engines.all("verify", operation=case.operation, path=case.path, count=case.block_count, depth=case.queue_depth):
            if answer["wrong"]:
                raise RuntimeError(f"{case.name}: {answer['wrong']} of {answer['blocks']} blocks came back with wrong bytes")

    def _measure(self, case: Case, ceiling: Ceiling | None) -> _Rounds:
        found = _Rounds()
        for _ in range(self._rounds):
            if ceiling is not None:
                found.ceilings.append(seconds_of(ceiling, requests_per_round(case)))
            before = self._node.cpu_s()
            answers = self._run(case)
            found.cpu_s += self._node.cpu_s() - before
            found.walls.append(max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers))
            for answer in answers:
                found.seconds += answer["seconds"]
                for name, values in answer["stages"].items():
                    found.stages.setdefault(name, []).extend(values)
                for way, size_bytes in answer["ways"].items():
                    found.ways[way] = found.ways.get(way, 0) + size_bytes
        return found

    def _traffic(self, case: Case) -> tuple[float | None, str]:
        """Of a round of its own, since counting costs time; bytes of memory traffic a payload byte."""
        if self._counter is None:
            return None, self._counter_note
        with self._counter.counting() as traffic:
            self._run(case)
        if traffic.size_bytes is None:
            return None, traffic.fault
        return traffic.size_bytes / _round_bytes(case), self._counter.note

    def _told(self, case: Case, found: _Rounds, ceiling: Ceiling | None, why_none: str, memory_bytes: float | None, memory_note: str) -> Row:
        size_bytes = _round_bytes(case)
        moved = sum(found.ways.values()) or 1
        pairs = None if ceiling is None else Paired.of(found.ceilings, found.walls)
        return Row(
            case,
            proven={way: size / moved for way, size in sorted(found.ways.items())},
            request_count=len(found.seconds),
            seconds=quantiles_of(found.seconds),
            gb_per_s=size_bytes * len(found.walls) / sum(found.walls) / 1e9,
            cpu_s_per_gb=found.cpu_s / (size_bytes * len(found.walls) / 1e9),
            memory_bytes_per_byte=memory_bytes,
            memory_note=memory_note,
            stages=dict(_medians(found.stages)),
            ceiling=why_none if ceiling is None else ceiling.name,
            ceiling_gb_per_s=None if ceiling is None else size_bytes / float(np.median(found.ceilings)) / 1e9,
            ratio=None if pairs is None else pairs.ratio,
            ratio_spread=None if pairs is None else pairs.spread,
        )


def _round_bytes(case: Case) -> int:
    """Payload of one round of all engines."""
    return case.payload_bytes * requests_per_round(case) * max(1, case.gpu_count)


def _medians(stages: dict[str, list[float]]) -> Iterator[tuple[str, float]]:
    for name, values in stages.items():
        yield name, float(np.median(values))

"""The daemon's metrics: counts, times and gauges with label values from closed sets."""

from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from offloadd.model.enums import EvictStatus, Path, Reason, RestoreStatus, Tier, Way
from offloadd.scheduler.job_class import JobClass

# The library would add a line to each counter and histogram that says when it was made: when the daemon started.
disable_created_metrics()  # type: ignore[no-untyped-call]


def label(member: IntEnum) -> str:
    """The label value of an enum member: `Tier.ARENA` as `arena`."""
    return member.name.lower()


OPERATIONS: Final = ("evict", "restore", "spill", "prefetch")
#: Where the time of a move goes. `total`: from its making to its last result; `queue`: the longest wait of a slice; the others add up what all threads spent.
STAGES: Final = ("queue", "copy", "checksum", "io", "total")
#: Requests on a volume by size: what they show is the cost by the call, or by the byte.
SIZES: Final = ("small", "large")
#: I/Os of a volume or the arena.
DIRECTIONS: Final = ("read", "write")
#: In place of a tier or a path: a request that moved nothing, and one that took more than one.
NONE: Final = "none"
SEVERAL: Final = "several"
#: Where a volume's path would stand, for the lanes of the arena.
ARENA: Final = "arena"

CLASSES: Final = tuple(label(job_class) for job_class in JobClass)
TIERS: Final = tuple(label(tier) for tier in Tier)
PATHS: Final = tuple(label(path) for path in Path)
WAYS: Final = tuple(label(way) for way in Way)
REASONS: Final = (NONE, *(label(reason) for reason in Reason if reason is not Reason.NONE))
OUTCOMES: Final = tuple(sorted({label(status) for status in (*EvictStatus, *RestoreStatus) if status}))
#: Why a spill was given up.
SPILL_REASONS: Final = REASONS[1:]
#: Why spans did not reach the collector.
SPAN_LOSSES: Final = ("rate", "queue", "export")

#: 50 µs (one block from the arena takes 0.2 ms) to 60 s (twice the default deadline), about two buckets for a doubling of what a person would notice.
BUCKETS_S: Final = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

#: Outcomes with the reasons that they may have, most of all: series that exist from the start read as zero, not as absent, in an alert.
_MISSES: Final = (
    ("not_found", NONE),
    ("data_loss", "header_mismatch"),
    ("data_loss", "checksum_mismatch"),
    ("data_loss", "short_io"),
    *(("failed", reason) for reason in ("io_error", "worker_lost", "deadline", "cancelled", "target_mismatch", "volume_down")),
    ("quarantined", "deadline"),
    ("quarantined", "cancelled"),
)
_NOT_STORED: Final = (
    *(("rejected", reason) for reason in ("tier_full", "no_tier", "too_large", "deadline", "cancelled", "volume_down", "write_budget", "io_error")),
    *(("failed", reason) for reason in ("io_error", "worker_lost", "deadline", "cancelled", "volume_down", "tier_full")),
    ("quarantined", "deadline"),
    ("quarantined", "cancelled"),
)


class Metrics:
    """All series of one daemon, in a registry of their own. Belongs to the event-loop thread; the endpoint may read at any time.

    Label values come from the sets above, from the volumes and GPUs of the configuration, the names of the workers, the numbers of the NUMA nodes and the names
    of our rpcs: a value that a client could choose would let it fill the memory. `check_labels` holds that in tests.
    """

    def __init__(
        self,
        *,
        volumes: Sequence[str] = (),
        workers: Sequence[str] = (),
        gpus: Sequence[str] = (),
        nodes: Sequence[int] = (),
        methods: Sequence[str] = (),
        codes: Sequence[str] = (),
    ) -> None:
        self._labels: dict[str, frozenset[str]] = {
            "operation": frozenset(OPERATIONS),
            "class": frozenset(CLASSES),
            "stage": frozenset(STAGES),
            "tier": frozenset((*TIERS, NONE, SEVERAL)),
            "path": frozenset((*PATHS, NONE, SEVERAL)),
            "way": frozenset(WAYS),
            "outcome": frozenset((*OUTCOMES, "held", "missing")),
            "reason": frozenset((*REASONS, *SPAN_LOSSES)),
            "direction": frozenset(DIRECTIONS),
            "volume": frozenset((*volumes, ARENA)),
            "worker": frozenset(workers),
            "gpu": frozenset(gpus),
            "node": frozenset(map(str, nodes)),
            "size": frozenset(SIZES),
            "method": frozenset(methods),
            "code": frozenset(codes),
        }
        self.registry = CollectorRegistry()
        self._counters: list[Counter] = []
        self._shown: Tally[tuple[str, ...]] = Tally()
        self._make_request_metrics()
        self._make_queue_metrics()
        self._make_tier_metrics()
        self._make_process_metrics()
        for outcome, reason in _MISSES:
            self.misses.labels(outcome, reason)
        for outcome, reason in _NOT_STORED:
            self.not_stored.labels(outcome, reason)
        for outcome in ("held", "missing"):
            self.lookup_blocks.labels(outcome)
        for reason in SPILL_REASONS:
            self.spill_blocks_failed.labels(reason)
        for worker in workers:
            self.workers_restarted.labels(worker)
        for reason in SPAN_LOSSES:
            self.spans_lost.labels(reason)

    def _make_request_metrics(self) -> None:
        self.request_seconds = self._histogram("request", "Time from an evict or restore to its answer.", "operation", "class", "tier", "path", "outcome")
        self.stage_seconds = self._histogram(
            "stage", "Time of a move of a request, or of a copy between the tiers, by stage.", "operation", "class", "tier", "path", "outcome", "stage"
        )
        self.lookup_seconds = self._histogram("lookup", "Time of a lookup in the index.")
        self.blocks = self._counter("blocks", "Blocks answered.", "operation", "outcome", "tier")
        self.bytes = self._counter("bytes", "Payload bytes moved.", "operation", "tier", "path", "way")
        self.misses = self._counter("misses", "Blocks of restores that gave no bytes.", "outcome", "reason")
        self.not_stored = self._counter("not_stored", "Blocks of evicts that were not stored when they were answered.", "outcome", "reason")
        self.lookup_blocks = self._counter("lookup_blocks", "Blocks that lookups asked for.", "outcome")
        self.evict_blocks_failed = self._counter("evict_blocks_failed", "Blocks whose evict failed, those among them that had been answered COPIED.")
        self.spill_blocks_failed = self._counter("spill_blocks_failed", "Blocks of the arena whose copying to a volume was given up.", "reason")
        self.copies_lost = self._counter("copies_lost", "Stored copies that did not pass verification, and were dropped.")
        self.second_tries = self._counter("second_tries", "Blocks that were restored from the other tier since their first copy was bad.")
        self.moves_quarantined = self._counter("moves_quarantined", "Moves that were answered before it was proven that they touch no engine memory any more.")
        self.calls = self._counter("calls", "Calls of our services that ended, but for those that live as long as their session.", "method", "code")

    def _make_queue_metrics(self) -> None:
        self.queue_tickets = self._gauge("queue_tickets", "Tickets (blocks of one request on one lane) of which something waits.", "volume", "class")
        self.queue_bytes = self._gauge("queue_bytes", "Bytes that wait to be sent to a mover.", "volume", "class")
        self.in_flight_jobs = self._gauge("in_flight_jobs", "Jobs that movers have.", "volume", "class")
        self.in_flight_bytes = self._gauge("in_flight_bytes", "Bytes of jobs that movers have and that do not wait for their engine.", "volume", "class")
        self.requests = self._gauge("requests", "Evicts and restores in flight.")

    def _make_tier_metrics(self) -> None:
        self.io_bytes = self._counter("io_bytes", "Bytes that slices moved at a volume or the arena, headers and padding among them.", "volume", "direction")
        self.arena_used_bytes = self._gauge("arena_used_bytes", "Bytes in arena slots that hold blocks.")
        self.arena_blocks = self._gauge("arena_blocks", "Blocks in the arena.")
        self.arena_node_used_bytes = self._gauge(
            "arena_node_used_bytes", "Bytes in arena slots that hold blocks, by NUMA node where there are several.", "node"
        )
        self.arena_remote_blocks = self._counter(
            "arena_remote_blocks", "Blocks copied between a GPU and a part of the arena on another NUMA node than its own.", "operation"
        )
        self.volume_used_bytes = self._gauge("volume_used_bytes", "Bytes in slots of the volume that hold blocks.", "volume")
        self.volume_blocks = self._gauge("volume_blocks", "Blocks on the volume.", "volume")
        self.volume_breaker = self._gauge(
            "volume_breaker", "Whether a volume gets such operations: 0 yes, 1 on trial, 2 no, since it hangs or fails.", "volume", "operation"
        )
        self.breaker_opened = self._counter("volume_breaker_opened", "Times that a volume was turned off for an operation.", "volume", "operation")
        self.volume_late_jobs = self._gauge("volume_late_jobs", "Jobs sent to the volume that are past their deadlines, or stand still.", "volume")
        route = ("gpu", "volume", "path", "operation", "size")
        self.route_bytes_per_second = self._gauge("route_bytes_per_second", "Measured between a GPU and a volume; 0 while it was not.", *route)
        self.route_auto = self._gauge("route_auto", "1 for the path that AUTO takes between a GPU and a volume, else 0.", *route)
        self.index_blocks = self._gauge("index_blocks", "Blocks in the index.")
        self.index_blocks_max = self._gauge("index_blocks_max", "Most blocks that the index takes.")

    def _make_process_metrics(self) -> None:
        self.sessions = self._gauge("sessions", "Live sessions.")
        self.regions = self._gauge("regions", "Registered regions.")
        self.workers_restarted = self._counter("workers_restarted", "Workers that died and were started again.", "worker")
        self.gpu_usable = self._gauge("gpu_usable", "1 if the GPU can be used, else 0.", "gpu")
        self.gpu_context_bytes = self._gauge("gpu_context_bytes", "Memory of the GPU that the context of its mover took; 0 if not known.", "gpu")
        self.loop_lag_seconds = self._gauge("loop_lag_seconds", "How late the event loop came to its latest look at the gauges.")
        self.faults = self._counter("faults", "Faults of ours, each in the log with its traceback.")
        self.spans_sent = self._counter("spans_sent", "Spans that the collector took.")
        self.spans_lost = self._counter("spans_lost", "Spans that did not reach the collector.", "reason")
        self.limits = self._gauge("limit", "Configured limits, by the name of their key.", "limit")

    def show_limits(self, limits: Mapping[str, float]) -> None:
        """Show the configured limits: (name of the key, value)."""
        self._labels["limit"] = frozenset(limits)
        for name, value in limits.items():
            self.limits.labels(limit=name).set(value)

    def show_count(self, counter: Counter, count: int, *labels: str) -> None:
        """Show a count that the daemon keeps itself: all that there have been so far. What was shown before is not counted again."""
        name = (counter._name, *labels)
        grown, self._shown[name] = count - self._shown[name], count
        (counter.labels(*labels) if labels else counter).inc(grown)

    def show_breaker(self, volume: str, operation: str, *, state: int, opened_count: int) -> None:
        """Show a breaker of a volume: 0 closed, 1 half-open, 2 open; and how often it has opened."""
        self.volume_breaker.labels(volume=volume, operation=operation).set(state)
        self.show_count(self.breaker_opened, opened_count, volume, operation)

    def counter_values(self) -> list[tuple[str, int]]:
        """Every counter that is not zero, as (`name{label="value",…}`, value), for the status."""
        values = []
        for counter in self._counters:
            for sample in (sample for metric in counter.collect() for sample in metric.samples):
                if sample.name.endswith("_total") and sample.value:
                    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                    values.append((f"{sample.name}{{{labels}}}" if labels else sample.name, int(sample.value)))
        return values

    def check_labels(self) -> None:
        """Assert that every label value comes from its closed set."""
        for metric in self.registry.collect():
            for sample in metric.samples:
                for name, value in sample.labels.items():
                    assert name == "le" or value in self._labels[name], f"{sample.name} has {name}={value!r}"

    def _histogram(self, name: str, documentation: str, *labels: str) -> Histogram:
        return Histogram(f"offloadd_{name}_seconds", documentation, labels, buckets=BUCKETS_S, registry=self.registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        counter = Counter(f"offloadd_{name}", documentation, labels, registry=self.registry)
        self._counters.append(counter)
        return counter

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(f"offloadd_{name}", documentation, labels, registry=self.registry)


def worst_outcome(outcomes: Iterable[str]) -> str:
    """The outcome of a request: that of its worst block, `none` for none."""
    return max(outcomes, key=_SEVERITY.index, default=NONE)


_SEVERITY = (NONE, "duplicate", "stored", "restored", "not_found", "rejected", "failed", "data_loss", "quarantined")

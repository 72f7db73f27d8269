"""The daemon's metrics: counts, times and gauges with label values from closed sets."""

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from offloadd.model.enums import EvictStatus, Path, Reason, RestoreStatus, Tier, Way

OPERATIONS: Final = ("evict", "restore", "spill", "prefetch")
REQUESTS: Final = (*OPERATIONS, "lookup", "release")
#: Where a slice's time goes, as movers tell it.
STAGES: Final = ("queue", "copy", "checksum", "io")

#: Requests on a volume by size: what they show is the cost by the call, or by the byte.
SIZES: Final = ("small", "large")

#: 0.25 ms (one block from the arena) to 30 s (the default deadline).
_SECONDS: Final = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def label(member: IntEnum) -> str:
    """The label value of an enum member: `Tier.ARENA` as `arena`."""
    return member.name.lower()


TIERS: Final = tuple(label(tier) for tier in Tier)
PATHS: Final = tuple(label(path) for path in Path)
WAYS: Final = tuple(label(way) for way in Way)
OUTCOMES: Final = tuple(sorted({label(status) for status in (*EvictStatus, *RestoreStatus) if status}))
#: Why a restore gave no bytes: `not_found`, or the reason beside the status.
MISS_REASONS: Final = ("not_found", *(label(reason) for reason in Reason if reason is not Reason.NONE))
#: Why a spill was given up.
SPILL_REASONS: Final = MISS_REASONS[1:]


class Metrics:
    """All series of one daemon, in a registry of their own. Belongs to the event-loop thread; the endpoint may read at any time.

    Feed it by `metrics.blocks.labels(operation="evict", outcome="stored", tier="arena").inc(count)`. Label values come from OPERATIONS, REQUESTS,
    STAGES, TIERS, PATHS, WAYS, OUTCOMES, MISS_REASONS, SIZES, from the volumes and GPUs of the configuration, the names of the workers and the numbers of the
    NUMA nodes: a value that a client could choose would let it fill the memory. `check_labels` holds that in tests.
    """

    def __init__(self, *, volumes: Sequence[str] = (), workers: Sequence[str] = (), gpus: Sequence[str] = (), nodes: Sequence[int] = ()) -> None:
        self._labels: dict[str, frozenset[str]] = {
            "operation": frozenset(REQUESTS),
            "stage": frozenset(STAGES),
            "tier": frozenset(TIERS),
            "path": frozenset(PATHS),
            "way": frozenset(WAYS),
            "outcome": frozenset(OUTCOMES),
            "reason": frozenset(MISS_REASONS),
            "volume": frozenset(volumes),
            "worker": frozenset(workers),
            "gpu": frozenset(gpus),
            "node": frozenset(map(str, nodes)),
            "size": frozenset(SIZES),
        }
        self.registry = CollectorRegistry()
        self.blocks = self._counter("blocks", "Blocks answered.", "operation", "outcome", "tier")
        self.bytes = self._counter("bytes", "Payload bytes moved.", "operation", "tier", "path", "way")
        self.arena_remote_blocks = self._counter(
            "arena_remote_blocks", "Blocks copied between a GPU and a part of the arena on another NUMA node than its own.", "operation"
        )
        self.misses = self._counter("misses", "Blocks of restores that gave no bytes.", "reason")
        self.refused = self._counter("refused", "Requests, calls and sessions refused at once, by the limit that was reached.", "limit")
        self.spill_blocks_failed = self._counter("spill_blocks_failed", "Blocks of the arena whose copying to a volume was given up.", "reason")
        self.breaker_opened = self._counter("volume_breaker_opened", "Times that a volume was turned off for an operation.", "volume", "operation")
        self._shown: Tally[tuple[str, ...]] = Tally()
        self.workers_restarted = self._counter("workers_restarted", "Workers that died and were started again.", "worker")
        self.request_seconds = Histogram(
            "offloadd_request_seconds", "Time from the request to its answer.", ["operation"], buckets=_SECONDS, registry=self.registry
        )
        self.stage_seconds = Histogram(
            "offloadd_stage_seconds", "Time of one slice in one stage.", ["operation", "stage"], buckets=_SECONDS, registry=self.registry
        )
        self.sessions = self._gauge("sessions", "Live sessions.")
        self.regions = self._gauge("regions", "Registered regions.")
        self.requests = self._gauge("requests", "Requests in flight.")
        self.blocks_in_flight = self._gauge("blocks_in_flight", "Blocks that requests in flight name.")
        self.bytes_in_flight = self._gauge("bytes_in_flight", "Payload bytes that requests in flight name, moved yet or not.")
        self.arena_used_bytes = self._gauge("arena_used_bytes", "Bytes in arena slots that hold blocks.")
        self.arena_blocks = self._gauge("arena_blocks", "Blocks in the arena.")
        self.arena_node_used_bytes = self._gauge(
            "arena_node_used_bytes", "Bytes in arena slots that hold blocks, by NUMA node where there are several.", "node"
        )
        self.volume_used_bytes = self._gauge("volume_used_bytes", "Bytes in slots of the volume that hold blocks.", "volume")
        self.volume_blocks = self._gauge("volume_blocks", "Blocks on the volume.", "volume")
        self.volume_breaker = self._gauge(
            "volume_breaker", "Whether a volume gets such operations: 0 yes, 1 on trial, 2 no, since it hangs or fails.", "volume", "operation"
        )
        self.volume_late_jobs = self._gauge("volume_late_jobs", "Jobs sent to the volume that are past their deadlines, or stand still.", "volume")
        route = ("gpu", "volume", "path", "operation", "size")
        self.route_bytes_per_second = self._gauge("route_bytes_per_second", "Measured between a GPU and a volume; 0 while it was not.", *route)
        self.route_auto = self._gauge("route_auto", "1 for the path that AUTO takes between a GPU and a volume, else 0.", *route)
        self.index_blocks = self._gauge("index_blocks", "Blocks in the index.")
        self.index_blocks_max = self._gauge("index_blocks_max", "Most blocks that the index takes.")
        self.gpu_usable = self._gauge("gpu_usable", "1 if the GPU can be used, else 0.", "gpu")
        self.gpu_context_bytes = self._gauge("gpu_context_bytes", "Memory of the GPU that the context of its mover took; 0 if not known.", "gpu")
        self.limits = self._gauge("limit", "Configured limits, by the name of their key.", "limit")
        # Series that exist from the start read as zero, not as absent, in an alert.
        for reason in MISS_REASONS:
            self.misses.labels(reason=reason)
        for reason in SPILL_REASONS:
            self.spill_blocks_failed.labels(reason=reason)
        for worker in workers:
            self.workers_restarted.labels(worker=worker)
        for operation in REQUESTS:
            self.request_seconds.labels(operation=operation)

    def show_limits(self, limits: Mapping[str, float]) -> None:
        """Show the configured limits: (name of the key, value). Only such names can have refused anything."""
        self._labels["limit"] = frozenset(limits)
        for name, value in limits.items():
            self.limits.labels(limit=name).set(value)

    def show_spills_failed(self, reason: str, count: int) -> None:
        """Count the blocks whose spill was given up for this reason up to `count`, all that there have been."""
        self.spill_blocks_failed.labels(reason=reason).inc(self._since("spill", reason, count=count))

    def show_refused(self, limit: str, count: int) -> None:
        """Count what this limit refused up to `count`, all that there have been."""
        self.refused.labels(limit=limit).inc(self._since("refused", limit, count=count))

    def show_breaker(self, volume: str, operation: str, *, state: int, opened_count: int) -> None:
        """Show a breaker of a volume: 0 closed, 1 half-open, 2 open; and how often it has opened."""
        self.volume_breaker.labels(volume=volume, operation=operation).set(state)
        self.breaker_opened.labels(volume=volume, operation=operation).inc(self._since("breaker", volume, operation, count=opened_count))

    def _since(self, *name: str, count: int) -> int:
        """How much a count has grown since it was last shown."""
        before, self._shown[name] = self._shown[name], count
        return count - before

    def show_restarts(self, worker: str, count: int) -> None:
        """Count the restarts of a worker up to `count`, all that there have been."""
        self.workers_restarted.labels(worker=worker).inc(self._since("restarts", worker, count=count))

    def counter_values(self) -> list[tuple[str, int]]:
        """Every counter that is not zero, as (`name{label="value",…}`, value), for the status."""
        values = []
        for metric in self.registry.collect():
            for sample in metric.samples if metric.type == "counter" else ():
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

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"offloadd_{name}", documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(f"offloadd_{name}", documentation, labels, registry=self.registry)

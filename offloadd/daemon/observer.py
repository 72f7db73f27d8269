"""Feeds the metrics from what the use cases tell."""

from collections.abc import Iterable
from typing import Any

from offloadd import clock
from offloadd.metrics.registry import SPILL_REASONS, Metrics, label
from offloadd.model.enums import Path, Tier
from offloadd.offload.answers import Answer
from offloadd.offload.bandwidth import Direction, SizeClass
from offloadd.offload.moves import PathUse
from offloadd.offload.processes import WorkerProcess
from offloadd.offload.service import Offload
from offloadd.scheduler.breaker import BreakerState

_BREAKER_STATES = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


class MetricsObserver:
    """Implements `offloadd.offload.core.Observer` on the daemon's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def request_done(self, operation: str, answer: Any) -> None:
        """Count bytes by way, time by stage, and misses by reason."""
        assert isinstance(answer, Answer)
        metrics = self._metrics
        clock = answer.clock
        metrics.request_seconds.labels(operation=operation).observe(clock.total_ns / 1e9)
        for stage, nanoseconds in (("queue", clock.queue_ns), ("copy", clock.copy_ns), ("checksum", clock.checksum_ns), ("io", clock.io_ns)):
            metrics.stage_seconds.labels(operation=operation, stage=stage).observe(nanoseconds / 1e9)
        self.bytes_moved(operation, answer.uses)

    def bytes_moved(self, operation: str, uses: Iterable[PathUse]) -> None:
        """Count bytes by way; those whose way is not known yet come again when it is."""
        for use in uses:
            if use.path != Path.AUTO:
                self._metrics.bytes.labels(operation=operation, tier=label(use.tier), path=label(use.path), way=label(use.way)).inc(use.payload_bytes)

    def blocks(self, operation: str, outcome: str, tier: Tier, count: int) -> None:
        """Count blocks by outcome."""
        self._metrics.blocks.labels(operation=operation, outcome=outcome, tier=label(tier)).inc(count)
        if operation == "restore" and outcome == "not_found":
            self._metrics.misses.labels(reason="not_found").inc(count)

    def remote_blocks(self, operation: str, count: int) -> None:
        """Count blocks that crossed NUMA nodes."""
        self._metrics.arena_remote_blocks.labels(operation=operation).inc(count)


def refresh_gauges(metrics: Metrics, offload: Offload) -> None:
    """Set the gauges to the present state; runs before each scrape's data is needed, on the event loop."""
    core = offload.core
    metrics.sessions.set(len(offload.sessions))
    metrics.regions.set(len(core.regions))
    in_flight = core.admission.in_flight
    metrics.requests.set(in_flight.requests)
    metrics.blocks_in_flight.set(in_flight.blocks)
    metrics.bytes_in_flight.set(in_flight.bytes)
    metrics.index_blocks.set(core.catalog.block_count)
    metrics.index_blocks_max.set(core.catalog.index.capacity)
    if core.catalog.arena is not None:
        metrics.arena_used_bytes.set(core.catalog.arena.used_bytes)
        metrics.arena_blocks.set(core.catalog.arena.used_slots)
        for node, _, used_bytes in core.catalog.arena.bytes_by_node():
            metrics.arena_node_used_bytes.labels(node=str(node)).set(used_bytes)
    workers: list[WorkerProcess[Any]] = [*(device.mover.process for device in core.devices.values()), *(volume.process for volume in core.volumes)]
    for worker in workers:
        metrics.show_restarts(worker.name, worker.restart_count)
    for device in core.devices.values():
        if device.is_gpu:
            facts = device.mover.hello.gpu if device.mover.hello is not None else None
            metrics.gpu_usable.labels(gpu=device.name).set(0 if device.note else 1)
            metrics.gpu_context_bytes.labels(gpu=device.name).set(facts.context_bytes if facts is not None else 0)
    for volume in core.volumes:
        if volume.opened is not None:
            metrics.volume_used_bytes.labels(volume=volume.options.path).set(volume.pool.used_bytes)
            metrics.volume_blocks.labels(volume=volume.options.path).set(volume.pool.used_slots)
            metrics.volume_late_jobs.labels(volume=volume.options.path).set(core.late_count(volume, clock.monotonic_ns()))
        for operation, breaker in (("restore", volume.health.reads), ("evict", volume.health.writes)):
            state = _BREAKER_STATES.index(breaker.state)
            metrics.show_breaker(volume.options.path, operation, state=state, opened_count=breaker.opened_count)
    for reason in SPILL_REASONS:
        metrics.show_spills_failed(reason, core.counters[f"spill_blocks_failed_{reason}"])
    for one in offload.ways.volume_routes():
        for direction in Direction:
            for size in SizeClass:
                labels = {"gpu": one.route.device, "volume": one.volume, "path": label(one.route.path), "operation": direction.value, "size": label(size)}
                metrics.route_bytes_per_second.labels(**labels).set(core.bandwidths.rate_of(one.route, direction, size))
                taken = core.bandwidths.choice_of(one.route.device, one.route.volume, direction, size) == one.route.path
                metrics.route_auto.labels(**labels).set(int(taken))

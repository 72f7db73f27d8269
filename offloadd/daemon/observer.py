"""Feeds the metrics from what the use cases tell."""

from typing import Any

from offloadd.metrics.registry import Metrics, label
from offloadd.model.enums import Tier
from offloadd.offload.answers import Answer
from offloadd.offload.bandwidth import Direction, SizeClass
from offloadd.offload.service import Offload


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
        for use in answer.uses:
            metrics.bytes.labels(operation=operation, tier=label(use.tier), path=label(use.path)).inc(use.payload_bytes)

    def blocks(self, operation: str, outcome: str, tier: Tier, count: int) -> None:
        """Count blocks by outcome."""
        self._metrics.blocks.labels(operation=operation, outcome=outcome, tier=label(tier)).inc(count)
        if operation == "restore" and outcome == "not_found":
            self._metrics.misses.labels(reason="not_found").inc(count)


def refresh_gauges(metrics: Metrics, offload: Offload) -> None:
    """Set the gauges to the present state; runs before each scrape's data is needed, on the event loop."""
    core = offload.core
    metrics.sessions.set(len(offload.sessions))
    metrics.regions.set(len(core.regions))
    metrics.requests.set(len(core.active))
    metrics.index_blocks.set(core.catalog.block_count)
    metrics.index_blocks_max.set(core.catalog.index.capacity)
    if core.catalog.arena is not None:
        metrics.arena_used_bytes.set(core.catalog.arena.used_bytes)
        metrics.arena_blocks.set(core.catalog.arena.used_slots)
    for volume in core.volumes:
        if volume.opened is not None:
            metrics.volume_used_bytes.labels(volume=volume.options.path).set(volume.pool.used_bytes)
            metrics.volume_blocks.labels(volume=volume.options.path).set(volume.pool.used_slots)
    for one in offload.volume_ways():
        for direction in Direction:
            for size in SizeClass:
                labels = {"device": one.way.device, "volume": one.volume, "path": label(one.way.path), "operation": direction.value, "size": label(size)}
                metrics.way_bytes_per_second.labels(**labels).set(core.bandwidths.rate_of(one.way, direction, size))
                taken = core.bandwidths.choice_of(one.way.device, one.way.volume, direction, size) == one.way.path
                metrics.way_auto.labels(**labels).set(int(taken))

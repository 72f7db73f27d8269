"""Sets the gauges to the present state, and shows the counts that the use cases keep themselves."""

from typing import Any

from offloadd import clock
from offloadd.metrics.registry import ARENA, DIRECTIONS, SPILL_REASONS, Metrics, label
from offloadd.offload.bandwidth import Direction, SizeClass
from offloadd.offload.processes import WorkerProcess
from offloadd.offload.service import Offload
from offloadd.scheduler.breaker import BreakerState
from offloadd.scheduler.job_class import JobClass

_BREAKER_STATES = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


def refresh_gauges(metrics: Metrics, offload: Offload) -> None:
    """Everything at once; on the event loop."""
    core = offload.core
    metrics.sessions.set(len(offload.sessions))
    metrics.regions.set(len(core.regions))
    metrics.requests.set(len(core.active))
    metrics.index_blocks.set(core.catalog.block_count)
    metrics.index_blocks_max.set(core.catalog.index.capacity)
    _show_counts(metrics, offload)
    _show_queues(metrics, offload)
    _show_quarantine(metrics, offload)
    _show_arena(metrics, offload)
    _show_volumes(metrics, offload)
    _show_workers(metrics, offload)
    _show_routes(metrics, offload)


def _show_counts(metrics: Metrics, offload: Offload) -> None:
    counts = offload.core.counters
    for counter, name in (
        (metrics.evict_blocks_failed, "evict_blocks_failed"),
        (metrics.copies_lost, "copies_lost"),
        (metrics.second_tries, "restore_second_tries"),
        (metrics.faults, "faults"),
    ):
        metrics.show_count(counter, counts[name])
    for reason in SPILL_REASONS:
        metrics.show_count(metrics.spill_blocks_failed, counts[f"spill_blocks_failed_{reason}"], reason)


def _show_queues(metrics: Metrics, offload: Offload) -> None:
    for place, depths in offload.core.queues():
        for job_class, depth in zip(JobClass, depths, strict=True):
            for gauge, value in zip((metrics.queue_tickets, metrics.queue_bytes, metrics.in_flight_jobs, metrics.in_flight_bytes), depth, strict=True):
                gauge.labels(place or ARENA, label(job_class)).set(value)


def _show_quarantine(metrics: Metrics, offload: Offload) -> None:
    """What is held although nobody waits for it: the one place where quarantine of any kind becomes a metric."""
    core = offload.core
    metrics.show_count(metrics.moves_quarantined, core.counters["moves_quarantined"])
    now_ns = clock.monotonic_ns()
    for volume in core.volumes:
        if volume.opened is not None:
            metrics.volume_late_jobs.labels(volume.options.path).set(core.late_count(volume, now_ns))


def _show_arena(metrics: Metrics, offload: Offload) -> None:
    arena = offload.core.catalog.arena
    if arena is None:
        return
    metrics.arena_used_bytes.set(arena.used_bytes)
    metrics.arena_blocks.set(arena.used_slots)
    for node, _, used_bytes in arena.bytes_by_node():
        metrics.arena_node_used_bytes.labels(node=str(node)).set(used_bytes)
    _show_io(metrics, offload, ARENA, -1)


def _show_volumes(metrics: Metrics, offload: Offload) -> None:
    for volume in offload.core.volumes:
        path = volume.options.path
        if volume.opened is not None:
            metrics.volume_used_bytes.labels(volume=path).set(volume.pool.used_bytes)
            metrics.volume_blocks.labels(volume=path).set(volume.pool.used_slots)
            _show_io(metrics, offload, path, volume.ordinal)
        for operation, breaker in (("restore", volume.health.reads), ("evict", volume.health.writes)):
            metrics.show_breaker(path, operation, state=_BREAKER_STATES.index(breaker.state), opened_count=breaker.opened_count)


def _show_io(metrics: Metrics, offload: Offload, place: str, volume: int) -> None:
    for direction, count in zip(DIRECTIONS, offload.core.io_bytes[volume], strict=True):
        metrics.show_count(metrics.io_bytes, count, place, direction)


def _show_workers(metrics: Metrics, offload: Offload) -> None:
    core = offload.core
    workers: list[WorkerProcess[Any]] = [*(device.mover.process for device in core.devices.values()), *(volume.process for volume in core.volumes)]
    for worker in workers:
        metrics.show_count(metrics.workers_restarted, worker.restart_count, worker.name)
    for device in core.devices.values():
        if device.is_gpu:
            facts = device.mover.hello.gpu if device.mover.hello is not None else None
            metrics.gpu_usable.labels(gpu=device.name).set(0 if device.note else 1)
            metrics.gpu_context_bytes.labels(gpu=device.name).set(facts.context_bytes if facts is not None else 0)


def _show_routes(metrics: Metrics, offload: Offload) -> None:
    core = offload.core
    for one in offload.ways.volume_routes():
        for direction in Direction:
            for size in SizeClass:
                labels = (one.route.device, one.volume, label(one.route.path), direction.value, label(size))
                metrics.route_bytes_per_second.labels(*labels).set(core.bandwidths.rate_of(one.route, direction, size))
                taken = core.bandwidths.choice_of(one.route.device, one.route.volume, direction, size) == one.route.path
                metrics.route_auto.labels(*labels).set(int(taken))

"""Feeds the metrics from what the use cases tell: once a request and once a move. Slices, tens of thousands a second, are not told one by one."""

from collections.abc import Callable
from typing import Any

from prometheus_client import Counter, Histogram

from offloadd.metrics.registry import NONE, SEVERAL, STAGES, Metrics, label, worst_outcome
from offloadd.model.enums import EvictStatus, Reason, RestoreStatus, Tier
from offloadd.offload.answers import Answer
from offloadd.offload.moves import Move
from offloadd.offload.restore import is_bad_copy
from offloadd.scheduler.job_class import JobClass

_EVICTED = {int(status): label(status) for status in EvictStatus}
_RESTORED = {int(status): label(status) for status in RestoreStatus}
_REASONS = {int(reason): label(reason) for reason in Reason}
_TIERS = {int(tier): label(tier) for tier in Tier}
#: Outcomes of blocks that are where they were wanted.
_GOOD = frozenset({"stored", "duplicate", "restored"})


class MetricsObserver:
    """Implements `offloadd.offload.core.Observer` on the daemon's metrics.

    The metrics' own `labels` takes longer than what it finds takes to count, so that is kept. All label values are of closed sets: what is kept is bounded.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        #: Who else hears of answers, in the task of their call.
        self.on_answer: Callable[[str, Answer], None] = lambda operation, answer: None
        self._stages: dict[tuple[str, ...], list[Histogram]] = {}
        self._requests: dict[tuple[str, ...], Histogram] = {}
        self._blocks: dict[tuple[str, ...], list[Counter]] = {}
        self._bytes: dict[tuple[str, ...], Counter] = {}

    def request_done(self, operation: str, answer: Answer) -> None:
        """Count blocks by outcome, misses by reason, and the time of the request."""
        names = _EVICTED if operation == "evict" else _RESTORED
        outcomes = []
        for status, reason, tier, count in answer.tally():
            outcome = names[status]
            outcomes.append(outcome)
            for counter in self._counters_of(operation, outcome, _REASONS[reason], _TIERS[tier]):
                counter.inc(count)
        # Where bytes are on their way to cuFile (AUTO) it is not known yet which path that is.
        tiers, paths = ({label(value) for value in values} for values in ((use.tier for use in answer.uses), (use.path for use in answer.uses)))
        name = (operation, label(answer.job_class), _only(tiers), _only(paths), worst_outcome(outcomes))
        found = self._requests.get(name)
        if found is None:
            found = self._requests[name] = self._metrics.request_seconds.labels(*name)
        found.observe(answer.clock.total_ns / 1e9)
        self.on_answer(operation, answer)

    def move_over(self, operation: str, job_class: JobClass, move: Move, seconds: float) -> None:
        """Count bytes by way, and time by stage and path."""
        outcome = _outcome_of(operation, move)
        for use, clock in move.clocks:
            name = (operation, label(job_class), label(use.tier), label(use.path), outcome)
            stages = self._stages.get(name)
            if stages is None:
                stages = self._stages[name] = [self._metrics.stage_seconds.labels(*name, stage) for stage in STAGES]
            for stage, value in zip(stages, (clock.queue_ns / 1e9, clock.copy_ns / 1e9, clock.checksum_ns / 1e9, clock.io_ns / 1e9, seconds), strict=True):
                stage.observe(value)
            if use.payload_bytes:
                self._bytes_of(operation, label(use.tier), label(use.path), label(use.way)).inc(use.payload_bytes)

    def lookup_done(self, asked_count: int, held_count: int, seconds: float) -> None:
        """Count what was held of what was asked for."""
        self._metrics.lookup_seconds.observe(seconds)
        self._metrics.lookup_blocks.labels("held").inc(held_count)
        self._metrics.lookup_blocks.labels("missing").inc(asked_count - held_count)

    def remote_blocks(self, operation: str, count: int) -> None:
        """Count blocks that crossed NUMA nodes."""
        self._metrics.arena_remote_blocks.labels(operation=operation).inc(count)

    def _counters_of(self, operation: str, outcome: str, reason: str, tier: str) -> list[Counter]:
        name = (operation, outcome, reason, tier)
        found = self._blocks.get(name)
        if found is None:
            # Only of blocks that were moved it says something where they are.
            moved = outcome in ("stored", "restored")
            found = [self._metrics.blocks.labels(operation, outcome, tier if moved else label(Tier.ANY))]
            if outcome not in _GOOD:
                found.append((self._metrics.not_stored if operation == "evict" else self._metrics.misses).labels(outcome, reason))
            self._blocks[name] = found
        return found

    def _bytes_of(self, *name: str) -> Counter:
        found = self._bytes.get(name)
        if found is None:
            found = self._bytes[name] = self._metrics.bytes.labels(*name)
        return found


def _only(values: set[str]) -> str:
    return NONE if not values else SEVERAL if len(values) > 1 else next(iter(values))


def _outcome_of(operation: str, move: Move) -> str:
    """That of its worst block."""
    if move.quarantined:
        return "quarantined"
    reasons = move.reasons
    if not reasons.any():
        return "restored" if operation == "restore" else "stored"
    return "data_loss" if operation in ("restore", "prefetch") and is_bad_copy(reasons).any() else "failed"


class CallCounter:
    """Implements `offloadd.rpc.observing.CallWatcher`: counts calls by method and status."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def begun(self, method: str, context: Any) -> None:
        """Nothing to do."""

    def ended(self, method: str, begun: Any, code: str, seconds: float) -> None:
        """Count it."""
        self._metrics.calls.labels(method, code).inc()

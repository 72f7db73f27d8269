"""Makes a span of each call that belongs to a trace: what was asked, which way the bytes went, where the time went, and what came of it.

No name of a tenant, an instance or a request, no key and no hash is told: a collector serves more people than a daemon does.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from opentelemetry import context as otel
from opentelemetry.sdk.trace import Span
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from offloadd import clock
from offloadd.model.enums import EvictStatus, Reason, RestoreStatus
from offloadd.offload.answers import Answer
from offloadd.scheduler.rate import SECOND_NS, TokenBucket
from offloadd.tracing.export import SpanExport

#: Metadata keys of W3C trace context.
_KEYS = frozenset({"traceparent", "tracestate"})
#: Statuses that are the daemon's fault, not the caller's.
_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
#: The span of the call that the running task serves.
_SPAN: ContextVar[Span | None] = ContextVar("offloadd_span", default=None)


class CallTracer:
    """Implements `offloadd.rpc.observing.CallWatcher`, and hears of answers in the task of their call. At most `spans_per_s_max` calls are traced."""

    def __init__(self, export: SpanExport, *, spans_per_s_max: int) -> None:
        self._export = export
        self._rate = TokenBucket(bytes_per_period=spans_per_s_max, period_ns=SECOND_NS, burst_bytes=spans_per_s_max)
        self._propagator = TraceContextTextMapPropagator()
        #: Calls that belonged to a trace and were not traced, since there were more than the limit.
        self.over_rate_count = 0

    def begun(self, method: str, context: Any) -> Span | None:
        """Begin a span if the call belongs to a trace."""
        carrier = {key: value for key, value in context.invocation_metadata() or () if key in _KEYS}
        # An empty context of ours: whatever this process may trace elsewhere is no parent of a call.
        parent = self._propagator.extract(carrier, otel.Context()) if carrier else otel.Context()
        span = self._export.tracer.start_span(f"offloadd/{method}", parent, SpanKind.SERVER, {"rpc.system": "grpc", "rpc.method": method})
        if not isinstance(span, Span) or not span.is_recording():
            return None
        now_ns = clock.monotonic_ns()
        if self._rate.ready_ns(now_ns) > now_ns:
            self.over_rate_count += 1
            return None
        self._rate.take(1, now_ns)
        _SPAN.set(span)
        return span

    def ended(self, method: str, begun: Span | None, code: str, seconds: float) -> None:
        """End its span."""
        if begun is None:
            return
        begun.set_attribute("rpc.response.status_code", code)
        if code in _FAULTS:
            begun.set_status(Status(StatusCode.ERROR))
        self._export.end(begun)

    def answered(self, operation: str, answer: Answer) -> None:
        """What the evict or restore of the running task came to."""
        span = _SPAN.get()
        if span is not None:
            for name, value in _attributes(operation, answer):
                span.set_attribute(name, value)


def _attributes(operation: str, answer: Answer) -> Iterable[tuple[str, Any]]:
    yield "offloadd.class", answer.job_class.name.lower()
    yield "offloadd.blocks", answer.status.shape[0]
    yield "offloadd.payload_bytes", answer.payload_bytes
    outcomes: dict[str, int] = {}
    for status, reason, _, count in answer.tally():
        name = (EvictStatus if operation == "evict" else RestoreStatus)(status).name.lower()
        outcomes[f"offloadd.outcome.{name}"] = outcomes.get(f"offloadd.outcome.{name}", 0) + count
        if reason:
            name = Reason(reason).name.lower()
            outcomes[f"offloadd.reason.{name}"] = outcomes.get(f"offloadd.reason.{name}", 0) + count
    yield from outcomes.items()
    # By way that bytes went, the same place in each list.
    yield "offloadd.tiers", [use.tier.name.lower() for use in answer.uses]
    yield "offloadd.paths", [use.path.name.lower() for use in answer.uses]
    yield "offloadd.ways", [use.way.label for use in answer.uses]
    yield "offloadd.path_bytes", [use.payload_bytes for use in answer.uses]
    stages = answer.clock
    # Sums over threads: they overlap, so they are no spans of their own.
    for stage, nanoseconds in (("queue", stages.queue_ns), ("copy", stages.copy_ns), ("checksum", stages.checksum_ns), ("io", stages.io_ns)):
        yield f"offloadd.{stage}_s", nanoseconds / 1e9
    yield "offloadd.total_s", stages.total_ns / 1e9

"""Sends spans to a collector, from a thread of its own: whatever the collector does, nobody else waits, and what is held is bounded."""

import logging
import threading
from collections.abc import Sequence

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from offloadd import __version__

log = structlog.get_logger()

#: Spans of one message, and the longest time until one is sent.
BATCH_MAX = 512
BATCH_WAIT_S = 1.0
#: How long one message is tried for. Longer, and what comes after it is lost for want of room sooner.
TRY_S = 5.0
#: How long the last spans are waited for at the end of the daemon.
END_S = 1.0


class SpanExport:
    """A provider whose spans go to the collector at `endpoint`: http://HOST:PORT or https://HOST:PORT, OTLP over gRPC.

    `root_ratio`: which part of calls without a trace context of their own begins a trace. `queue_max`: spans held at most.
    """

    def __init__(self, endpoint: str, *, root_ratio: float, queue_max: int) -> None:
        # It would log every message that failed; we tell when that begins and when it ends.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._queue_max = queue_max
        self._exporter = _CountedExporter(OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=TRY_S), endpoint)
        self._batches = BatchSpanProcessor(
            self._exporter, max_queue_size=queue_max, max_export_batch_size=min(BATCH_MAX, queue_max), schedule_delay_millis=BATCH_WAIT_S * 1e3
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(root_ratio)),
            resource=Resource.create({"service.name": "offloadd", "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._batches)
        self.tracer = self._provider.get_tracer("offloadd", __version__)
        #: Spans that were given to the exporter, and those that found no room. Counted by one thread, `_exporter`'s by another: no lock.
        self._given_count = 0
        self.overflow_count = 0

    def end(self, span: Span) -> None:
        """The span is whole: send it, or lose it where there is no room."""
        if self._given_count - self._exporter.over_count >= self._queue_max:
            self.overflow_count += 1
            return
        self._given_count += 1
        span.end()

    @property
    def sent_count(self) -> int:
        """Spans that the collector took."""
        return self._exporter.sent_count

    @property
    def failed_count(self) -> int:
        """Spans that it did not take."""
        return self._exporter.failed_count

    def close(self) -> None:
        """Send what is held, for END_S at most. What is not sent by then is lost, and the thread that tries it keeps no process from ending."""
        sending = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        sending.start()
        sending.join(END_S)
        self._exporter.shutdown()


class _CountedExporter(SpanExporter):
    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._failing = False
        self._closed = False
        self.sent_count = 0
        self.failed_count = 0

    @property
    def over_count(self) -> int:
        """Spans of which nothing is held any more."""
        return self.sent_count + self.failed_count

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            good = result is SpanExportResult.SUCCESS
            if good:
                self.sent_count += len(spans)
            else:
                self.failed_count += len(spans)
            if good == self._failing and not self._closed:
                self._failing = not good
                if good:
                    log.info("the collector takes spans again", endpoint=self._endpoint)
                else:
                    log.warning("the collector takes no spans; they are lost until it does", endpoint=self._endpoint)
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._inner.shutdown()

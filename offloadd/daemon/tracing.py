"""Tracing as the daemon uses it: nothing of OpenTelemetry is imported where the configuration names no collector."""

import asyncio
from typing import TYPE_CHECKING

from offloadd.config.schema import TracingConfig
from offloadd.errors import ConfigError
from offloadd.metrics.registry import Metrics

if TYPE_CHECKING:
    from offloadd.tracing.calls import CallTracer
    from offloadd.tracing.export import SpanExport


class Tracing:
    """What makes spans, and what sends them."""

    def __init__(self, calls: "CallTracer", export: "SpanExport") -> None:
        self.calls = calls
        self._export = export

    def show(self, metrics: Metrics) -> None:
        """Show what became of the spans so far."""
        metrics.show_count(metrics.spans_sent, self._export.sent_count)
        for reason, count in (("rate", self.calls.over_rate_count), ("queue", self._export.overflow_count), ("export", self._export.failed_count)):
            metrics.show_count(metrics.spans_lost, count, reason)

    async def close(self) -> None:
        """Send what is held; it has a second for it."""
        await asyncio.to_thread(self._export.close)


def make_tracing(config: TracingConfig) -> Tracing | None:
    """None where no collector is named. Raises `ConfigError` if there is one, and no OpenTelemetry."""
    if not config.endpoint:
        return None
    try:
        from offloadd.tracing.calls import CallTracer
        from offloadd.tracing.export import SpanExport
    except ImportError as error:
        raise ConfigError(f'tracing.endpoint is "{config.endpoint}", and {error.name} is not installed: pip install "offloadd[otel]"') from error
    export = SpanExport(config.endpoint, root_ratio=config.root_ratio, queue_max=config.queue_spans_max)
    return Tracing(CallTracer(export, spans_per_s_max=config.spans_per_s_max), export)

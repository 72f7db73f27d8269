"""What is held for a collector that hangs is bounded, and so is the time that the end of the daemon waits for it."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from offloadd.tracing import export
from offloadd.tracing.export import END_S, SpanExport

from .collector import Collector, wait_until


@pytest.fixture
def hanging(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanExport]:
    """An export whose first message never ends by itself, with 16 of a hundred spans held."""
    monkeypatch.setattr(export, "TRY_S", 600.0)
    collector.go_on.clear()
    made = SpanExport(collector.endpoint, root_ratio=1.0, queue_max=16)
    for _ in range(100):
        made.end(span(made))
    yield made
    collector.go_on.set()


def span(made: SpanExport) -> Any:
    return made.tracer.start_span("call")


def test_so_many_are_held_and_the_others_are_counted(hanging: SpanExport, collector: Collector) -> None:
    assert (hanging.overflow_count, hanging.sent_count, hanging.failed_count) == (84, 0, 0)
    collector.go_on.set()
    wait_until(lambda: hanging.sent_count == 16, "the spans that were held")
    hanging.end(span(hanging))
    hanging.close()
    assert (hanging.overflow_count, hanging.sent_count) == (84, 17) and len(collector.spans) == 17


def test_the_end_waits_a_second_for_a_collector_that_hangs(hanging: SpanExport, collector: Collector) -> None:
    wait_until(lambda: collector.entered, "the first message")
    closing = threading.Thread(target=hanging.close, daemon=True)
    begin_s = time.monotonic()
    closing.start()
    closing.join(10 * END_S)
    assert not closing.is_alive() and time.monotonic() - begin_s >= END_S
    assert hanging.sent_count == 0

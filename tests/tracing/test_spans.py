"""Spans of a real daemon in a real collector: in the engine's trace, true, and without a name of anybody."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offloadd.client import AckLevel, AsyncClient, Client
from offloadd.units import KIB

from ..system.daemon_process import DaemonProcess
from ..system.engine_memory import Engine, flat
from .collector import Collector, attributes

BLOCK_BYTES = 64 * KIB
#: Ten times what a daemon takes to stop that has spans to send, and nobody who takes them.
STOP_S = 30.0

MakeDaemon = Callable[..., DaemonProcess]


@pytest.fixture
def daemon(make_daemon: MakeDaemon, collector: Collector) -> DaemonProcess:
    return make_daemon(sections={"tracing": {"endpoint": collector.endpoint}})


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client.connect(daemon.runtime_dir, instance="my-own-engine", timeout_s=60) as connected:
        yield connected


def losses(daemon: DaemonProcess) -> dict[str, int]:
    return {name.split('"')[1]: count for name, count in daemon.counters().items() if name.startswith("offloadd_spans_lost_total")}


def test_a_call_stands_in_the_engines_trace_with_its_way_its_stages_and_its_outcomes(
    daemon: DaemonProcess, client: Client, collector: Collector, engine_tracer: Any
) -> None:
    engine = Engine(client, flat(8, BLOCK_BYTES))
    with engine_tracer.start_as_current_span("preempt") as preempt:
        engine.evict(range(4), list("abcd"), ack=AckLevel.DURABLE)
    with engine_tracer.start_as_current_span("resume") as resume:
        engine.restore(range(4, 8), ["a", "b", "c", "nobody"])
    (evict,), (restore,) = collector.named("offloadd/Evict"), collector.named("offloadd/Restore")
    for span, parent in ((evict, preempt), (restore, resume)):
        context = parent.get_span_context()
        assert span.trace_id == context.trace_id.to_bytes(16, "big") and span.parent_span_id == context.span_id.to_bytes(8, "big")
    told = attributes(evict)
    assert {name: told[name] for name in ("offloadd.class", "offloadd.blocks", "offloadd.payload_bytes", "offloadd.outcome.stored")} == {
        "offloadd.class": "background",
        "offloadd.blocks": 4,
        "offloadd.payload_bytes": 4 * BLOCK_BYTES,
        "offloadd.outcome.stored": 4,
    }
    told = attributes(restore)
    assert (told["offloadd.tiers"], told["offloadd.paths"], told["offloadd.ways"]) == (["volume"], ["host"], ["plain"])
    assert told["offloadd.path_bytes"] == [3 * BLOCK_BYTES] and told["offloadd.class"] == "interactive"
    assert (told["offloadd.outcome.restored"], told["offloadd.outcome.not_found"], told["rpc.response.status_code"]) == (3, 1, "OK")
    assert all(told[f"offloadd.{stage}_s"] > 0 for stage in ("queue", "io", "total"))
    seconds = (restore.end_time_unix_nano - restore.start_time_unix_nano) / 1e9
    assert 0 < told["offloadd.total_s"] <= seconds + 0.001
    service = {one.key: one.value.string_value for one in collector.messages[0].resource_spans[0].resource.attributes}
    assert service["service.name"] == "offloadd"


def test_no_span_holds_the_name_of_anybody(daemon: DaemonProcess, client: Client, collector: Collector, engine_tracer: Any) -> None:
    engine = Engine(client, flat(8, BLOCK_BYTES))
    with engine_tracer.start_as_current_span("preempt"):
        engine.evict(range(2), ["first", "second"], request_id="request-of-somebody")
        client.lookup([engine.region], engine.blocks(range(1), ["first"]).hashes)
        client.release_all()
    collector.named("offloadd/Release")
    told = b"".join(message.SerializeToString() for message in collector.messages)
    (content,) = engine.blocks(range(1), ["first"]).hashes
    token = next(value for key, value in client._link.metadata if key == "offloadd-session")  # type: ignore[union-attr]
    for secret in (client.tenant, "my-own-engine", token, "request-of-somebody", content.hex(), engine.region.region_id.hex(), "test", "commit-1"):
        assert secret.encode() not in told, secret
    assert content not in told and engine.region.region_id not in told and b"offloadd/Lookup" in told


def test_a_refused_call_has_its_status(make_daemon: MakeDaemon, collector: Collector, engine_tracer: Any) -> None:
    daemon = make_daemon(sections={"tracing": {"endpoint": collector.endpoint}}, limits={"blocks_per_request_max": 2})
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client:
        engine = Engine(client, flat(8, BLOCK_BYTES))
        with engine_tracer.start_as_current_span("preempt"), pytest.raises(Exception, match="blocks_per_request_max"):
            engine.evict(range(4), list("abcd"))
    (span,) = collector.named("offloadd/Evict")
    assert attributes(span)["rpc.response.status_code"] == "INVALID_ARGUMENT" and "offloadd.blocks" not in attributes(span)
    # The caller's fault.
    assert span.status.code == 0


async def test_the_asyncio_client_passes_its_tasks_context_on(daemon: DaemonProcess, collector: Collector, engine_tracer: Any) -> None:
    async with await AsyncClient.connect(daemon.runtime_dir, instance="asyncio") as client:
        with engine_tracer.start_as_current_span("resume") as resume:
            await client.capabilities()
    (span,) = collector.named("offloadd/GetCapabilities")
    assert span.parent_span_id == resume.get_span_context().span_id.to_bytes(8, "big")


def test_calls_outside_of_a_trace_have_no_span_unless_asked_for(
    make_daemon: MakeDaemon, daemon: DaemonProcess, client: Client, collector: Collector, engine_tracer: Any
) -> None:
    client.capabilities()
    with engine_tracer.start_as_current_span("marks the end"):
        client.release_all()
    collector.named("offloadd/Release")
    assert {span.name for span in collector.spans} == {"offloadd/Release"}
    other = make_daemon(sections={"tracing": {"endpoint": collector.endpoint, "root_ratio": 1.0}})
    with Client.connect(other.runtime_dir, instance="engine", timeout_s=60) as untraced:
        untraced.capabilities()
    (span,) = collector.named("offloadd/GetCapabilities")
    assert span.parent_span_id == b""


def test_more_calls_than_the_limit_are_counted_and_not_traced(make_daemon: MakeDaemon, collector: Collector, engine_tracer: Any) -> None:
    daemon = make_daemon(sections={"tracing": {"endpoint": collector.endpoint, "spans_per_s_max": 1}})
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client, engine_tracer.start_as_current_span("busy"):
        begin_s = time.monotonic()
        for _ in range(50):
            client.capabilities()
        seconds = time.monotonic() - begin_s
        daemon.wait_until(lambda: losses(daemon).get("rate", 0) >= 49 - seconds - 1, "the count of what was lost")
        daemon.stop()
    assert 1 <= len(collector.spans) <= 2 + seconds


@pytest.mark.parametrize("kind", ["absent", "hanging"])
def test_a_collector_that_is_away_or_hangs_costs_spans_and_nothing_else(make_daemon: MakeDaemon, collector: Collector, engine_tracer: Any, kind: str) -> None:
    endpoint = collector.endpoint
    if kind == "absent":
        collector.close()
    else:
        collector.go_on.clear()
    daemon = make_daemon(sections={"tracing": {"endpoint": endpoint, "spans_per_s_max": 10_000, "queue_spans_max": 16}})
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client:
        engine = Engine(client, flat(8, BLOCK_BYTES))
        engine.evict(range(4), list("abcd"), ack=AckLevel.DURABLE)
        with engine_tracer.start_as_current_span("busy"):
            begin_s = time.monotonic()
            for _ in range(100):
                assert engine.restore(range(4, 8), list("abcd")).restored_count == 4
            # Some 2 ms each. Were a batch waited for, 16 of them would take 5 s.
            assert time.monotonic() - begin_s < 20
        # 16 of a hundred are held, and the others have no room, whether or not some were given up meanwhile.
        daemon.wait_until(lambda: losses(daemon).get("queue", 0) >= 100 - 4 * 16, "the count of what had no room")
        daemon.wait_until(lambda: losses(daemon).get("export", 0) >= 1, "the count of what was not taken", timeout_s=60)
        assert daemon.counters().get("offloadd_spans_sent_total", 0) == 0
    begin_s = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - begin_s < STOP_S
    assert daemon.log.read_text().count("the collector takes no spans") == 1
    assert "Traceback" not in daemon.log.read_text()


def test_a_collector_that_comes_back_gets_spans_again(make_daemon: MakeDaemon, collector: Collector, engine_tracer: Any) -> None:
    daemon = make_daemon(sections={"tracing": {"endpoint": collector.endpoint, "queue_spans_max": 16}})
    collector.go_on.clear()
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client, engine_tracer.start_as_current_span("busy"):
        client.capabilities()
        daemon.wait_until(lambda: losses(daemon).get("export", 0) >= 1, "the first loss", timeout_s=60)
        collector.go_on.set()
        client.release_all()
        collector.named("offloadd/Release")
        daemon.wait_until(lambda: daemon.counters().get("offloadd_spans_sent_total", 0) >= 1, "the count of what was sent")
    assert "the collector takes spans again" in daemon.log.read_text()


def test_what_is_held_at_the_end_is_sent(daemon: DaemonProcess, client: Client, collector: Collector, engine_tracer: Any) -> None:
    with engine_tracer.start_as_current_span("last"):
        client.release_all()
    client.close()
    assert daemon.stop() == 0
    assert [span.name for span in collector.spans] == ["offloadd/Release"]


def test_an_unsampled_trace_has_no_spans(daemon: DaemonProcess, client: Client, collector: Collector, engine_tracer: Any) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    with TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("engine").start_as_current_span("not sampled"):
        client.capabilities()
    with engine_tracer.start_as_current_span("sampled"):
        client.release_all()
    collector.named("offloadd/Release")
    assert len(collector.spans) == 1

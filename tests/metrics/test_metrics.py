"""Metrics: names, labels and the endpoint."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from offloadd import clock
from offloadd.errors import ConfigError
from offloadd.metrics import Metrics, MetricsServer
from offloadd.metrics.registry import OUTCOMES, SPAN_LOSSES, SPILL_REASONS
from offloadd.metrics.server import PAGE_S


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(volumes=["/volume"], workers=["mover host", "keeper /volume"])


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    server = MetricsServer(metrics.registry, host="127.0.0.1", port=0, connections_max=2)
    server.open()
    yield server
    server.close()


def scrape(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        return str(answer.read(), "utf-8")


def feed(metrics: Metrics) -> None:
    metrics.blocks.labels(operation="evict", outcome="stored", tier="arena").inc(3)
    metrics.bytes.labels(operation="restore", tier="volume", path="host", way="plain").inc(4096)
    metrics.stage_seconds.labels("restore", "interactive", "volume", "host", "restored", "io").observe(0.002)
    metrics.request_seconds.labels("restore", "interactive", "volume", "host", "restored").observe(0.00004)
    metrics.volume_used_bytes.labels(volume="/volume").set(8192)
    metrics.workers_restarted.labels(worker="mover host").inc()
    metrics.show_limits({"sessions_max": 256})


def test_what_is_counted_is_served_under_the_daemons_prefix(metrics: Metrics, server: MetricsServer) -> None:
    feed(metrics)
    text = scrape(server)
    assert 'offloadd_blocks_total{operation="evict",outcome="stored",tier="arena"} 3.0' in text
    assert 'offloadd_bytes_total{operation="restore",path="host",tier="volume",way="plain"} 4096.0' in text
    way = 'operation="restore",outcome="restored",path="host"'
    for le, count in (("0.001", 0.0), ("0.0025", 1.0), ("60.0", 1.0)):
        assert f'offloadd_stage_seconds_bucket{{class="interactive",le="{le}",{way},stage="io",tier="volume"}} {count}' in text
    assert f'offloadd_request_seconds_bucket{{class="interactive",le="5e-05",{way},tier="volume"}} 1.0' in text
    assert 'offloadd_volume_used_bytes{volume="/volume"} 8192.0' in text
    assert 'offloadd_limit{limit="sessions_max"} 256.0' in text
    assert all(line.startswith("offloadd_") for line in text.splitlines() if not line.startswith("#"))
    assert "_created" not in text


def test_counts_that_the_daemon_keeps_itself_are_shown_once_each(metrics: Metrics, server: MetricsServer) -> None:
    for count in (2, 2, 5):
        metrics.show_breaker("/volume", "evict", state=2, opened_count=count)
        metrics.show_count(metrics.spill_blocks_failed, 10 * count, "volume_down")
        metrics.show_count(metrics.workers_restarted, count, "mover host")
        metrics.show_count(metrics.faults, count)
    metrics.check_labels()
    text = scrape(server)
    assert 'offloadd_volume_breaker{operation="evict",volume="/volume"} 2.0' in text
    assert 'offloadd_volume_breaker_opened_total{operation="evict",volume="/volume"} 5.0' in text
    assert 'offloadd_spill_blocks_failed_total{reason="volume_down"} 50.0' in text
    assert 'offloadd_spill_blocks_failed_total{reason="io_error"} 0.0' in text
    assert 'offloadd_workers_restarted_total{worker="mover host"} 5.0' in text
    assert "offloadd_faults_total 5.0" in text


def test_a_label_from_outside_its_set_is_found(metrics: Metrics) -> None:
    feed(metrics)
    metrics.check_labels()
    metrics.misses.labels("failed", "whatever a client says").inc()
    with pytest.raises(AssertionError, match="whatever a client says"):
        metrics.check_labels()


def test_what_alerts_are_made_of_reads_as_zero_before_the_first(metrics: Metrics, server: MetricsServer) -> None:
    text = scrape(server)
    for miss in (("not_found", "none"), ("data_loss", "checksum_mismatch"), ("failed", "volume_down"), ("failed", "deadline"), ("quarantined", "cancelled")):
        assert 'offloadd_misses_total{{outcome="{}",reason="{}"}} 0.0'.format(*miss) in text
    assert 'offloadd_not_stored_total{outcome="rejected",reason="write_budget"} 0.0' in text
    assert all(f'offloadd_spill_blocks_failed_total{{reason="{reason}"}} 0.0' in text for reason in SPILL_REASONS)
    assert all(f'offloadd_spans_lost_total{{reason="{reason}"}} 0.0' in text for reason in SPAN_LOSSES)
    assert "offloadd_moves_quarantined_total 0.0" in text and "offloadd_faults_total 0.0" in text
    assert 'offloadd_workers_restarted_total{worker="keeper /volume"} 0.0' in text


def test_outcomes_are_those_of_the_protocol() -> None:
    assert OUTCOMES == ("data_loss", "duplicate", "failed", "not_found", "quarantined", "rejected", "restored", "stored")


def test_the_status_shows_each_counter_that_moved(metrics: Metrics) -> None:
    assert metrics.counter_values() == []
    feed(metrics)
    assert ('offloadd_blocks_total{operation="evict",outcome="stored",tier="arena"}', 3) in metrics.counter_values()
    assert len(metrics.counter_values()) == 3


def test_two_daemons_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.sessions.set(5)
    assert second.registry.get_sample_value("offloadd_sessions") == 0.0


def test_a_port_in_use_is_told_by_its_key(metrics: Metrics, server: MetricsServer) -> None:
    second = MetricsServer(metrics.registry, host="127.0.0.1", port=server.port)
    with pytest.raises(ConfigError, match=rf"daemon\.metrics_listen is 127\.0\.0\.1:{server.port}, which can't be bound"):
        second.open()
    second.close()


def test_a_closed_endpoint_frees_its_port_and_its_thread(metrics: Metrics) -> None:
    before = threading.active_count()
    server = MetricsServer(metrics.registry, host="127.0.0.1", port=0)
    server.open()
    port = server.port
    server.close()
    server.close()
    assert threading.active_count() == before
    again = MetricsServer(metrics.registry, host="127.0.0.1", port=port)
    again.open()
    again.close()


def test_silent_connections_take_a_bounded_number_of_threads(server: MetricsServer) -> None:
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(20)]
    # Connections are accepted in order: the last one is refused only after all before it were looked at.
    assert silent[-1].recv(1) == b""
    assert threading.active_count() <= before + 2
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        scrape(server)
    for connection in silent:
        connection.close()


def test_a_page_is_made_once_however_many_ask_for_it(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    # A connection is free again a moment after its answer: as many as are made here.
    server = MetricsServer(metrics.registry, host="127.0.0.1", port=0, connections_max=16)
    server.open()
    now_s = 100.0
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s)
    collected = []
    collect = metrics.registry.collect
    monkeypatch.setattr(metrics.registry, "collect", lambda: collected.append(now_s) or collect())
    for _ in range(10):
        scrape(server)
    assert collected == [100.0]
    metrics.sessions.set(7)
    assert "offloadd_sessions 0.0" in scrape(server)
    now_s += PAGE_S
    assert "offloadd_sessions 7.0" in scrape(server) and collected == [100.0, 100.0 + PAGE_S]
    server.close()


def test_the_format_is_what_the_caller_prefers(metrics: Metrics) -> None:
    server = MetricsServer(metrics.registry, host="127.0.0.1", port=0)
    server.open()
    openmetrics = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(openmetrics, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text") and answer.read().endswith(b"# EOF\n")
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", data=b"x", timeout=30)
    server.close()


def test_the_endpoint_works_on_ipv6(metrics: Metrics) -> None:
    server = MetricsServer(metrics.registry, host="::1", port=0)
    try:
        server.open()
    except ConfigError:
        pytest.skip("this machine has no ::1")
    with urllib.request.urlopen(f"http://[::1]:{server.port}/metrics", timeout=30) as answer:
        assert answer.status == 200
    server.close()

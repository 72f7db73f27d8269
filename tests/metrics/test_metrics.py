"""Metrics: names, labels and the endpoint."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from offloadd.errors import ConfigError
from offloadd.metrics import Metrics, MetricsServer
from offloadd.metrics.registry import MISS_REASONS, OUTCOMES


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
    metrics.stage_seconds.labels(operation="restore", stage="io").observe(0.002)
    metrics.request_seconds.labels(operation="restore").observe(0.003)
    metrics.volume_used_bytes.labels(volume="/volume").set(8192)
    metrics.workers_restarted.labels(worker="mover host").inc()
    metrics.show_limits({"sessions_max": 256})


def test_what_is_counted_is_served_under_the_daemons_prefix(metrics: Metrics, server: MetricsServer) -> None:
    feed(metrics)
    text = scrape(server)
    assert 'offloadd_blocks_total{operation="evict",outcome="stored",tier="arena"} 3.0' in text
    assert 'offloadd_bytes_total{operation="restore",path="host",tier="volume",way="plain"} 4096.0' in text
    assert 'offloadd_stage_seconds_bucket{le="0.0025",operation="restore",stage="io"} 1.0' in text
    assert 'offloadd_volume_used_bytes{volume="/volume"} 8192.0' in text
    assert 'offloadd_limit{limit="sessions_max"} 256.0' in text
    assert all(line.startswith("offloadd_") for line in text.splitlines() if not line.startswith("#"))


def test_counts_that_the_daemon_keeps_itself_are_shown_once_each(metrics: Metrics, server: MetricsServer) -> None:
    for count in (2, 2, 5):
        metrics.show_breaker("/volume", "evict", state=2, opened_count=count)
        metrics.show_spills_failed("volume_down", 10 * count)
        metrics.show_restarts("mover host", count)
    metrics.check_labels()
    text = scrape(server)
    assert 'offloadd_volume_breaker{operation="evict",volume="/volume"} 2.0' in text
    assert 'offloadd_volume_breaker_opened_total{operation="evict",volume="/volume"} 5.0' in text
    assert 'offloadd_spill_blocks_failed_total{reason="volume_down"} 50.0' in text
    assert 'offloadd_spill_blocks_failed_total{reason="io_error"} 0.0' in text
    assert 'offloadd_workers_restarted_total{worker="mover host"} 5.0' in text


def test_a_label_from_outside_its_set_is_found(metrics: Metrics) -> None:
    feed(metrics)
    metrics.check_labels()
    metrics.misses.labels(reason="whatever a client says").inc()
    with pytest.raises(AssertionError, match="whatever a client says"):
        metrics.check_labels()


def test_misses_and_restarts_read_as_zero_before_the_first(metrics: Metrics, server: MetricsServer) -> None:
    text = scrape(server)
    assert all(f'offloadd_misses_total{{reason="{reason}"}} 0.0' in text for reason in MISS_REASONS)
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


def test_the_endpoint_works_on_ipv6(metrics: Metrics) -> None:
    server = MetricsServer(metrics.registry, host="::1", port=0)
    try:
        server.open()
    except ConfigError:
        pytest.skip("this machine has no ::1")
    with urllib.request.urlopen(f"http://[::1]:{server.port}/metrics", timeout=30) as answer:
        assert answer.status == 200
    server.close()

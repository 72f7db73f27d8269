"""What the daemon tells of itself is what was done: `offloadd top`, status and metrics beside the answers that a client got."""

import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from offloadd.cli.status import values_of
from offloadd.cli.top_frame import Interval, frame
from offloadd.client import AckLevel, Client, Priority, Tier
from offloadd.units import KIB

from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat

BLOCK_BYTES = 64 * KIB
SLOT_BYTES = BLOCK_BYTES + 4 * KIB
COUNT = 8
UNITS = {"B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "µs": 1e-6, "ms": 1e-3, "s": 1}


def scrape(daemon: DaemonProcess) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By name and labels."""
    url = next(word.split("=", 1)[1] for line in daemon.log.read_text().splitlines() for word in line.split() if word.startswith("metrics=http"))
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(sample.name, frozenset(sample.labels.items())): sample.value for family in families for sample in family.samples}


def total(samples: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    """The sum over all series with these labels."""
    return sum(value for (one, its), value in samples.items() if one == f"offloadd_{name}" and labels.items() <= dict(its).items())


def figures(line: str) -> list[float]:
    """The numbers of a line of a frame, in bytes a second and seconds where they have units; "-" is 0."""
    words = re.sub(r"\([^)]*\)", "", line).split()
    return [
        float(word.replace(",", "")) * UNITS.get(after, 1) if word != "-" else 0.0
        for word, after in zip(words, [*words[1:], ""], strict=True)
        if re.fullmatch(r"[\d.,]+|-", word)
    ]


def near(value: float) -> object:
    """As it is shown: three digits, or one behind the point."""
    return pytest.approx(value, rel=0.05, abs=0.051)


def test_the_figures_of_a_frame_are_what_was_done(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(4 * COUNT, BLOCK_BYTES))
    before = values_of(daemon.status())
    names = [[f"{turn} {number}" for number in range(COUNT)] for turn in range(3)]
    evicted = [engine.evict(range(COUNT), names[turn], ack=AckLevel.DURABLE) for turn in range(2)]
    copied = engine.evict(range(COUNT), names[2], tier=Tier.ARENA)
    restored = [engine.restore(range(COUNT, 2 * COUNT), names[turn]) for turn in (0, 1, 0, 1, 0)]
    restored.append(engine.restore(range(COUNT, 2 * COUNT), [*names[0][:6], "nobody", "nobody else"]))
    background = engine.restore(range(COUNT), names[2], priority=Priority.BACKGROUND)
    looked = client.lookup([engine.region], engine.blocks(range(10), [*names[0], "no", "nothing"]).hashes, membership=True)
    assert looked.held_count == COUNT and background.restored_count == COUNT
    # A restore is counted when its answer has left.
    daemon.wait_until(lambda: sum(one.done_count for one in daemon.status().classes) == 10, "the count of all requests")
    now = values_of(daemon.status())
    interval = Interval.of(before, now)
    lines = [line.plain for line in frame(interval, width=80, height=24)]
    by_name = {line.split()[0]: figures(line) for line in lines[3:] if line.strip()}
    seconds = interval.seconds
    for name, answers in (("interactive", restored), ("background", evicted), ("preempt", [copied]), ("prefetch", [background])):
        times = [answer.times.total_s for answer in answers]
        moved = sum(use.payload_bytes for answer in answers for use in answer.paths)
        p50_s, p99_s = np.percentile(times, (50, 99), method="inverted_cdf")
        assert by_name[name] == [near(len(answers) / seconds), near(moved / seconds), near(p50_s), near(p99_s), 0, 0], name
        (one,) = [one for one in now["classes"] if one["job_class"] == name]
        assert (one["done_count"], one["payload_bytes"]) == (len(answers), moved) and one["p50_s"] == pytest.approx(p50_s, abs=1e-9)
    assert by_name["spill"] == [0] * 6
    (volume,) = now["volumes"]
    assert volume["written_bytes"] == 2 * COUNT * SLOT_BYTES and volume["read_bytes"] == (5 * COUNT + 6) * SLOT_BYTES
    arena = now["arena"]
    assert (arena["written_bytes"], arena["read_bytes"], arena["block_count"]) == (COUNT * BLOCK_BYTES, COUNT * BLOCK_BYTES, COUNT)
    (session,) = now["sessions"]
    assert (session["evicted_bytes"], session["restored_bytes"]) == (3 * COUNT * BLOCK_BYTES, (6 * COUNT + 6) * BLOCK_BYTES)
    assert by_name[session["name"]][-2:] == [near(session["evicted_bytes"] / seconds), near(session["restored_bytes"] / seconds)]
    assert by_name["arena"][-2:] == [near(arena["read_bytes"] / seconds), near(arena["written_bytes"] / seconds)]
    # 54 of 56 blocks were restored, 8 of 10 were held.
    assert now["hits"] == {"looked_up_count": 10, "held_count": 8, "asked_count": 7 * COUNT, "restored_count": 7 * COUNT - 2}
    assert "lookups 80 % (80 %), restores 96 % (96 %)" in lines[2]


def test_metrics_tell_the_times_that_the_client_was_told(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(2 * COUNT, BLOCK_BYTES))
    names = [str(number) for number in range(COUNT)]
    evicted = engine.evict(range(COUNT), names, ack=AckLevel.DURABLE)
    restored = [engine.restore(range(COUNT, 2 * COUNT), names) for _ in range(3)]
    engine.evict(range(COUNT), names, ack=AckLevel.DURABLE)
    read = {"operation": "restore", "class": "interactive", "tier": "volume", "path": "host", "outcome": "restored"}
    daemon.wait_until(lambda: total(scrape(daemon), "request_seconds_count", **read) == 3, "the count of the restores")
    samples = scrape(daemon)
    assert total(samples, "request_seconds_sum", **read) == pytest.approx(sum(one.times.total_s for one in restored))
    for stage in ("copy", "checksum", "io"):
        assert total(samples, "stage_seconds_sum", **read, stage=stage) == pytest.approx(sum(getattr(one.times, f"{stage}_s") for one in restored)), stage
        assert total(samples, "stage_seconds_count", **read, stage=stage) == 3
    assert total(samples, "stage_seconds_sum", stage="io", operation="evict", outcome="stored") == pytest.approx(evicted.times.io_s)
    assert total(samples, "stage_seconds_sum", **read, stage="total") <= total(samples, "request_seconds_sum", **read)
    # All of the second evict's blocks were there: no byte, no way.
    nothing = {"operation": "evict", "class": "background", "tier": "none", "path": "none", "outcome": "duplicate"}
    assert total(samples, "request_seconds_count", **nothing) == 1
    assert total(samples, "calls_total", method="Restore", code="OK") == 3
    assert total(samples, "calls_total", method="Evict", code="OK") == 2


def test_what_waits_is_told_by_class_while_the_mover_stands_still(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(2 * COUNT, BLOCK_BYTES))
    names = [str(number) for number in range(COUNT)]
    engine.evict(range(COUNT), names, ack=AckLevel.DURABLE)
    mover = daemon.worker_pid("mover host")
    os.kill(mover, signal.SIGSTOP)
    try:
        thread = threading.Thread(target=lambda: engine.restore(range(COUNT, 2 * COUNT), names))
        thread.start()

        def depth() -> tuple[int, int]:
            queues = [queue for queue in daemon.status().queues if queue.volume == str(daemon.volumes[0]) and queue.job_class == "interactive"]
            return sum(queue.job_count for queue in queues), sum(queue.in_flight_bytes for queue in queues)

        daemon.wait_until(lambda: depth() == (1, COUNT * SLOT_BYTES), "the restore's job")
        labels = {"volume": str(daemon.volumes[0]), "class": "interactive"}
        daemon.wait_until(lambda: total(scrape(daemon), "in_flight_bytes", **labels) == COUNT * SLOT_BYTES, "the gauge")
        assert total(scrape(daemon), "in_flight_jobs", **labels) == 1 and total(scrape(daemon), "requests") == 1
    finally:
        os.kill(mover, signal.SIGCONT)
    thread.join(60)
    daemon.wait_until(lambda: depth() == (0, 0), "the end of the restore")
    daemon.wait_until(lambda: total(scrape(daemon), "in_flight_bytes") == 0, "the gauge")


def test_copies_between_the_tiers_have_their_times(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client:
        engine = Engine(client, flat(COUNT, BLOCK_BYTES))
        engine.evict(range(COUNT), [str(number) for number in range(COUNT)])
        daemon.wait_until(lambda: daemon.counters().get("spilled_blocks") == COUNT, "the spill")
        samples = scrape(daemon)
        spill = {"operation": "spill", "class": "spill", "tier": "volume", "path": "host", "outcome": "stored"}
        assert total(samples, "stage_seconds_count", **spill, stage="total") >= 1
        assert total(samples, "bytes_total", operation="spill") == COUNT * BLOCK_BYTES
        (one,) = [one for one in daemon.status().classes if one.job_class == "spill"]
        assert (one.block_count, one.payload_bytes) == (COUNT, COUNT * BLOCK_BYTES) and one.done_count == one.recent_count >= 1


def test_a_scrape_is_answered_while_the_daemon_works(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(2 * COUNT, BLOCK_BYTES))
    names = [str(number) for number in range(COUNT)]
    engine.evict(range(COUNT), names, ack=AckLevel.DURABLE)
    end_s, restores = time.monotonic() + 1.0, 0
    while time.monotonic() < end_s:
        engine.restore(range(COUNT, 2 * COUNT), names)
        restores += 1
        if restores % 50 == 0:
            assert total(scrape(daemon), "request_seconds_count", operation="restore") <= restores
    daemon.wait_until(lambda: total(scrape(daemon), "request_seconds_count", operation="restore") == restores, "the count of all restores")

"""P12: a thousand clients at once are served, or refused at once; health is answered meanwhile, and memory does not grow with what is refused."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offloadd.config.needs import CONNECTION_BYTES, IN_FLIGHT_BLOCK_BYTES, SESSION_BYTES
from offloadd.model.runtime import GRPC_SOCKET
from offloadd.units import KIB, MIB

from ..torture import Rounds, Within
from .crowd import BLOCKS, Crowd
from .daemon_process import DaemonProcess
from .footprint import private_bytes
from .health_probe import HealthProbe

CLIENTS = 1000
#: Two, since one interpreter could not make as many calls at once.
CROWDS = 2
CALLS = 10
#: A rate of calls that a small machine can make and refuse.
CALLS_PER_S = 500.0
#: Limits of the configuration.
SESSIONS_MAX = 1024
REQUESTS_MAX = 512
CALLS_MAX = 640
#: Lower than by default: what is let in is copied in the end, into 4 KiB of the arena each.
BLOCKS_IN_FLIGHT_MAX = 65_536
#: What the heap of a process that was flooded varies by: 6 MiB were seen. Of 20,000 refused calls, each would have left behind 400 B.
GROWTH_BYTES_MAX = 8 * MIB
#: Of a call that waits within gRPC for the event loop.
CALL_BYTES_MAX = 20 * KIB
#: Of a block's hash and of what stands around it in a message.
MESSAGE_BLOCK_BYTES = 40
#: Calls in flight when the excess arrives end after this at the latest.
DEADLINE_S = 120.0


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    # Each thread stops by itself, some later than others.
    while not all(stat.read_text().rsplit(")", 1)[1].split()[0] == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        time.sleep(0.001)


class Peak:
    """The most private memory of a process, looked at all the time."""

    def __init__(self, pid: int) -> None:
        self.most_bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            self.most_bytes = max(self.most_bytes, private_bytes(self._pid))

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    limits = {"deadline_s": DEADLINE_S, "blocks_in_flight_per_session_max": BLOCKS_IN_FLIGHT_MAX, "blocks_in_flight_max": BLOCKS_IN_FLIGHT_MAX}
    return make_daemon(volume_count=0, arena_bytes=320 * MIB, limits=limits, log_level="warning")


@pytest.fixture
def idle_bytes(daemon: DaemonProcess) -> int:
    """Of the front before anybody attached."""
    assert daemon.process is not None
    return private_bytes(daemon.process.pid)


@pytest.fixture
def crowds(daemon: DaemonProcess) -> Iterator[list[Crowd]]:
    """All clients, attached."""
    made = [Crowd(daemon.runtime_dir, CLIENTS // CROWDS, f"crowd {number}") for number in range(CROWDS)]
    try:
        for crowd in made:
            assert crowd.answer() == {"attached": CLIENTS // CROWDS, "refused": {}}
        yield made
    finally:
        for crowd in made:
            crowd.close()


def _p99(seconds: list[float]) -> float:
    """Of sorted values."""
    return seconds[-1 - len(seconds) // 100]


@contextmanager
def stuck_mover(daemon: DaemonProcess) -> Iterator[None]:
    """Requests that were let in do not end."""
    pid = daemon.worker_pid("mover")
    _stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _all_call(daemon: DaemonProcess, crowds: list[Crowd], *, calls: int = CALLS, blocks: int = 1, per_s: float = 0.0) -> dict[str, Any]:
    """Each client calls while nothing that is let in ends; what is let in ends once all others were refused."""
    let_in = min(REQUESTS_MAX, BLOCKS_IN_FLIGHT_MAX // blocks)
    before = daemon.status().load.refused_count
    with stuck_mover(daemon):
        for crowd in crowds:
            crowd.order(calls=calls, blocks=blocks, per_s=per_s / len(crowds))
        excess = CLIENTS * calls - let_in
        daemon.wait_until(lambda: daemon.status().load.refused_count - before >= excess, "the refusals", timeout_s=DEADLINE_S)
        load = daemon.status().load
        assert (load.request_count, load.block_count, load.session_count) == (let_in, let_in * blocks, CLIENTS)
    answers = [crowd.answer() for crowd in crowds]
    together: dict[str, Any] = {name: sum((Counter(answer[name]) for answer in answers), Counter()) for name in ("codes", "hints_ms", "messages")}
    together["refused_s"] = sorted(seconds for answer in answers for seconds in answer["refused_s"])
    assert sum(answer["ok"] for answer in answers) == let_in
    assert together["codes"] == {"RESOURCE_EXHAUSTED": excess}
    assert "none" not in together["hints_ms"], "a refusal without a pause"
    return together


@pytest.mark.torture("P12")
@pytest.mark.timeout(900)
def test_the_excess_of_a_thousand_clients_is_refused_at_once(
    daemon: DaemonProcess, crowds: list[Crowd], within: Within, record_property: Callable[[str, object], None]
) -> None:
    """At a rate that two cores can make: of 10,000 calls in 20 s all but those that are let in are told at once to come again."""
    with HealthProbe(daemon.runtime_dir / GRPC_SOCKET) as health:
        told = _all_call(daemon, crowds, per_s=CALLS_PER_S)
    seconds = told["refused_s"]
    record_property("refused", f"p50 {1e3 * seconds[len(seconds) // 2]:.1f}, p99 {1e3 * _p99(seconds):.0f}, at most {1e3 * seconds[-1]:.0f} ms")
    record_property("health", f"p50 {1e3 * health.seconds[len(health.seconds) // 2]:.1f}, p99 {1e3 * _p99(health.seconds):.0f} ms")
    assert told["messages"] == {"requests_max": len(seconds)}
    assert health.bad == []
    # The median: clients and daemon share the cores, and the slowest tell of the kernel's choice among them. Where calls were queued it would be seconds.
    assert seconds[len(seconds) // 2] <= within(0.05)
    assert _p99(health.seconds) <= within(0.1)


@pytest.mark.torture("P12")
@pytest.mark.timeout(1800)
def test_ten_thousand_calls_at_one_moment_are_answered_and_leave_nothing_behind(
    daemon: DaemonProcess, crowds: list[Crowd], rounds: Rounds, within: Within, record_property: Callable[[str, object], None]
) -> None:
    """More than can be refused in 50 ms, and than gRPC would keep by default: each is refused with a pause, none is dropped; health is answered in between."""
    assert daemon.process is not None
    front = daemon.process.pid
    for _ in range(2):
        _all_call(daemon, crowds)
    before = private_bytes(front)
    with HealthProbe(daemon.runtime_dir / GRPC_SOCKET) as health, Peak(front) as peak:
        for _ in range(rounds(2, 20, "floods of 10,000 calls")):
            slowest = _all_call(daemon, crowds)["refused_s"][-1]
    growth = private_bytes(front) - before
    record_property("growth", f"{growth / MIB:.1f} MiB")
    record_property("most", f"{(peak.most_bytes - before) / MIB:.0f} MiB more")
    record_property("slowest refusal", f"{slowest:.1f} s")
    record_property("health", f"p50 {1e3 * health.seconds[len(health.seconds) // 2]:.1f}, p99 {1e3 * _p99(health.seconds):.0f} ms")
    assert health.bad == []
    assert _p99(health.seconds) <= within(0.1)
    assert growth <= GROWTH_BYTES_MAX
    assert peak.most_bytes - before <= CLIENTS * CALLS * CALL_BYTES_MAX


@pytest.mark.torture("P12")
@pytest.mark.timeout(900)
def test_long_messages_of_a_thousand_clients_take_no_more_memory_than_is_written_down(
    daemon: DaemonProcess, crowds: list[Crowd], record_property: Callable[[str, object], None]
) -> None:
    """2,000 messages of 280 KiB, 8 of which are let in, and each connection has seen a long one."""
    assert daemon.process is not None
    front = daemon.process.pid
    before = private_bytes(front)
    with Peak(front) as peak:
        for _ in range(2):
            told = _all_call(daemon, crowds, calls=2, blocks=BLOCKS)
            assert told["messages"] == {"blocks_in_flight_max": 2 * CLIENTS - BLOCKS_IN_FLIGHT_MAX // BLOCKS}
    most = peak.most_bytes - before
    record_property("most", f"{most / MIB:.0f} MiB more")
    assert most <= CLIENTS * CONNECTION_BYTES + BLOCKS_IN_FLIGHT_MAX * IN_FLIGHT_BLOCK_BYTES + CALLS_MAX * BLOCKS * MESSAGE_BLOCK_BYTES


@pytest.mark.torture("P12")
def test_a_thousand_sessions_cost_what_is_written_down_and_one_too_many_is_refused(
    daemon: DaemonProcess, idle_bytes: int, crowds: list[Crowd], record_property: Callable[[str, object], None]
) -> None:
    assert daemon.process is not None
    files = len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))
    # The attach socket, the pidfd, the connection and one memory of each.
    assert files <= 4 * CLIENTS + 64
    session_bytes = (private_bytes(daemon.process.pid) - idle_bytes) // CLIENTS
    record_property("memory of a session", f"{session_bytes / KIB:.0f} KiB")
    assert session_bytes <= SESSION_BYTES
    more = Crowd(daemon.runtime_dir, 40, "more")
    try:
        answer = more.answer()
    finally:
        more.close()
    assert answer["attached"] == SESSIONS_MAX - CLIENTS
    (refusal,) = answer["refused"]
    assert refusal == f"LimitExceeded: {SESSIONS_MAX} sessions are live; sessions_max is {SESSIONS_MAX}"

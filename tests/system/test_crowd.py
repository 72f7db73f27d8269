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

from offloadd.model.runtime import GRPC_SOCKET
from offloadd.units import MIB

from .crowd import Crowd
from .daemon_process import DaemonProcess
from .footprint import private_bytes
from .health_probe import HealthProbe

CLIENTS = 1000
#: Two, since one interpreter could not make as many calls at once.
CROWDS = 2
CALLS = 10
REQUESTS_MAX = 512
BLOCKS_IN_FLIGHT_MAX = 262_144
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
    return make_daemon(volume_count=0, arena_bytes=64 * MIB, limits={"deadline_s": DEADLINE_S}, log_level="warning")


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


def test_experiment(daemon: DaemonProcess, crowds: list[Crowd]) -> None:
    front = daemon.process.pid
    print("attached", private_bytes(front) / MIB)
    for options in ({"per_s": 400}, {"per_s": 800}, {}, {}, {"blocks": 8192, "calls": 2}, {"blocks": 8192, "calls": 2}):
        start = time.monotonic()
        with HealthProbe(daemon.runtime_dir / GRPC_SOCKET) as health, Peak(front) as peak:
            told = _all_call(daemon, crowds, **options)
        s = told.pop("refused_s")
        print(options, time.monotonic() - start, told, "p50", s[len(s) // 2], "p99", s[-len(s) // 100], "max", s[-1])
        print(
            "health",
            len(health.seconds),
            health.bad[:3],
            health.seconds[len(health.seconds) // 2],
            health.seconds[-1],
            "private",
            private_bytes(front) / MIB,
            peak.most_bytes / MIB,
        )

"""What systemd is told, and when: over a socket of the test's own."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from offloadd.daemon import notify as module
from offloadd.daemon.notify import ask_for_time, feed_watchdog, notify, watchdog_period_s


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """systemd's end."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.settimeout(30)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    return listener


@pytest.mark.parametrize(
    ("usec", "pid", "period_s"),
    [("30000000", None, 15.0), ("30000000", os.getpid(), 15.0), ("30000000", 1, None), ("", None, None), ("0", None, None), ("soon", None, None)],
)
def test_the_watchdog_is_fed_twice_in_its_time_by_the_process_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: int | None, period_s: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(pid))
    assert watchdog_period_s() == period_s


async def test_a_loop_that_turns_feeds_the_watchdog(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    feeding = asyncio.create_task(feed_watchdog())
    for _ in range(3):
        assert await asyncio.to_thread(manager.recv, 100) == b"WATCHDOG=1"
    feeding.cancel()


async def test_a_loop_that_hangs_feeds_nothing(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    turns = []

    async def sleep(_: float) -> None:
        # The loop comes back to it only when the test says so.
        turns.append(asyncio.get_running_loop().create_future())
        await turns[-1]

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    feeding = asyncio.ensure_future(feed_watchdog())
    assert await asyncio.wait_for(asyncio.to_thread(manager.recv, 100), 30) == b"WATCHDOG=1"
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)
    feeding.cancel()


async def test_more_time_is_asked_for_until_the_end(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EXTEND_PERIOD_S", 0.001)
    asking = asyncio.create_task(ask_for_time())
    for _ in range(2):
        assert await asyncio.to_thread(manager.recv, 100) == b"EXTEND_TIMEOUT_USEC=15000000"
    asking.cancel()


def test_nobody_who_listens_is_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")

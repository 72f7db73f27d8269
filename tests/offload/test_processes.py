"""When a worker counts as lost, and what there is of its successors. Workers are real processes; that one of them waits in the kernel is said by the test."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from offloadd.machine.tasks import Left
from offloadd.mover.messages import ControlAnswer
from offloadd.offload import processes
from offloadd.offload.processes import WorkerProcess


class Watched:
    """A worker, and how often it was started and lost."""

    def __init__(self, *, code_alone: bool, lost_max: int = 4) -> None:
        self.started: list[int] = []
        self.lost: list[int] = []
        self.changed = asyncio.Event()
        self.worker: WorkerProcess[ControlAnswer] = WorkerProcess(
            name="idle",
            module="tests.offload.idle_worker",
            incoming=ControlAnswer,
            on_start=lambda: self._tell(self.started, self.worker.pid),
            on_message=lambda message, fds: None,
            on_lost=lambda: self._tell(self.lost, self.started[-1]),
            code_alone=code_alone,
            lost_max=lost_max,
        )
        self.worker.start()

    def _tell(self, events: list[int], pid: int) -> None:
        events.append(pid)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                # Not all that is waited for is told here.
                with_time = asyncio.ensure_future(self.changed.wait())
                await asyncio.wait([with_time], timeout=0.05)
                with_time.cancel()


@asynccontextmanager
async def watched(*, code_alone: bool, lost_max: int = 4) -> AsyncIterator[Watched]:
    made = Watched(code_alone=code_alone, lost_max=lost_max)
    yield made
    await made.worker.stop(timeout_s=60)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has a process stand still, and be said to have been killed and to wait in the kernel."""
    pids: set[int] = set()
    real = processes.left_of
    monkeypatch.setattr(processes, "left_of", lambda pid: Left.IN_KERNEL if pid in pids else real(pid))

    def hang(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        pids.add(pid)

    return hang


async def test_a_worker_that_is_killed_is_lost_once_and_started_again() -> None:
    async with watched(code_alone=True) as it:
        os.kill(it.started[0], signal.SIGKILL)
        await it.until(lambda: len(it.started) == 2)
        assert it.lost == it.started[:1] and it.worker.restart_count == 1 and it.worker.lost == []
        assert it.worker.pid == it.started[1]


async def test_a_killed_worker_that_waits_in_the_kernel_is_lost_and_kept_in_mind_until_it_is_gone(hang: Callable[[int], None]) -> None:
    async with watched(code_alone=True) as it:
        first = it.started[0]
        it.worker.look()
        assert it.worker.pid == first, "it runs"
        hang(first)
        it.worker.look()
        assert it.lost == [first] and it.worker.lost == [first] and not it.worker.alive
        await it.until(lambda: len(it.started) == 2)
        # Its successor is no reason to forget it.
        assert it.worker.lost == [first]
        os.kill(first, signal.SIGKILL)
        await it.until(lambda: it.worker.lost == [])
        assert it.lost == [first]


async def test_with_too_many_in_the_kernel_there_is_no_successor_until_one_of_them_is_gone(hang: Callable[[int], None]) -> None:
    async with watched(code_alone=True, lost_max=2) as it:
        for count in (1, 2):
            await it.until(lambda count=count: len(it.started) == count and it.worker.alive)
            hang(it.worker.pid)
            it.worker.look()
        await it.until(lambda: it.worker._waiting is not None)
        assert it.worker.lost == it.started and len(it.started) == 2
        os.kill(it.started[0], signal.SIGKILL)
        await it.until(lambda: len(it.started) == 3)
        assert it.worker.lost == [it.started[1]]
        os.kill(it.started[1], signal.SIGKILL)
        await it.until(lambda: not it.worker.lost)


async def test_a_worker_whose_device_or_volume_another_one_would_share_is_lost_only_when_it_is_gone(hang: Callable[[int], None]) -> None:
    async with watched(code_alone=False) as it:
        first = it.started[0]
        hang(first)
        it.worker.look()
        # A sign of its end is none of its being gone.
        it.worker._ends(it.worker._running)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert it.worker.alive and it.lost == [] and it.worker.what_is_left is Left.IN_KERNEL
        os.kill(first, signal.SIGKILL)
        await it.until(lambda: len(it.started) == 2)
        assert it.lost == [first]


async def test_a_worker_that_is_superseded_is_killed_behind_the_start_of_its_successor() -> None:
    async with watched(code_alone=True) as it:
        first = it.started[0]
        os.kill(first, signal.SIGSTOP)
        at_start: list[bool] = []
        it.worker._on_start, told = lambda: (at_start.append(Path(f"/proc/{first}").exists()), told()), it.worker._on_start
        it.worker.supersede()
        assert it.lost == [first] and len(it.started) == 2 and at_start == [True] and it.worker.lost == [first]
        await it.until(lambda: it.worker.lost == [])
        assert it.worker.restart_count == 1


async def test_a_worker_that_closes_its_socket_and_stays_is_not_lost_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ENDING_WAIT_S", 0.0)
    async with watched(code_alone=True) as it:
        first = it.started[0]
        os.kill(first, signal.SIGSTOP)
        it.worker._channel.close()  # type: ignore[union-attr]
        assert it.worker.alive and it.lost == []
        await it.until(lambda: len(it.started) == 2)
        assert it.lost == [first]


async def test_a_worker_that_can_not_be_started_for_the_moment_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RESTART_PAUSE_MAX_S", 0.01)
    real, failures = os.pidfd_open, [OSError(errno.EMFILE, "no descriptors")] * 3

    def pidfd_open(pid: int, flags: int = 0) -> int:
        if failures:
            raise failures.pop()
        return real(pid, flags)

    async with watched(code_alone=True) as it:
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
        os.kill(it.started[0], signal.SIGKILL)
        await it.until(lambda: len(it.started) == 2)
        assert not failures and it.worker.restart_count == 1

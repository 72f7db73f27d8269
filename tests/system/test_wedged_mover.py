"""A mover that does not answer any more, though no volume hangs: it is replaced, engines go on, and nothing of the old one touches their memory."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from offloadd.client import AckLevel, Client, RestoreStatus
from offloadd.units import KIB

from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat
from .mover_that_sticks import COMMAND, STUCK

COUNT = 16
NAMES = [str(index) for index in range(COUNT)]
WEDGED_S = 2.0


def make_engine(daemon: DaemonProcess) -> tuple[Client, Engine]:
    client = Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60)
    engine = Engine(client, flat(64, 64 * KIB))
    assert engine.evict(range(COUNT), NAMES, ack=AckLevel.DURABLE, deadline_s=60).all_stored
    engine.wipe()
    return client, engine


def replaced(daemon: DaemonProcess, pid: int) -> Callable[[], bool]:
    return lambda: daemon.worker_pid("mover") not in (0, pid)


def test_a_stopped_mover_is_killed_and_its_successor_serves_the_same_regions(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(mover={"verify_target": 1, "wedged_s": WEDGED_S})
    client, engine = make_engine(daemon)
    pid = daemon.worker_pid("mover")
    os.kill(pid, signal.SIGSTOP)
    # A restore that has time is answered once the mover is lost, one that has none at its deadline.
    answers: list[set[RestoreStatus]] = []

    def restore() -> None:
        answers.append({outcome.status for outcome in engine.restore(range(16, 32), NAMES, deadline_s=300).outcomes})

    waiting = threading.Thread(target=restore)
    waiting.start()
    hasty = engine.restore(range(32, 48), NAMES, deadline_s=1.0)
    assert {outcome.status for outcome in hasty.outcomes} == {RestoreStatus.QUARANTINED}
    daemon.wait_until(replaced(daemon, pid), "another mover", timeout_s=120)
    waiting.join(120)
    assert answers == [{RestoreStatus.FAILED}], "a mover that is lost copies nothing any more"
    assert (engine.bytes[0][: 48 * 64 * KIB] == 0xA5).all()
    assert engine.restore(range(48, 64), NAMES, deadline_s=120).restored_count == COUNT
    assert all(engine.holds(48 + index, name) for index, name in enumerate(NAMES))
    (mover,) = (worker for worker in daemon.status().workers if worker.name == "mover host")
    assert mover.restart_count == 1 and mover.state == "up" and not mover.lost_pids
    log = daemon.log.read_text()
    assert log.index("mover is wedged; replacing it") < log.index("mover does not close its mappings of engine memory; killing it")
    client.close()


def test_a_mover_whose_main_thread_is_stuck_closes_its_mappings_first_is_replaced_and_killed_last(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    stuck = tmp_path / "stuck"
    daemon = make_daemon(mover={"verify_target": 1, "wedged_s": WEDGED_S}, command=COMMAND, environment={**os.environ, STUCK: str(stuck)})
    client, engine = make_engine(daemon)
    pid = daemon.worker_pid("mover")
    stuck.touch()
    # The message in which it sticks is a ping; its lanes go on, until it is told to close its mappings.
    daemon.wait_until(lambda: "mover is wedged; replacing it" in daemon.log.read_text(), "the end of its patience", timeout_s=120)
    # The next one must not stick as well.
    stuck.unlink()
    daemon.wait_until(replaced(daemon, pid), "another mover", timeout_s=120)
    assert engine.restore(range(48, 64), NAMES, deadline_s=120).restored_count == COUNT
    assert all(engine.holds(48 + index, name) for index, name in enumerate(NAMES))
    log = daemon.log.read_text()
    assert "killing it" not in log and log.index("mover is wedged") < log.index("mover has closed its mappings of engine memory")
    assert log.index("mover has closed its mappings of engine memory") < log.rindex("mover is up")
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(pid, 0)
    client.close()

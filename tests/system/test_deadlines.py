"""Nothing hangs: an answer per block comes at the deadline or at a cancel, whatever the mover does."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offloadd.client import AckLevel, Client, Reason, RestoreStatus
from offloadd.errors import LimitExceeded
from offloadd.units import KIB

from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat


def _thread_states(pid: int) -> list[str]:
    return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]


@pytest.fixture
def stuck(daemon: DaemonProcess, client: Client) -> Iterator[Engine]:
    """An engine with 16 durable blocks, and a mover that does nothing until the test is over."""
    engine = Engine(client, flat(64, 64 * KIB))
    assert engine.evict(range(16), [str(index) for index in range(16)], ack=AckLevel.DURABLE).all_stored
    engine.wipe()
    pid = daemon.worker_pid("mover")
    os.kill(pid, signal.SIGSTOP)
    # Its threads stop when one of them has taken the signal, which may wait for a core: until then another would still do a job.
    daemon.wait_until(lambda: set(_thread_states(pid)) == {"T"}, "the stop of every thread")
    yield engine
    os.kill(pid, signal.SIGCONT)
    # It goes on, and what it was asked meanwhile did no harm: nothing was written to the engine after the answers.
    daemon.wait_until(lambda: engine.restore(range(48, 64), [str(index) for index in range(16)], deadline_s=30).restored_count == 16, "the recovery")
    assert (engine.bytes[0][: 48 * 64 * KIB] == 0xA5).all(), "a destination was written after its restore was answered"


def test_a_restore_is_answered_at_its_deadline_when_the_mover_is_stuck(stuck: Engine) -> None:
    start = time.monotonic()
    answer = stuck.restore(range(16, 32), [str(index) for index in range(16)], deadline_s=1.0)
    assert time.monotonic() - start < 30
    # A stopped process can't prove that it won't write: the engine is told so.
    assert {(outcome.status, outcome.reason) for outcome in answer.outcomes} == {(RestoreStatus.QUARANTINED, Reason.DEADLINE)}


def test_an_evict_is_answered_at_its_deadline_when_the_mover_is_stuck(stuck: Engine) -> None:
    answer = stuck.evict([40], ["new"], fill=False, deadline_s=1.0)
    assert [(outcome.status.name, outcome.reason.name) for outcome in answer.outcomes] == [("QUARANTINED", "DEADLINE")]


def test_a_cancel_ends_a_restore_at_once(daemon: DaemonProcess, stuck: Engine) -> None:
    answers = []

    def restore() -> None:
        answers.append(stuck.restore(range(16, 32), [str(index) for index in range(16)], deadline_s=60, request_id="r-1"))

    thread = threading.Thread(target=restore)
    thread.start()
    daemon.wait_until(lambda: daemon.status().sessions[0].request_count == 1, "the request's arrival")
    assert stuck.client.cancel("r-1") is True
    thread.join(30)
    assert not thread.is_alive()
    assert {outcome.reason for outcome in answers[0].outcomes} == {Reason.CANCELLED}
    assert stuck.client.cancel("r-1") is False


def test_requests_beyond_the_limit_are_refused_at_once_while_others_wait(daemon: DaemonProcess, stuck: Engine) -> None:
    limit = 64
    threads = [threading.Thread(target=lambda: stuck.restore(range(16, 32), [str(index) for index in range(16)], deadline_s=20)) for _ in range(limit)]
    for thread in threads:
        thread.start()
    daemon.wait_until(lambda: daemon.status().sessions[0].request_count == limit, "the requests' arrival")
    with pytest.raises(LimitExceeded, match="requests_per_session_max is 64"):
        stuck.restore([16], ["0"])
    assert stuck.client.lookup([stuck.region], stuck.blocks([0], ["0"]).hashes).held_count == 1, "lookups are answered meanwhile"
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()

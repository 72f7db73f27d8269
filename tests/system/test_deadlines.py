"""Nothing hangs: an answer per block comes at the deadline or at a cancel, whatever the mover does."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offloadd.client import AckLevel, AdminClient, Client, HostMemory, Namespace, Plane, Reason, RestoreStatus
from offloadd.errors import DeadlineExpired, LimitExceeded, Unavailable
from offloadd.units import KIB

from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat


@pytest.fixture
def stuck(daemon: DaemonProcess, client: Client) -> Iterator[Engine]:
    """An engine with 16 durable blocks, and a mover that does nothing until the test is over."""
    engine = Engine(client, flat(64, 64 * KIB))
    assert engine.evict(range(16), [str(index) for index in range(16)], ack=AckLevel.DURABLE).all_stored
    engine.wipe()
    pid = daemon.worker_pid("mover")
    os.kill(pid, signal.SIGSTOP)
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


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not _stopped(pid):
        time.sleep(0.001)


@pytest.fixture
def two_volumes(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return make_daemon(volume_count=2)


@pytest.fixture
def keeper(two_volumes: DaemonProcess) -> Iterator[int]:
    """One of two keepers, which does nothing until the test is over."""
    pid = two_volumes.worker_pid(f"keeper {two_volumes.volumes[0]}")
    _stop(pid)
    yield pid
    os.kill(pid, signal.SIGCONT)


OTHER = Namespace(model="other", weights="commit-2")


def test_incident_13_a_keeper_that_stands_still_keeps_no_engine_from_registering(two_volumes: DaemonProcess, keeper: int) -> None:
    names = [str(index) for index in range(8)]
    with Client.connect(two_volumes.runtime_dir, instance="engine", timeout_s=60) as client:
        engine = Engine(client, flat(32, 64 * KIB), namespace=OTHER)
        for ack, first in ((AckLevel.COPIED, 0), (AckLevel.DURABLE, 8)):
            mine = [f"{ack.name}-{name}" for name in names]
            assert engine.evict(range(first, first + 8), mine, ack=ack).all_stored
            assert engine.restore(range(16, 24), mine).restored_count == 8
            assert all(engine.holds(16 + index, name) for index, name in enumerate(mine))
        client.unregister_region(engine.region)
        assert _stopped(keeper), "all of this was to happen while the keeper stood still"
        os.kill(keeper, signal.SIGCONT)
        # The volume takes the namespace as soon as its keeper goes on.
        engine = Engine(client, flat(32, 64 * KIB), namespace=OTHER)
        used = two_volumes.status().volumes[0].block_count

        def stored_there() -> bool:
            engine.evict(range(8), [f"{time.monotonic_ns()}" for _ in range(8)], ack=AckLevel.DURABLE)
            return two_volumes.status().volumes[0].block_count > used

        two_volumes.wait_until(stored_there, "an evict to the volume whose keeper goes on")


def test_incident_13_a_drop_and_a_drain_are_answered_while_a_keeper_stands_still(two_volumes: DaemonProcess, client_of_two: Client) -> None:
    engine = Engine(client_of_two, flat(8, 64 * KIB))
    assert engine.evict(range(4), list("abcd"), ack=AckLevel.DURABLE).all_stored
    pid = two_volumes.worker_pid(f"keeper {two_volumes.volumes[0]}")
    _stop(pid)
    with AdminClient(two_volumes.runtime_dir, timeout_s=1.0) as admin:
        with pytest.raises(DeadlineExpired, match="not every volume has answered"):
            admin.drop_namespace(engine.region.namespace_id)
        assert engine.restore(range(4, 8), list("abcd")).restored_count == 0, "a dropped block was found"
        with pytest.raises(Unavailable, match="being dropped"):
            Engine(client_of_two, flat(8, 64 * KIB))
        with pytest.raises(DeadlineExpired, match="it goes on"):
            admin.drain(timeout_s=1.0)
        assert _stopped(pid)
    os.kill(pid, signal.SIGCONT)
    assert two_volumes.process is not None and two_volumes.process.wait(60) == 0, "the drain that nobody waits for ends the daemon"


@pytest.fixture
def client_of_two(two_volumes: DaemonProcess) -> Iterator[Client]:
    with Client.connect(two_volumes.runtime_dir, instance="engine", timeout_s=60) as connected:
        yield connected


def test_incident_13_regions_are_answered_at_the_deadline_while_the_mover_stands_still(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(8, 64 * KIB))
    pid = daemon.worker_pid("mover")
    maps = Path(f"/proc/{pid}/maps")
    before = maps.read_text().count("memfd:")
    _stop(pid)
    memory = HostMemory.allocate(256 * KIB)
    with pytest.raises(DeadlineExpired, match="did not map the region"):
        client.register_region(block_count=4, planes=[Plane(0, 0, 64 * KIB, 64 * KIB)], memories=[memory], namespace=OTHER, deadline_s=1.0)
    with pytest.raises(DeadlineExpired, match="did not unmap it"):
        client.unregister_region(engine.region, deadline_s=1.0)
    with pytest.raises(DeadlineExpired, match="did not unmap it"):
        client.unregister_region(engine.region, deadline_s=1.0)
    assert _stopped(pid)
    os.kill(pid, signal.SIGCONT)
    client.unregister_region(engine.region)
    assert maps.read_text().count("memfd:") == before - 1, "a mapping is left that nobody has"
    assert daemon.status().sessions[0].region_count == 0

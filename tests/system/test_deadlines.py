"""Nothing hangs: an answer per block comes at the deadline or at a cancel, whatever the mover does."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from offloadd.client import AckLevel, AdminClient, Client, HostMemory, Namespace, Plane, Reason, RestoreStatus
from offloadd.errors import DeadlineExpired, LimitExceeded, Unavailable
from offloadd.units import KIB
from offloadd.v1 import admin_pb2 as pb

from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat


def _stopped(pid: int) -> bool:
    # Each thread stops by itself, some later than others.
    return all(stat.read_text().rsplit(")", 1)[1].split()[0] == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat"))


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not _stopped(pid):
        time.sleep(0.001)


@pytest.fixture
def stuck(daemon: DaemonProcess, client: Client) -> Iterator[Engine]:
    """An engine with 16 durable blocks, and a mover that does nothing until the test is over."""
    engine = Engine(client, flat(64, 64 * KIB))
    assert engine.evict(range(16), [str(index) for index in range(16)], ack=AckLevel.DURABLE).all_stored
    engine.wipe()
    pid = daemon.worker_pid("mover")
    _stop(pid)
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


@pytest.fixture
def given_s(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """What calls without a field for a deadline are given by this process. None: nothing, so that the daemon's default counts, and no call ends but by its
    answer."""
    given: dict[str, float | None] = {"timeout": 60.0}
    monkeypatch.setattr(Client, "_bounded", lambda self, link, method, request, _: method(request, timeout=given["timeout"], metadata=link.metadata))
    return given


def test_incident_13_a_drop_and_a_drain_are_answered_while_a_keeper_stands_still(
    make_daemon: Callable[..., DaemonProcess], given_s: dict[str, float | None]
) -> None:
    daemon = make_daemon(volume_count=2, limits={"deadline_s": 1.0})
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client, AdminClient(daemon.runtime_dir) as admin:
        engine = Engine(client, flat(8, 64 * KIB))
        assert engine.evict(range(4), list("abcd"), ack=AckLevel.DURABLE, deadline_s=60).all_stored
        pid = daemon.worker_pid(f"keeper {daemon.volumes[0]}")
        _stop(pid)
        given_s["timeout"] = None
        with pytest.raises(grpc.RpcError, match="not every volume has answered"):
            admin._stub.DropNamespace(pb.DropNamespaceRequest(namespace_id=engine.region.namespace_id))
        assert engine.restore(range(4, 8), list("abcd"), deadline_s=60).restored_count == 0, "a dropped block was found"
        with pytest.raises(Unavailable, match="being dropped"):
            Engine(client, flat(8, 64 * KIB))
        with pytest.raises(grpc.RpcError, match="it goes on"):
            admin._stub.Drain(pb.DrainRequest())
        assert _stopped(pid)
    os.kill(pid, signal.SIGCONT)
    assert daemon.process is not None and daemon.process.wait(60) == 0, "the drain that nobody waits for ends the daemon"


def test_incident_13_regions_are_answered_at_the_deadline_while_the_mover_stands_still(
    make_daemon: Callable[..., DaemonProcess], given_s: dict[str, float | None]
) -> None:
    daemon = make_daemon(limits={"deadline_s": 1.0})
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client:
        engine = Engine(client, flat(8, 64 * KIB))
        pid = daemon.worker_pid("mover")
        maps = Path(f"/proc/{pid}/maps")
        before = maps.read_text().count("memfd:")
        _stop(pid)
        given_s["timeout"] = None
        memory = HostMemory.allocate(256 * KIB)
        with pytest.raises(DeadlineExpired, match="did not map the region"):
            client.register_region(block_count=4, planes=[Plane(0, 0, 64 * KIB, 64 * KIB)], memories=[memory], namespace=OTHER)
        for _ in range(2):
            with pytest.raises(DeadlineExpired, match="did not unmap it"):
                client.unregister_region(engine.region)
        assert _stopped(pid)
        os.kill(pid, signal.SIGCONT)
        given_s["timeout"] = 60.0
        client.unregister_region(engine.region)
        assert maps.read_text().count("memfd:") == before - 1, "a mapping is left that nobody has"
        assert daemon.status().sessions[0].region_count == 0

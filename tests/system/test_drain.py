"""The end of a daemon: told first, then every request answered, then what was kept spilled, then status 0."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from offloadd.client import AckLevel, Client, Reason, RestoreStatus, Tier
from offloadd.errors import OffloaddError, Unavailable
from offloadd.units import KIB

from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat

COMMAND = [sys.executable, "-m", "offloadd", "drain", "--runtime-dir"]


def test_a_request_that_does_not_end_is_answered_after_health_says_not_serving(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(8, 64 * KIB))
    engine.evict(range(4), list("abcd"), ack=AckLevel.DURABLE)
    os.kill(daemon.worker_pid("mover"), signal.SIGSTOP)
    ended = threading.Event()
    outcomes: list[Any] = []

    def restore() -> None:
        try:
            outcomes.extend(engine.restore(range(4, 8), list("abcd"), deadline_s=120).outcomes)
        except OffloaddError as error:
            outcomes.append(error)
        ended.set()

    thread = threading.Thread(target=restore)
    thread.start()
    daemon.wait_until(lambda: sum(session.request_count for session in daemon.status().sessions) == 1, "the restore")
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    with grpc.insecure_channel(f"unix:{daemon.runtime_dir}/offloadd.sock") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def not_serving() -> bool:
            return bool(health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING)

        daemon.wait_until(not_serving, "NOT_SERVING")
        assert not ended.is_set()
    assert ended.wait(60), "the restore was never answered"
    # A mover that stands still can't prove that it won't write.
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [(RestoreStatus.QUARANTINED, Reason.CANCELLED)] * 4
    assert daemon.process.wait(60) == 0
    thread.join()


def test_the_command_spills_what_is_kept_and_returns_when_another_daemon_may_start(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(8, 64 * KIB))
    engine.evict(range(4), list("abcd"), tier=Tier.ARENA, keep=True)
    done = subprocess.run([*COMMAND, str(daemon.runtime_dir)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "4 kept blocks" in done.stdout and "drained: 4 blocks were spilled to volumes; the daemon has ended" in done.stdout
    daemon.start()
    assert engine.restore(range(4, 8), list("abcd")).restored_count == 4


def test_the_command_as_json(daemon: DaemonProcess) -> None:
    done = subprocess.run([*COMMAND, str(daemon.runtime_dir), "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout) == {"spilled_count": 0}
    assert daemon.process is not None and daemon.process.wait(60) == 0


def test_without_a_daemon_the_command_says_so(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (3, f"no daemon is running at {tmp_path}\n")


def test_a_daemon_that_drains_refuses_new_requests_with_a_hint(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(8, 64 * KIB))
    engine.evict(range(4), list("abcd"), ack=AckLevel.DURABLE)
    os.kill(daemon.worker_pid("keeper"), signal.SIGSTOP)
    # The drain waits for the keeper; requests that come meanwhile are refused, not left without an answer.
    draining = subprocess.Popen([*COMMAND, str(daemon.runtime_dir), "--timeout", "1"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _, said = draining.communicate(timeout=120)
    assert draining.returncode == 4 and "has not ended within 1 s" in said
    with pytest.raises(Unavailable, match="draining"):
        engine.restore(range(4, 8), list("abcd"), deadline_s=2)
    os.kill(daemon.worker_pid("keeper"), signal.SIGCONT)
    assert daemon.process is not None and daemon.process.wait(90) == 0


def test_systemd_hears_of_the_start_the_watchdog_and_the_end(daemon: DaemonProcess, tmp_path: Path) -> None:
    daemon.stop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        daemon.environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000000"}
        daemon.start()
        heard = [manager.recv(100).decode() for _ in range(2)]
        assert sorted(heard) == ["READY=1", "WATCHDOG=1"]
        assert daemon.stop() == 0
        heard = [manager.recv(100).decode(), manager.recv(100).decode()]
        assert heard == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=15000000"]

"""What survives: clean stops, kill -9, dead workers, dead engines."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offloadd.client import AckLevel, Client, Reason, RestoreStatus, Tier
from offloadd.units import KIB, MIB

from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_durable_blocks_are_restored_after_a_restart(daemon: DaemonProcess, client: Client, number: int) -> None:
    engine = Engine(client, flat(64, 200 * KIB))
    names = [str(index) for index in range(32)]
    assert engine.evict(range(32), names, ack=AckLevel.DURABLE).all_stored
    daemon.restart(number)
    engine.wipe()
    restored = engine.restore(range(32, 64), names)
    assert restored.restored_count == 32
    assert all(engine.holds(32 + index, name) for index, name in enumerate(names))
    volume = daemon.status().volumes[0]
    if number == signal.SIGKILL:
        assert volume.scan_header_bytes > 0, "a killed daemon leaves dirty slabs, which must be scanned"
    else:
        assert volume.scan_header_bytes == 0, "a clean stop leaves summaries, and nothing to scan"
    # And the store goes on: nothing that was recovered is overwritten by what comes next.
    assert engine.evict(range(32), [f"new {index}" for index in range(32)], ack=AckLevel.DURABLE).all_stored
    assert engine.restore(range(32), names).restored_count == 32


def test_a_clean_stop_exits_0_and_leaves_no_process_and_no_socket(daemon: DaemonProcess) -> None:
    pids = [worker.pid for worker in daemon.status().workers]
    assert len(pids) == 2
    assert daemon.stop() == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert [path.name for path in daemon.runtime_dir.iterdir()] == ["lock"]


def test_workers_of_a_killed_daemon_die_with_it(daemon: DaemonProcess) -> None:
    pids = [worker.pid for worker in daemon.status().workers]
    daemon.stop(signal.SIGKILL)

    def gone(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    daemon.wait_until(lambda: all(gone(pid) for pid in pids), "the workers' end")


def test_kept_blocks_in_the_arena_are_spilled_at_a_clean_stop_and_kept_for_the_grace_time(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(16, 100 * KIB))
    names = [str(index) for index in range(8)]
    assert engine.evict(range(8), names, tier=Tier.ARENA, keep=True).all_stored
    # A second process of the same engine instance, so that the keep outlives the first connection's end at the stop.
    daemon.restart()
    engine.wipe()
    assert engine.restore(range(8, 16), names).restored_count == 8
    assert all(engine.holds(8 + index, name) for index, name in enumerate(names))
    assert daemon.status().held_count == 8, "kept blocks stay kept after a restart until claimed or keep_grace_s is over"
    assert client.release([engine.region], engine.blocks(range(8), names).hashes) == 8
    assert daemon.status().held_count == 0


def test_a_killed_mover_is_restarted_and_maps_its_regions_again(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(32, 100 * KIB))
    names = [str(index) for index in range(8)]
    engine.evict(range(8), names, ack=AckLevel.DURABLE)
    arena_names = [f"arena {index}" for index in range(8)]
    engine.evict(range(8), arena_names, tier=Tier.ARENA)
    pid = daemon.kill_worker("mover")
    daemon.wait_until(lambda: daemon.worker_pid("mover") not in (0, pid), "the mover's restart")
    engine.wipe()
    assert engine.restore(range(8, 16), names).restored_count == 8
    assert engine.restore(range(16, 24), arena_names).restored_count == 8, "the arena's memory outlives the mover"
    assert all(engine.holds(8 + index, name) for index, name in enumerate(names))
    assert all(engine.holds(16 + index, name) for index, name in enumerate(arena_names))
    assert engine.evict(range(8), [f"new {index}" for index in range(8)], ack=AckLevel.DURABLE).all_stored


def test_a_request_in_flight_when_the_mover_dies_gets_an_answer_per_block(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(64, 1 * MIB))
    names = [str(index) for index in range(32)]
    engine.evict(range(32), names, ack=AckLevel.DURABLE)
    pid = daemon.worker_pid("mover")
    # Stopped first, so that the request is certainly in flight when the mover dies.
    os.kill(pid, signal.SIGSTOP)
    parts = client.restore_stream(engine.blocks(range(32, 64), names), deadline_s=30)
    import threading

    outcomes: list[object] = []
    reader = threading.Thread(target=lambda: outcomes.extend(outcome for part in parts for outcome in part.outcomes))
    reader.start()
    daemon.wait_until(lambda: sum(session.request_count for session in daemon.status().sessions) == 1, "the request's arrival")
    os.kill(pid, signal.SIGKILL)
    reader.join(60)
    assert not reader.is_alive()
    assert len(outcomes) == 32
    lost = [outcome for outcome in outcomes if outcome.status == RestoreStatus.FAILED]  # type: ignore[attr-defined]
    assert lost and {outcome.reason for outcome in lost} == {Reason.WORKER_LOST}  # type: ignore[attr-defined]
    assert engine.restore(range(32, 64), names).restored_count == 32


def test_a_killed_keeper_is_restarted_and_its_volume_serves_on(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(64, 500 * KIB))
    names = [str(index) for index in range(16)]
    engine.evict(range(16), names, ack=AckLevel.DURABLE)
    pid = daemon.kill_worker("keeper")
    assert engine.restore(range(16, 32), names).restored_count == 16, "reads need no keeper"
    daemon.wait_until(lambda: daemon.worker_pid("keeper") not in (0, pid), "the keeper's restart")
    # Enough to need further slabs, which only a keeper can cut.
    more = [f"more {index}" for index in range(64)]
    assert engine.evict(range(64), more, ack=AckLevel.DURABLE).all_stored
    assert engine.restore(range(64), more).restored_count == 64
    daemon.restart(signal.SIGKILL)
    engine.wipe()
    assert engine.restore(range(64), more).restored_count == 64
    assert all(engine.holds(index, name) for index, name in enumerate(more))


def test_a_second_daemon_is_refused_and_takes_no_socket_away(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(4, 4 * KIB))
    second = subprocess.run([sys.executable, "-m", "offloadd", "serve", "--config", str(daemon.config)], capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert str(daemon.process.pid) in second.stderr and str(daemon.runtime_dir) in second.stderr  # type: ignore[union-attr]
    assert "Traceback" not in second.stderr
    assert engine.evict([0], ["a"]).all_stored
    with Client.connect(daemon.runtime_dir, instance="another", timeout_s=10) as other:
        assert Engine(other, flat(4, 4 * KIB)).restore([1], ["a"]).restored_count == 1


def test_a_volume_of_a_running_daemon_is_refused_to_another(daemon: DaemonProcess, make_daemon: Callable[..., DaemonProcess]) -> None:
    other = make_daemon(volume_count=0)
    other.stop()
    other.volumes = list(daemon.volumes)
    other.start()
    other.wait_until(lambda: other.status().volumes[0].state.startswith("retrying"), "the refusal")
    assert "open" in other.status().volumes[0].state
    assert daemon.status().volumes[0].state == "serving"


def test_a_volume_that_is_busy_at_start_is_served_once_it_is_not(daemon: DaemonProcess) -> None:
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client:
        assert Engine(client, flat(4, 4 * KIB)).evict([0], ["a"], ack=AckLevel.DURABLE).all_stored
    daemon.stop()
    fd = os.open(daemon.volumes[0], os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        daemon.start()
        daemon.wait_until(lambda: daemon.status().volumes[0].state.startswith("retrying"), "the refusal")
        states = []
        daemon.wait_until(lambda: states.append(daemon.status().volumes[0].state) or "tried again in" in states[-1], "the word of the next try")
        assert "is open in another process" in states[-1]
    finally:
        os.close(fd)
    daemon.wait_until(lambda: daemon.status().volumes[0].state == "serving", "the volume's return")
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client:
        engine = Engine(client, flat(4, 4 * KIB))
        assert engine.restore([1], ["a"]).restored_count == 1 and engine.holds(1, "a")
        assert engine.evict([2], ["b"], ack=AckLevel.DURABLE).all_stored, "the namespace was not entered"
    assert "trying again with growing pauses" in daemon.log.read_text()


def test_a_volume_whose_device_is_away_at_start_is_served_once_it_is_there(daemon: DaemonProcess) -> None:
    daemon.stop()
    away = daemon.volumes[0].with_name("away")
    daemon.volumes[0].rename(away)
    daemon.start()
    daemon.wait_until(lambda: "No such file" in daemon.status().volumes[0].state, "the refusal")
    away.rename(daemon.volumes[0])
    daemon.wait_until(lambda: daemon.status().volumes[0].state == "serving", "the volume's return")
    assert daemon.status().workers[1].restart_count == 0, "a keeper died for it"


ENGINE_THAT_DIES = """
import sys
sys.path.insert(0, {tests!r})
from offloadd.client import Client
from tests.system.engine_memory import Engine, flat
client = Client.connect({runtime!r}, instance="doomed")
engine = Engine(client, flat(16, 1 << 20))
assert engine.evict(range(8), [str(index) for index in range(8)], keep=True).all_stored
print("ready", flush=True)
sys.stdin.read()
"""


def test_incident_15_a_dead_engine_frees_its_regions_and_keeps(daemon: DaemonProcess) -> None:
    root = str(Path(__file__).parents[2])
    code = ENGINE_THAT_DIES.format(tests=root, runtime=str(daemon.runtime_dir))
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        status = daemon.status()
        assert [(session.instance, session.region_count) for session in status.sessions] == [("doomed", 1)]
        assert status.held_count == 8
        mover = daemon.worker_pid("mover")
        assert b"memfd:kv" in Path(f"/proc/{mover}/maps").read_bytes()
    finally:
        child.kill()
        child.wait()
    daemon.wait_until(lambda: not daemon.status().sessions and daemon.status().held_count == 0, "the end of the session", timeout_s=20)
    daemon.wait_until(lambda: b"memfd:kv" not in Path(f"/proc/{mover}/maps").read_bytes(), "the unmapping", timeout_s=20)
    front = daemon.process.pid  # type: ignore[union-attr]
    assert not [name for name in _open_files(front) if "memfd:kv" in name], "the front still holds a dead engine's memory"


def _open_files(pid: int) -> list[str]:
    names = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # Descriptors come and go while we look.
        with contextlib.suppress(FileNotFoundError):
            names.append(str(path.readlink()))
    return names

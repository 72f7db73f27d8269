"""P9 and P10 with a volume whose threads are in D state, beside one that is well. Needs root (see throttle.py); test_volume_down.py shows the same of a
stand-in's hang, which a signal would end."""

import contextlib
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from offloadd.client import AckLevel, Client, Tier
from offloadd.errors import OffloaddError
from offloadd.tiers.volume_file import format_volume
from offloadd.units import KIB, MIB

from ..torture import Rounds, Within
from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat
from .throttle import Throttle, threads_in_d_state, throttle

pytestmark = pytest.mark.root

COUNT = 8
NAMES = [f"durable {index}" for index in range(COUNT)]
#: What P10 promises.
READY_S = 2.0


class Node:
    """A daemon with two volumes, of which the first can hang; an engine, and durable blocks on both volumes."""

    def __init__(self, daemon: DaemonProcess, device: Throttle) -> None:
        self.device = device
        self.daemon = daemon
        daemon.volumes[0] = device.path
        format_volume(device.path, volume_bytes=128 * MIB, slab_bytes=16 * MIB)
        daemon.start()
        self.connect()
        daemon.wait_until(lambda: all(volume.state == "serving" for volume in daemon.status().volumes), "the volumes")
        warm = iter(range(1000))
        daemon.wait_until(lambda: self.evict([f"warm {next(warm)}"]).all_stored and all(self.counts()), "an open slab on each volume")
        before = self.counts()
        assert self.evict(NAMES).all_stored
        assert [after - count for after, count in zip(self.counts(), before, strict=True)] == [COUNT // 2, COUNT // 2]

    def connect(self) -> None:
        self.client = Client.connect(self.daemon.runtime_dir, instance="engine", timeout_s=60)
        self.engine = Engine(self.client, flat(64, 64 * KIB))

    def evict(self, names: list[str], ack: AckLevel = AckLevel.DURABLE, **options: Any) -> Any:
        return self.engine.evict(range(len(names)), names, ack=ack, deadline_s=120, **options)

    def counts(self) -> list[int]:
        return [volume.block_count for volume in self.daemon.status().volumes]

    def outcomes(self, deadline_s: float = 120) -> dict[str, int]:
        """Of a restore of the durable blocks, with the reasons of those that failed."""
        found: dict[str, int] = {}
        for one in self.engine.restore(range(32, 32 + COUNT), NAMES, deadline_s=deadline_s).outcomes:
            what = one.status.name if one.reason.name == "NONE" else one.reason.name
            found[what] = found.get(what, 0) + 1
        return found

    def metrics(self) -> str:
        url = [word.split("=", 1)[1] for line in self.daemon.log.read_text().splitlines() for word in line.split() if word.startswith("metrics=http")][-1]
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode())

    def found(self, name: str) -> bool:
        return bool(self.client.lookup([self.engine.region], self.engine.blocks([0], [name]).hashes).held_count)

    def in_d_state(self, worker: str) -> bool:
        return threads_in_d_state(self.daemon.worker_pid(worker)) > 0


@pytest.fixture
def node(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> Iterator[Node]:
    with throttle(tmp_path, 128 * MIB) as device:
        daemon = make_daemon(volume_count=2, arena_bytes=32 * MIB)
        daemon.stop()
        made = Node(daemon, device)
        yield made
        device.lift()
        made.client.close()
        daemon.close()


def test_p9_a_volume_in_d_state_costs_itself_only_and_comes_back(node: Node) -> None:
    node.device.hang()
    # Half of the blocks lie there: they are told long before the deadline, the others are restored.
    assert node.outcomes() == {"RESTORED": COUNT // 2, "VOLUME_DOWN": COUNT // 2}
    assert node.in_d_state("mover"), "nothing hangs"
    assert node.outcomes() == {"RESTORED": COUNT // 2, "VOLUME_DOWN": COUNT // 2}
    assert node.evict(["durable beside it"]).all_stored
    assert node.evict(["in the arena"], ack=AckLevel.COPIED, tier=Tier.ARENA).all_stored
    node.daemon.wait_until(lambda: node.in_d_state(f"keeper {node.device.path}"), "a probe that hangs")
    assert node.in_d_state("mover")
    node.device.lift()
    node.daemon.wait_until(lambda: node.daemon.status().volumes[0].reads_breaker == "closed", "the volume's return", timeout_s=120)
    assert node.outcomes() == {"RESTORED": COUNT}
    assert node.evict([f"after {index}" for index in range(2 * COUNT)]).all_stored
    assert node.daemon.status().volumes[0].writes_breaker == "closed"


class Manager:
    """The socket on which systemd is told that the daemon is ready."""

    def __init__(self, daemon: DaemonProcess, folder: Path) -> None:
        self._daemon = daemon
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self._socket.settimeout(120)
        daemon.environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify")}

    def start(self) -> float:
        """Start the daemon; seconds until it was READY."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(1000)
        self._socket.settimeout(120)
        begin = time.monotonic()
        self._daemon.start()
        while b"READY=1" not in self._socket.recv(1000).split(b"\n"):
            pass
        return time.monotonic() - begin

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(node: Node, tmp_path: Path) -> Iterator[Manager]:
    made = Manager(node.daemon, tmp_path)
    yield made
    made.close()


def in_background(work: Callable[[], Any]) -> threading.Thread:
    """A request whose answer nobody waits for."""

    def run() -> None:
        with contextlib.suppress(OffloaddError, grpc.RpcError):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.torture("P10")
def test_p10_a_daemon_that_is_killed_beside_a_wedged_volume_is_ready_without_it_and_serves_the_others(
    node: Node, manager: Manager, rounds: Rounds, within: Within, record_property: Callable[[str, object], None]
) -> None:
    slowest_s = 0.0
    for cycle in range(rounds(3, 20, "starts")):
        node.device.hang()
        requests = [in_background(node.outcomes)]
        if cycle % 2:
            requests.append(in_background(lambda: node.evict([f"never stored {index}" for index in range(COUNT)])))
        node.daemon.wait_until(lambda: node.in_d_state("mover") and node.in_d_state(f"keeper {node.device.path}"), "reads that hang", timeout_s=120)
        workers = [node.daemon.worker_pid(name) for name in ("mover", f"keeper {node.device.path}")]
        node.daemon.stop(signal.SIGKILL)
        node.client.close()
        for request in requests:
            request.join(120)
        ready_s = manager.start()
        status = node.daemon.status()
        assert all(threads_in_d_state(pid) > 0 for pid in workers), "SIGKILL ended what it can't end"
        slowest_s = max(slowest_s, ready_s)
        # The mover that can't die had descriptors of both volumes; it holds the lock of none but the one that hangs.
        assert [volume.state.split(":")[0] for volume in status.volumes] in (["opening", "serving"], ["retrying", "serving"], ["opening", "recovering"])
        assert not node.in_d_state(f"keeper {node.device.path}"), "the next keeper hangs as well, since it read before it had the lock"
        node.connect()
        assert node.outcomes() == {"RESTORED": COUNT // 2, "NOT_FOUND": COUNT // 2}
        assert all(node.engine.holds(32 + index, name) for index, name in enumerate(NAMES) if node.found(name))
        assert node.evict([f"beside it {cycle}"]).all_stored
        assert node.evict(["in the arena"], ack=AckLevel.COPIED, tier=Tier.ARENA).all_stored
        assert node.engine.restore([1], ["in the arena"]).restored_count == 1
        assert all(threads_in_d_state(pid) > 0 for pid in workers)
        # One owner: as long as one of them may write.
        assert node.daemon.status().volumes[0].state.split(":")[0] in ("opening", "retrying")
        node.device.lift()
        node.daemon.wait_until(lambda: all(volume.state == "serving" for volume in node.daemon.status().volumes), "the volumes' return", timeout_s=120)
        assert node.outcomes() == {"RESTORED": COUNT}
        assert all(node.engine.holds(32 + index, name) for index, name in enumerate(NAMES))
        assert not any(threads_in_d_state(pid) for pid in workers)
    record_property("slowest READY", f"{slowest_s:.2f} s")
    assert slowest_s <= within(READY_S)


def test_p10_a_start_does_not_wait_for_a_volume_that_hangs_at_its_first_read(node: Node, manager: Manager, within: Within) -> None:
    node.client.close()
    node.daemon.stop()
    node.device.hang()
    assert manager.start() <= within(READY_S)
    node.daemon.wait_until(lambda: node.in_d_state(f"keeper {node.device.path}"), "a keeper that hangs")
    assert [volume.state for volume in node.daemon.status().volumes] == ["opening", "serving"]
    node.connect()
    assert node.outcomes() == {"RESTORED": COUNT // 2, "NOT_FOUND": COUNT // 2}
    node.device.lift()
    node.daemon.wait_until(lambda: node.daemon.status().volumes[0].state == "serving", "the volume's return", timeout_s=120)
    assert node.outcomes() == {"RESTORED": COUNT}


def test_p9_a_mover_that_is_killed_beside_a_wedged_volume_is_replaced_and_what_it_holds_is_not_used_until_it_is_gone(node: Node) -> None:
    daemon = node.daemon
    node.device.hang()
    answers: list[dict[str, int]] = []
    requests = [in_background(lambda: answers.append(node.outcomes())), in_background(lambda: node.evict([f"given up {index}" for index in range(COUNT)]))]
    daemon.wait_until(lambda: node.in_d_state("mover"), "I/O that hangs")
    pid = daemon.kill_worker("mover")
    daemon.wait_until(lambda: daemon.worker_pid("mover") not in (0, pid), "another mover")
    for request in requests:
        request.join(120)
    # Long before their deadline: the killed one's code can't run, so its copies are over.
    assert answers and answers[0].get("QUARANTINED") is None and sum(answers[0].values()) == COUNT
    held = daemon.status()
    assert list(held.workers[0].lost_pids) == [pid] and threads_in_d_state(pid) > 0
    quarantined = held.volumes[0].quarantined_slot_count
    assert quarantined > 0 and held.volumes[0].quarantined_bytes >= quarantined * 64 * KIB and held.volumes[1].quarantined_slot_count == 0
    told = [
        'offloadd_worker_lost_processes{worker="mover host"} 1.0',
        f'offloadd_volume_quarantined_slots{{volume="{node.device.path}"}} {float(quarantined)}',
        f'offloadd_volume_quarantined_slots{{volume="{daemon.volumes[1]}"}} 0.0',
    ]
    daemon.wait_until(lambda: all(line in node.metrics() for line in told), "the metrics")
    # The successor serves the arena and the other volume; what was sent to it there is not held up by what its predecessor left.
    assert node.evict(["in the arena"], ack=AckLevel.COPIED, tier=Tier.ARENA).all_stored
    assert node.engine.restore([1], ["in the arena"]).restored_count == 1
    daemon.wait_until(lambda: daemon.status().volumes[0].reads_breaker.startswith("open"), "a probe that is not answered")
    assert node.outcomes() == {"RESTORED": COUNT // 2, "VOLUME_DOWN": COUNT // 2}
    beside = [f"beside it {index}" for index in range(4 * COUNT)]
    assert node.evict(beside).all_stored
    assert node.engine.restore(range(4 * COUNT), beside).restored_count == 4 * COUNT
    assert all(node.engine.holds(index, name) for index, name in enumerate(beside))
    after = daemon.status()
    assert list(after.workers[0].lost_pids) == [pid] and after.volumes[0].quarantined_slot_count == quarantined
    node.device.lift()
    daemon.wait_until(lambda: not daemon.status().workers[0].lost_pids and not daemon.status().volumes[0].quarantined_slot_count, "the end of the killed one")
    daemon.wait_until(lambda: daemon.status().volumes[0].reads_breaker == "closed", "the volume's return", timeout_s=120)
    assert node.outcomes() == {"RESTORED": COUNT} and all(node.engine.holds(32 + index, name) for index, name in enumerate(NAMES))
    more = [f"after {index}" for index in range(4 * COUNT)]
    assert node.evict(more).all_stored
    node.engine.wipe()
    assert node.engine.restore(range(4 * COUNT), more).restored_count == 4 * COUNT
    assert all(node.engine.holds(index, name) for index, name in enumerate(more))
    assert daemon.counters().get("faults", 0) == 0


def test_a_keeper_that_is_killed_beside_a_wedged_volume_has_no_successor_until_it_is_gone(node: Node) -> None:
    daemon, name = node.daemon, f"keeper {node.device.path}"
    node.device.hang()
    assert node.outcomes() == {"RESTORED": COUNT // 2, "VOLUME_DOWN": COUNT // 2}
    daemon.wait_until(lambda: node.in_d_state(name), "a probe that hangs")
    pid = daemon.kill_worker(name)

    def keeper() -> Any:
        return next(worker for worker in daemon.status().workers if worker.name == name)

    daemon.wait_until(lambda: keeper().state == "killed", "the kill")
    # A late write of its own may still come to the tables that a successor would write: so there is none.
    assert node.evict(["durable beside it"]).all_stored
    assert keeper().pid == pid and keeper().restart_count == 0
    node.device.lift()
    daemon.wait_until(lambda: keeper().restart_count == 1 and keeper().state == "up", "another keeper")
    daemon.wait_until(lambda: daemon.status().volumes[0].reads_breaker == "closed", "the volume's return", timeout_s=120)
    assert node.outcomes() == {"RESTORED": COUNT}


def test_a_daemon_that_is_told_to_end_beside_a_wedged_volume_ends_with_0_and_waits_for_nobody_in_the_kernel(node: Node) -> None:
    daemon = node.daemon
    assert node.evict(["kept"], ack=AckLevel.COPIED, tier=Tier.ARENA, keep=True).all_stored
    node.device.hang()
    request = in_background(node.outcomes)
    daemon.wait_until(lambda: node.in_d_state("mover") and node.in_d_state(f"keeper {node.device.path}"), "reads that hang", timeout_s=120)
    workers = [daemon.worker_pid(name) for name in ("mover", f"keeper {node.device.path}")]
    begin = time.monotonic()
    assert daemon.stop() == 0
    print(f"ended after {time.monotonic() - begin:.1f} s")
    assert all(threads_in_d_state(pid) > 0 for pid in workers)
    request.join(120)
    node.client.close()
    node.device.lift()
    daemon.start()
    node.connect()
    daemon.wait_until(lambda: all(volume.state == "serving" for volume in daemon.status().volumes), "the volumes", timeout_s=120)
    assert node.outcomes() == {"RESTORED": COUNT}
    # It was spilled to the volume that is well.
    assert node.engine.restore([1], ["kept"]).restored_count == 1 and node.engine.holds(1, "kept")

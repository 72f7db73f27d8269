"""P9 and P10 with a volume whose threads are in D state, beside one that is well. Needs root (see throttle.py); test_volume_down.py shows the same of a
stand-in's hang, which a signal would end."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offloadd.client import AckLevel, Client, Tier
from offloadd.errors import OffloaddError
from offloadd.tiers.volume_file import format_volume
from offloadd.units import KIB, MIB

from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat
from .throttle import Throttle, threads_in_d_state, throttle

pytestmark = pytest.mark.root

COUNT = 8
NAMES = [f"durable {index}" for index in range(COUNT)]


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


def test_p10_a_daemon_that_is_killed_and_started_while_a_volume_is_wedged_serves_the_arena_and_then_the_volumes(node: Node) -> None:
    node.device.hang()

    def wait_in_vain() -> None:
        with contextlib.suppress(OffloaddError):
            node.outcomes()

    restore = threading.Thread(target=wait_in_vain)
    restore.start()
    node.daemon.wait_until(lambda: node.in_d_state("mover"), "a read that hangs")
    mover = node.daemon.worker_pid("mover")
    node.daemon.stop(signal.SIGKILL)
    node.client.close()
    restore.join(60)
    assert threads_in_d_state(mover) > 0, "SIGKILL ended what it can't end"
    node.daemon.start()
    node.connect()
    # The other volume, too, may be locked by the mover that can't die: what it did not close before it was killed is closed with its last thread.
    assert node.daemon.status().volumes[0].state.split(":")[0] in ("opening", "retrying")
    assert node.evict(["in the arena"], ack=AckLevel.COPIED, tier=Tier.ARENA).all_stored
    assert node.engine.restore([1], ["in the arena"]).restored_count == 1
    assert threads_in_d_state(mover) > 0
    node.device.lift()
    node.daemon.wait_until(lambda: all(volume.state == "serving" for volume in node.daemon.status().volumes), "the volumes' return", timeout_s=120)
    assert node.outcomes() == {"RESTORED": COUNT}

"""A volume that hangs in the kernel, beside one that is well: whatever does not need it goes on while it hangs, and it is used again once it answers.

The hang is the stand-ins' (tests/standin): calls on one file wait until the test lets them go.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offloadd.client import AckLevel, Client, Tier
from offloadd.units import KIB, MIB

from ..standin.build import build, compiler
from ..standin.controls import Control, Fault, environment
from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat

COUNT = 8
BLOCK_BYTES = 64 * KIB
ARENA_BYTES = 16 * MIB
#: An eighth of the arena: so many blocks at most are on their way to one volume.
SHARE = ARENA_BYTES // 8 // BLOCK_BYTES
NAMES = [f"durable {index}" for index in range(COUNT)]


class Node:
    """A daemon with two volumes, an engine, and durable blocks on the first of them."""

    def __init__(self, make_daemon: Callable[..., DaemonProcess], folder: Path) -> None:
        self.control = Control.create(folder / "control")
        paths = build(folder / "standin")
        self.daemon = make_daemon(volume_count=2, volume_bytes=160 * MIB, arena_bytes=ARENA_BYTES, environment=environment(paths, self.control))
        self.daemon.wait_until(lambda: all(volume.state == "serving" for volume in self.daemon.status().volumes), "the volumes")
        self.client = Client.connect(self.daemon.runtime_dir, instance="engine", timeout_s=60)
        self.engine = Engine(self.client, flat(64, BLOCK_BYTES))
        warm = iter(range(1000))
        self.daemon.wait_until(lambda: self._evict_durable([f"warm {next(warm)}"]) and all(self._counts()), "an open slab on each volume")
        before = self._counts()
        assert self._evict_durable(NAMES)
        # In stripes of equal length: half of them lie on each volume.
        assert [after - count for after, count in zip(self._counts(), before, strict=True)] == [COUNT // 2, COUNT // 2]

    def _evict_durable(self, names: list[str]) -> bool:
        return bool(self.engine.evict(range(len(names)), names, ack=AckLevel.DURABLE, deadline_s=120).all_stored)

    def _counts(self) -> list[int]:
        return [volume.block_count for volume in self.daemon.status().volumes]

    def hang(self, call: str, volume: int = 0) -> Fault:
        return self.control.hang(f"{call} {self.daemon.volumes[volume].stat().st_ino}")

    def wait_for(self, *states: str) -> None:
        """Until the first volume's breaker of writes is in one of these states."""
        self.daemon.wait_until(lambda: self.daemon.status().volumes[0].writes_breaker.startswith(states), " or ".join(states), timeout_s=120)

    def outcomes(self) -> dict[tuple[str, str], int]:
        """Of a restore of the durable blocks."""
        answer = self.engine.restore(range(32, 32 + COUNT), NAMES, deadline_s=120)
        found: dict[tuple[str, str], int] = {}
        for one in answer.outcomes:
            found[one.status.name, one.reason.name] = found.get((one.status.name, one.reason.name), 0) + 1
        return found

    def probes(self) -> int:
        """How often the keeper of the first volume has read it."""
        volume = self.daemon.volumes[0]
        return self.control.process(self.daemon.worker_pid(f"keeper {volume}")).calls.get(f"preadv {volume.stat().st_ino}", 0)

    def close(self) -> None:
        self.control.reset()
        self.client.close()


@pytest.fixture
def node(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> Iterator[Node]:
    if compiler() is None:
        pytest.skip("gcc is not installed")
    made = Node(make_daemon, tmp_path)
    yield made
    made.close()


def test_copied_evicts_are_stored_and_spilled_to_the_other_volume_while_every_write_to_one_hangs(node: Node) -> None:
    daemon, engine = node.daemon, node.engine
    with node.hang("pwritev") as writes:
        for number in range(100):
            answer = engine.evict(range(COUNT), [f"{number} {index}" for index in range(COUNT)], deadline_s=300)
            assert answer.all_stored, (number, answer.outcomes)
            # What is on its way to the volume that hangs may be as much as its share; all else is spilled, and the arena never fills with what waits.
            daemon.wait_until(lambda number=number: daemon.counters().get("spilled_blocks", 0) >= COUNT * (number + 1) - SHARE, "the spills", timeout_s=120)
        node.wait_for("open")
        daemon.wait_until(lambda: daemon.counters()["spilled_blocks"] == 100 * COUNT, "the spills that were carried to the other volume", timeout_s=120)
        assert writes.waiting_now > 0, "the volume does not hang any more"
        # Restores of what lies only there fail at once; the others are restored; nothing goes there.
        assert node.outcomes() == {("RESTORED", "NONE"): COUNT // 2, ("FAILED", "VOLUME_DOWN"): COUNT // 2}
        assert engine.evict([0], ["durable beside it"], ack=AckLevel.DURABLE, deadline_s=300).all_stored
        offered = [node.client.lookup([engine.region], engine.blocks([0], [name]).hashes).held_count for name in NAMES]
        assert sum(offered) == COUNT // 2, "blocks that can't be had back are offered"
        assert writes.waiting_now > 0
    # Writes that hung end now; one of them may come behind the probe, and decide.
    node.wait_for("half-open", "closed")
    assert node.outcomes() == {("RESTORED", "NONE"): COUNT}
    more = [f"after {index}" for index in range(2 * COUNT)]
    assert engine.evict(range(2 * COUNT), more, ack=AckLevel.DURABLE, deadline_s=300).all_stored
    node.wait_for("closed")
    assert daemon.counters().get("faults", 0) == 0


def test_requests_that_wait_for_a_volume_that_hangs_are_answered_long_before_their_deadlines_and_probes_bring_it_back(node: Node) -> None:
    before = node.probes()
    with node.hang("preadv"):
        assert node.outcomes() == {("RESTORED", "NONE"): COUNT // 2, ("FAILED", "VOLUME_DOWN"): COUNT // 2}
        # Its probes hang, too: it stays off.
        node.daemon.wait_until(lambda: node.probes() > before, "a probe that hangs")
        assert node.daemon.status().volumes[0].reads_breaker.startswith("open")
        evicted = node.engine.evict([0], ["in the arena"], tier=Tier.ARENA, deadline_s=300)
        assert evicted.all_stored and node.engine.restore([1], ["in the arena"]).restored_count == 1
    node.daemon.wait_until(lambda: node.daemon.status().volumes[0].reads_breaker == "closed", "the volume's return", timeout_s=120)
    assert node.outcomes() == {("RESTORED", "NONE"): COUNT}
    assert all(node.engine.holds(32 + index, name) for index, name in enumerate(NAMES))
    log = node.daemon.log.read_text()
    assert "volume is not used" in log and "volume is used again" in log and "nvme=" in log


def test_a_daemon_starts_beside_a_volume_that_hangs_and_serves_it_once_it_answers(node: Node) -> None:
    node.client.close()
    node.daemon.stop()
    with node.hang("preadv") as opening:
        node.daemon.start()
        status = node.daemon.status()
        assert opening.waiting_now > 0 and status.volumes[0].state == "opening" and status.volumes[1].state in ("recovering", "serving")
        assert "volume does not answer; serving without it until it does" in node.daemon.log.read_text()
        node.client = Client.connect(node.daemon.runtime_dir, instance="engine", timeout_s=60)
        node.engine = Engine(node.client, flat(64, BLOCK_BYTES))
        assert node.outcomes() == {("RESTORED", "NONE"): COUNT // 2, ("NOT_FOUND", "NONE"): COUNT // 2}
        assert node.engine.evict([0], ["beside it"], ack=AckLevel.DURABLE, deadline_s=120).all_stored
        assert opening.waiting_now > 0
    node.daemon.wait_until(lambda: node.daemon.status().volumes[0].state == "serving", "the volume's return", timeout_s=120)
    assert node.outcomes() == {("RESTORED", "NONE"): COUNT}

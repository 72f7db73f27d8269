"""A daemon with a memory limit of what its configuration needs lives, whatever clients do. Needs root (see memory_limit.py)."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import pytest

from offloadd.client import AckLevel, Client, Tier
from offloadd.config import load_config
from offloadd.config.needs import memory_needs
from offloadd.units import KIB, MIB

from .crowd import BLOCKS, Crowd
from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat
from .memory_limit import MemoryLimit, memory_limit
from .test_soak import live

ARENA_BYTES = 128 * MIB
CLIENTS = 64
LIMITS: dict[str, object] = {
    "sessions_max": 100,
    "connections_max": 110,
    "calls_max": 64,
    "requests_max": 48,
    "requests_per_session_max": 16,
    "blocks_in_flight_per_session_max": 32 * 1024,
    "blocks_in_flight_max": 64 * 1024,
    "index_bytes_max": 16 * MIB,
}


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[tuple[DaemonProcess, MemoryLimit]]:
    runtime_dir = Path(tempfile.mkdtemp(prefix="ofl-"))
    daemon = DaemonProcess(folder=tmp_path, runtime_dir=runtime_dir / "0", arena_bytes=ARENA_BYTES, limits=LIMITS, io_threads=4)
    daemon.format()
    daemon.write_config()
    with memory_limit(sum(need.bytes for need in memory_needs(load_config(daemon.config)))) as limit:
        daemon.cgroup = limit.path
        try:
            daemon.start()
            yield daemon, limit
        finally:
            daemon.close()
            print(daemon.log.read_text())
            rmtree(runtime_dir, ignore_errors=True)


def _fill(daemon: DaemonProcess) -> None:
    """Both tiers, and back from them."""
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client:
        engine = Engine(client, flat(256, 512 * KIB))
        names = [f"block {number}" for number in range(256)]
        assert engine.evict(range(256), names, tier=Tier.ARENA).all_stored
        for round_number in range(3):
            answer = engine.evict(range(64), [f"durable {round_number} {number}" for number in range(64)], ack=AckLevel.DURABLE)
            assert answer.all_stored
        assert engine.restore(range(256), names).restored_count == 256
        assert all(engine.holds(number, names[number]) for number in range(0, 256, 17))


def test_a_daemon_that_may_take_what_its_configuration_needs_lives_under_load(limited: tuple[DaemonProcess, MemoryLimit]) -> None:
    daemon, limit = limited
    _fill(daemon)
    # All of the arena has been touched, and is the daemon's.
    assert limit.stat("shmem") >= ARENA_BYTES
    crowd = Crowd(daemon.runtime_dir, CLIENTS, "crowd")
    try:
        assert crowd.answer() == {"attached": CLIENTS, "refused": {}}
        for _ in range(3):
            crowd.order(calls=4, blocks=BLOCKS)
            answer = crowd.answer()
            assert answer["ok"] + answer["codes"].get("RESOURCE_EXHAUSTED", 0) == CLIENTS * 4
    finally:
        crowd.close()
    live(daemon, 1000, "limited")
    _fill(daemon)
    assert limit.killed_count == 0
    assert [worker.restart_count for worker in daemon.status().workers] == [0, 0]
    print(f"at most {limit.most_bytes / MIB:.0f} of {limit.limit_bytes / MIB:.0f} MiB; reached {limit.refused_count} times")

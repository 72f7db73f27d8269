"""P11: whatever clients do, and however often, the daemon's memory, descriptors, threads, regions, pins and slots stay what they are."""

import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from offloadd.client import AckLevel, Client, Tier
from offloadd.units import KIB, MIB

from ..torture import Rounds
from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat
from .footprint import Footprint

ROOT = Path(__file__).parents[2]
#: After so many requests all that is made once has been made: tiers full, index touched, threads started, tables at their size.
WARM_REQUESTS = 10_000
#: Of one process of engines, which dies then.
LIFE_REQUESTS = 1250
PROCESSES = 2
GROWTH_BYTES_MAX = 4 * MIB
LIFE_TIMEOUT_S = 600
BLOCK_BYTES = 8 * KIB


def live(daemon: DaemonProcess, requests: int, name: str) -> Counter[str]:
    """So many requests, by engines that die."""
    told: Counter[str] = Counter()
    running: list[subprocess.Popen[str]] = []
    begun = 0
    while begun < requests or running:
        while begun < requests and len(running) < PROCESSES:
            life = min(LIFE_REQUESTS, requests - begun)
            command = [sys.executable, "-m", "tests.system.soak_client", str(daemon.runtime_dir), f"{name} {begun}", str(life)]
            running.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            begun += life
        process = running.pop(0)
        output, _ = process.communicate(timeout=LIFE_TIMEOUT_S)
        assert process.returncode == -9 and output, f"engines ended with {process.returncode} before their time"
        told.update(json.loads(output))
        told["deaths"] += 1
    return told


def _metrics(daemon: DaemonProcess) -> dict[str, float]:
    url = next(word.removeprefix("metrics=") for word in daemon.log.read_text().split() if word.startswith("metrics=http"))
    with urllib.request.urlopen(url, timeout=60) as page:
        lines = page.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def _mapped_regions(daemon: DaemonProcess) -> int:
    maps = Path(f"/proc/{daemon.worker_pid('mover')}/maps").read_text()
    return sum("/memfd:kv " in line for line in maps.splitlines())


def _quiet(daemon: DaemonProcess) -> None:
    """Wait until everything of the engines is gone."""
    gauges = ("sessions", "regions", "requests", "blocks_in_flight", "bytes_in_flight")

    def gone() -> bool:
        shown = _metrics(daemon)
        return all(shown[f"offloadd_{name}"] == 0 for name in gauges) and _mapped_regions(daemon) == 0 and daemon.status().held_count == 0

    daemon.wait_until(gone, "the end of what dead engines held", timeout_s=120)
    time.sleep(1)


def _room(daemon: DaemonProcess) -> tuple[int, int]:
    """How many blocks can be kept in the arena and on the volume: a slot that is pinned or lost for ever is one less."""
    with Client.connect(daemon.runtime_dir, instance="room", timeout_s=60) as client:
        engine = Engine(client, flat(4096, BLOCK_BYTES))
        names = [f"room {number}" for number in range(4096)]
        stored = []
        for options in ({"tier": Tier.ARENA}, {"ack": AckLevel.DURABLE}):
            answer = engine.evict(range(4096), names, fill=False, keep=True, deadline_s=120, **options)
            stored.append(sum(outcome.stored for outcome in answer.outcomes))
            client.release_all()
    return stored[0], stored[1]


@pytest.mark.torture("P11")
@pytest.mark.timeout(900)
def test_nothing_grows_with_requests_errors_cancels_reconnects_and_deaths(
    make_daemon: Callable[..., DaemonProcess], rounds: Rounds, record_property: Callable[[str, object], None]
) -> None:
    """What is compared is the sum over the front, mover and keeper of what is private to each, not RSS: the arena's pages are counted in each that touched
    them, and engines' pages come and go with the engines."""
    requests = rounds(2 * WARM_REQUESTS, 1_000_000, "requests")
    daemon = make_daemon(volume_bytes=32 * MIB, slab_bytes=4 * MIB, arena_bytes=16 * MIB)
    assert daemon.process is not None
    front = daemon.process.pid
    room = _room(daemon)
    told = live(daemon, WARM_REQUESTS, "warm")
    _quiet(daemon)
    before = Footprint.of(front)
    start_s = time.monotonic()
    told += live(daemon, requests - WARM_REQUESTS, "soak")
    record_property("requests a second", round((requests - WARM_REQUESTS) / (time.monotonic() - start_s)))
    _quiet(daemon)

    # Threads of gRPC's pool that were made for a burst end after some seconds.
    def settled() -> bool:
        now = Footprint.of(front)
        return now.fds <= before.fds and now.threads <= before.threads and now.shm_files <= before.shm_files and now.processes <= before.processes

    daemon.wait_until(settled, f"the return to the descriptors, threads, files in /dev/shm and processes of {before}", timeout_s=120)
    after = Footprint.of(front)
    growth = after.private_bytes - before.private_bytes
    record_property("growth", f"{growth / MIB:.1f} MiB of {before.private_bytes / MIB:.0f} MiB")
    record_property("deaths", told["deaths"])
    print(json.dumps(told, indent=2, sort_keys=True))
    print(before, after)
    # It really did all that.
    assert told["WRONG BYTES"] == 0
    assert told["requests"] >= requests
    for what in (
        "hung up on",
        "error INVALID_ARGUMENT",
        "error NOT_FOUND",
        "cancel found True",
        "sessions ended",
        "registered again",
        "released",
        "lookup held",
    ):
        assert told[what] > requests / 5000, what
    assert sum(count for what, count in told.items() if what.startswith("late") and "STORED" not in what) > requests / 1000
    assert told["restore RESTORE_STATUS_RESTORED REASON_UNSPECIFIED"] > requests / 10
    assert daemon.counters().get("faults", 0) == 0
    assert growth <= GROWTH_BYTES_MAX
    assert _room(daemon) == room

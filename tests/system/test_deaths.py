"""P16: an engine, the mover or the front is killed in each state that a request can be in. What the dead one held is free, others go on, and no byte is wrong.

A state is reached by order, never by time: the mover's I/O and copies are held (`held_mover`) until the kill, or until the front has noticed it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest

from offloadd.client import AckLevel, AdminClient, Client, Tier
from offloadd.errors import OffloaddError, Unavailable
from offloadd.units import MIB

from ..standin_tests.child import Child
from ..torture import Rounds, Within
from .daemon_process import DaemonProcess
from .doomed import BLOCK_BYTES, COUNT
from .engine_memory import Engine, flat
from .held_daemon import PREFIX

ROOT = Path(__file__).parents[2]
#: Of the volume's lane.
THREADS = 4
#: Ten times what P16 gives a dead engine's belongings.
LIMIT_S = 20.0
DURABLE = [f"other durable {number}" for number in range(COUNT)]


@dataclass(frozen=True)
class State:
    """`enter`: what the doomed engine does, after it has registered if it does that. `holds`: calls of the mover that are held from then on. `then`: what it
    does once they are. `reached`: what the daemon counts in the end."""

    enter: str
    holds: tuple[str, ...] = ()
    then: str = ""
    reached: tuple[tuple[str, int], ...] = ()
    registers: bool = True

    @property
    def holds_copies(self) -> bool:
        """Whether a copy is held. Real ones end within milliseconds, so that nobody is to be served before it has."""
        return "gather" in self.holds or "scatter" in self.holds

    @property
    def ends_registered(self) -> bool:
        """Whether it has a region afterwards."""
        return self.registers and not self.then.startswith("doomed.unregister")

    @property
    def volume_is_free(self) -> bool:
        """Whether a thread of the volume's lane is."""
        return not self.holds_copies and len(self.holds) < THREADS


_FILL_LANE = f"for number in range({THREADS}): doomed.begin_{{}}"

STATES = {
    "attached": State("", registers=False),
    "registered": State("", reached=(("regions", 2),)),
    "evict queued": State(
        _FILL_LANE.format("evict(f'held {number}', ack=AckLevel.DURABLE)") + "\ndoomed.begin_evict('queued', ack=AckLevel.DURABLE)",
        holds=("write",) * THREADS,
        reached=(("requests", THREADS + 1),),
    ),
    "gathering": State("doomed.begin_evict('copied')", holds=("gather",), reached=(("requests", 1),)),
    "copied, being written": State(
        "doomed.begin_evict('copied', path=Path.HOST); doomed.requests[0][3].finish()", holds=("write",), reached=(("requests", 0), ("moves under way", 1))
    ),
    "copied, being spilled": State(
        "doomed.begin_evict('copied'); doomed.requests[0][3].finish()", holds=("write",), reached=(("requests", 0), ("moves under way", 1))
    ),
    "waiting for durable": State("doomed.begin_evict('new', ack=AckLevel.DURABLE)", holds=("write",), reached=(("requests", 1),)),
    "restore planned": State(
        _FILL_LANE.format("restore('durable')") + "\ndoomed.begin_restore('durable')", holds=("read",) * THREADS, reached=(("requests", THREADS + 1),)
    ),
    "restore waiting for its evict": State(
        "doomed.begin_evict('new', ack=AckLevel.DURABLE)\ndoomed.begin_restore('new')", holds=("write",), reached=(("requests", 2), ("moves under way", 1))
    ),
    "reading": State("doomed.begin_restore('durable')", holds=("read",), reached=(("requests", 1),)),
    "scattering": State("doomed.begin_restore('durable')", holds=("scatter",), reached=(("requests", 1),)),
    "scattering from the arena": State(
        "doomed.evict_now(doomed.names('arena'), tier=Tier.ARENA); doomed.begin_restore('arena')", holds=("scatter",), reached=(("requests", 1),)
    ),
    "lease held": State("doomed.lease()", reached=(("kept or leased", COUNT),)),
    "keep held": State("doomed.evict_now(doomed.names('kept'), keep=True)", reached=(("kept or leased", COUNT),)),
    "cancel in progress": State(
        "doomed.begin_restore('durable', request_id='r')",
        holds=("scatter",),
        then="assert doomed.client.cancel('r')",
        reached=(("fences", 1),),
    ),
    "closing": State("doomed.begin_restore('durable')", holds=("scatter",), then="doomed.unregister()", reached=(("regions", 1), ("requests", 1))),
    "draining": State("doomed.begin_evict('new', ack=AckLevel.DURABLE)", holds=("write",), reached=(("requests", 1),)),
}


class World:
    """A daemon, and an engine that nobody kills; one doomed engine after the other."""

    def __init__(self, folder: Path, runtime_dir: Path, held: ExitStack) -> None:
        self.holds = folder / "holds"
        self.holds.mkdir()
        self.daemon = DaemonProcess(
            folder=folder,
            runtime_dir=runtime_dir,
            volume_bytes=256 * MIB,
            io_threads=THREADS,
            command=("-m", "tests.system.held_daemon"),
            environment={**os.environ, "OFFLOADD_TEST_HOLDS": str(self.holds), "PYTHONPATH": str(ROOT)},
        )
        held.callback(self.daemon.close)
        self.daemon.format()
        self.daemon.start()
        self.client = held.enter_context(Client.connect(self.daemon.runtime_dir, instance="other", timeout_s=60))
        self.other = Engine(self.client, flat(64, BLOCK_BYTES))
        assert self.other.evict(range(COUNT), DURABLE, ack=AckLevel.DURABLE, deadline_s=120).all_stored
        self._turn = 0
        self.doomed = Child({})

    # -- what the daemon holds -------------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        return {name.removeprefix(PREFIX): count for name, count in self.daemon.counters().items() if name.startswith(PREFIX)}

    def mapped(self) -> int:
        """Engine memories that the mover has mapped."""
        return Path(f"/proc/{self.daemon.worker_pid('mover')}/maps").read_text().count("memfd:kv")

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        self.daemon.wait_until(condition, f"{what}: {self.counts()}", timeout_s=120)

    # -- the doomed engine -----------------------------------------------------------------------------------------------------------

    def enter(self, state: State) -> dict[str, int]:
        """A new engine comes into this state. What the daemon held before."""
        self._turn += 1
        self.doomed.close()
        self.wait_for("rest", lambda: self.counts()["sessions"] == 1 and self.counts()["moves under way"] == 0)
        before = self.counts()
        self.doomed = Child({**os.environ, "PYTHONPATH": str(ROOT)})
        self.doomed.run("from tests.system.doomed import *")
        self.doomed.run(f"doomed = Doomed({str(self.daemon.runtime_dir)!r}, 'cycle {self._turn}')" + ("; doomed.register()" if state.registers else ""))
        self.wait_for("the engine's own rest", lambda: self.counts()["moves under way"] == 0)
        for number, point in enumerate(state.holds):
            (self.holds / f"{point}-{number}").touch()
        self.doomed.run(state.enter)
        self.wait_for("what is held", lambda: len(list(self.holds.glob("*.held"))) == len(state.holds))
        self.doomed.run(state.then)
        self.wait_for("the state", lambda: all(self.counts()[name] == count for name, count in state.reached))
        return before

    def release(self) -> None:
        """What is held goes on, and nothing will be held."""
        for path in self.holds.iterdir():
            path.unlink()

    # -- the other engine ------------------------------------------------------------------------------------------------------------

    def other_goes_on(self, *, by_volume: bool = True) -> None:
        """Its blocks are right, and new ones can be stored."""
        tiers: list[dict[str, Any]] = [{"tier": Tier.ARENA}, *([{"ack": AckLevel.DURABLE}] if by_volume else [])]
        for options in tiers:
            new = [f"other {self._turn} {time.monotonic_ns()} {number}" for number in range(COUNT)]
            assert self.other.evict(range(8, 8 + COUNT), new, deadline_s=120, **options).all_stored
            self.is_right(new)
        if by_volume:
            self.is_right(DURABLE)

    def finds_what_was_stored(self) -> None:
        """All that the doomed engine was told DURABLE is there, whatever is found has its bytes, and new requests work."""
        found = self.doomed.run("result = doomed.found()")
        assert found["durable"] == found["durable in all"], found
        self.doomed.run("doomed.goes_on()")

    def is_right(self, names: list[str]) -> None:
        self.other.wipe()
        assert self.other.restore(range(32, 32 + COUNT), names, deadline_s=120).restored_count == COUNT
        assert all(self.other.holds(32 + place, name) for place, name in enumerate(names))

    # -- draining --------------------------------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """The daemon drains from now on."""

        def drain() -> None:
            try:
                with AdminClient(self.daemon.runtime_dir) as admin:
                    admin.drain()
            except OffloaddError:
                # The front was killed: nobody answers.
                return

        threading.Thread(target=drain, daemon=True).start()
        self.wait_for("the drain", lambda: self.daemon.status().state == "DRAINING")

    def end_drain(self) -> None:
        """It ends well, and comes back."""
        assert self.daemon.process is not None
        assert self.daemon.process.wait(60) == 0
        self.daemon.start()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    runtime = Path(mkdtemp(prefix="ofl-"))
    with ExitStack() as held:
        made = World(tmp_path_factory.mktemp("deaths"), runtime / "run", held)
        yield made
        made.release()
        made.doomed.close()
        print(f"--- log\n{made.daemon.log.read_text()}")
    rmtree(runtime, ignore_errors=True)


@pytest.fixture(autouse=True)
def end_of_a_cycle(world: World) -> Iterator[None]:
    yield
    # Also after a failure: the next cycle finds a daemon without holds, and without the engine of this one.
    world.release()
    world.doomed.close()
    if world.daemon.process is None or world.daemon.process.poll() is not None:
        world.daemon.start()


@pytest.mark.torture("P16")
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_an_engine_that_is_killed_frees_all_that_it_held_and_another_goes_on(
    world: World, state: State, rounds: Rounds, within: Within, record_property: Callable[[str, object], None]
) -> None:
    freed_s = [kill_engine(world, state) for _ in range(rounds(1, 12, "kills"))]
    record_property("all that it held was free after at most", f"{max(freed_s):.2f} s")
    assert max(freed_s) <= within(2.0)


def kill_engine(world: World, state: State) -> float:
    """One cycle. Seconds until all that it held was free, less those in which the test held it."""
    before = world.enter(state)
    mapped = world.mapped()
    drains = state is STATES["draining"]
    if drains:
        world.begin_drain()
    world.doomed.kill()
    begin = time.monotonic()
    world.daemon.wait_until(lambda: world.counts()["sessions"] == before["sessions"], "the end of the session", timeout_s=LIMIT_S)
    noticed_s = time.monotonic() - begin
    if state.holds and not state.holds_copies and not drains:
        # What is held now stays with its I/O, which the test holds; nobody else waits for it.
        world.other_goes_on(by_volume=state.volume_is_free)
    begin = time.monotonic()
    world.release()
    if drains:
        world.end_drain()
    else:
        world.daemon.wait_until(lambda: world.counts() == before, f"that nothing is held: {before}", timeout_s=LIMIT_S)
        world.daemon.wait_until(lambda: world.mapped() == mapped - state.registers, "the unmapping", timeout_s=LIMIT_S)
    freed_s = 0.0 if drains else time.monotonic() - begin
    world.other_goes_on()
    assert world.daemon.counters().get("faults", 0) == 0
    return noticed_s + freed_s


@pytest.mark.torture("P16")
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_mover_that_is_killed_costs_outcomes_and_no_bytes_and_its_successor_serves(world: World, state: State, rounds: Rounds) -> None:
    for _ in range(rounds(1, 12, "kills")):
        kill_mover(world, state)


#: Of blocks whose mover was killed.
OF_A_MOVER = {("STORED", "NONE"), ("RESTORED", "NONE"), ("FAILED", "WORKER_LOST"), ("FAILED", "CANCELLED"), ("NOT_FOUND", "NONE")}


def kill_mover(world: World, state: State) -> None:
    """One cycle."""
    before = world.enter(state)
    drains = state is STATES["draining"]
    if drains:
        world.begin_drain()
    pid = world.daemon.kill_worker("mover")
    world.release()
    told = world.doomed.run("result = doomed.finish()")
    assert {tuple(outcome) for _, *outcomes in told for outcome in outcomes} <= OF_A_MOVER, told
    if drains:
        world.end_drain()
    else:
        world.wait_for("the mover's restart", lambda: world.daemon.worker_pid("mover") not in (0, pid))
    if state.ends_registered:
        world.finds_what_was_stored()
    world.other_goes_on()
    world.doomed.run("doomed.client.close()")
    if not drains:
        world.wait_for("that nothing is held", lambda: world.counts() == before)
    assert world.daemon.counters().get("faults", 0) == 0


@pytest.mark.torture("P16")
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_front_that_is_killed_is_found_again_with_its_durable_blocks(world: World, state: State, rounds: Rounds) -> None:
    for _ in range(rounds(1, 12, "kills")):
        kill_front(world, state)


#: Of blocks whose front was killed: calls are repeated to the next one.
OF_A_FRONT = {("STORED", "NONE"), ("DUPLICATE", "NONE"), ("RESTORED", "NONE"), ("NOT_FOUND", "NONE")}


def kill_front(world: World, state: State) -> None:
    """One cycle."""
    world.enter(state)
    if state is STATES["draining"]:
        world.begin_drain()
    with Client.connect(world.daemon.runtime_dir, instance="impatient", timeout_s=0.2) as impatient:
        world.daemon.stop(signal.SIGKILL)
        world.release()
        with pytest.raises(Unavailable) as refused:
            impatient.capabilities()
        assert (refused.value.retry_after_s or 0) > 0, "nobody is told when to repeat"
    world.daemon.start()
    # Whatever was under way is repeated by the client, which attaches again by itself, or told as lost.
    for _, *outcomes in world.doomed.run("result = doomed.finish()"):
        if outcomes and isinstance(outcomes[0], str):
            # A call whose region the client itself has unregistered meanwhile is not repeated.
            assert outcomes[0] == ("Unavailable" if state.ends_registered else "UnknownRegion"), outcomes
        else:
            assert {tuple(outcome) for outcome in outcomes} <= OF_A_FRONT, outcomes
    if state.ends_registered:
        world.finds_what_was_stored()
    world.other_goes_on()

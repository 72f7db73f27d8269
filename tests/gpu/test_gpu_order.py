"""Copies keep the order that an engine's events demand, and nothing waits for ever for an engine that does not come."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offloadd.units import KIB

from ..standin.controls import Control, Process, wait_until
from ..standin_tests.child import Child
from ..system.daemon_process import DaemonProcess
from .conftest import Node

COUNT = 16
#: K and V of two layers, apart.
SHAPE: dict[str, object] = {
    "block_count": COUNT,
    "memory_bytes": [4 * COUNT * 8 * KIB],
    "planes": [(0, plane * COUNT * 8 * KIB, 8 * KIB, 8 * KIB) for plane in range(4)],
}
EVICT = {"ddr": "tier='ARENA'", "bounce": "durable=True"}
RESTORE = {"ddr": "path='DDR', require_path=True", "bounce": "path='BOUNCE', require_path=True"}


class Scene:
    """A GPU's mover, and an engine with an event and a stream, in which work can be held."""

    def __init__(self, node: Node, daemon: DaemonProcess, make_engine: Callable[..., None], weights: str) -> None:
        self.node, self.daemon, self.weights = node, daemon, weights
        self._make_engine = make_engine
        self.mover: Process = node.mover(daemon)
        # The engines of the test before are gone.
        wait_until(lambda: not self.mover.counters.memory_handles_open_now, "the end of old mappings")
        self.engine = self.new_engine()

    def new_engine(self, **options: object) -> Child:
        engine = self.node.engine()
        self._make_engine(engine, self.daemon, **SHAPE, weights=self.weights, **options)
        engine.run("stream, event = stream_and_event()")
        return engine

    @property
    def control(self) -> Control:
        assert self.node.control is not None
        return self.node.control

    def hold(self) -> None:
        """The engine's GPU does nothing more."""
        self.control.process(self.engine.pid).hold()

    def release(self) -> None:
        """It does all that was queued."""
        self.control.process(self.engine.pid).release()
        self.engine.run("ok(cu.cuStreamSynchronize(stream))")

    def ask(self, call: str) -> None:
        """Begin a request in a thread of the engine, and wait until the mover looks at its event, or has answered."""
        looked = self.looks()
        self.engine.run(f"request = Request(lambda: {call})")
        wait_until(lambda: self.looks() > looked + 2 or self.answered(), "the mover's looks at the event")

    def looks(self) -> int:
        """At events, by the mover. It also looks at its own, at the end of copies."""
        return self.mover.calls.get("cuEventQuery", 0)

    def copied(self) -> int:
        """Bytes that the mover has copied, either way."""
        counters = self.mover.counters
        return counters.device_to_host_bytes + counters.host_to_device_bytes

    def answered(self) -> bool:
        return bool(self.engine.run("result = request.answer is not None"))

    def answer(self) -> Any:
        return self.engine.run("result = request.finish()")

    def store(self, way: str, prefix: str = "stored") -> None:
        """Blocks 0 to 7 are evicted under names, and get other bytes."""
        outcomes = self.engine.run(f"""
            names = [f"{prefix} {{number}}" for number in range(8)]
            for number, name in enumerate(names):
                engine.write(number, name)
            result = engine.evict(range(8), names, {EVICT[way]})["outcomes"]
            for number in range(8):
                engine.write(number, "other")
        """)
        assert {outcome[0] for outcome in outcomes} == {"STORED"}

    def works(self) -> None:
        """Requests without and with an event are served."""
        evicted, restored, wrong = self.engine.run("""
            for number in range(8):
                engine.write(number, f"later {number}")
            later = [f"later {number}" for number in range(8)]
            event.record(int(stream))
            evicted = engine.evict(range(8), later, durable=True, source_ready=event.handle)["outcomes"]
            restored = engine.restore(range(8, 16), later)["outcomes"]
            result = [evicted, restored, engine.wrong(range(8, 16), later)]
        """)
        assert {outcome[0] for outcome in evicted} == {"STORED"}
        assert {outcome[0] for outcome in restored} == {"RESTORED"}
        assert wrong == []


@pytest.fixture(scope="module")
def daemon(shared_node: Node) -> DaemonProcess:
    # One thread in the lane of the arena: whoever keeps it keeps the lane. That of the volume has 8, one for each block of a request here.
    return shared_node.daemon(mover={"lane_threads": 1, "verify_target": 1})


@pytest.fixture
def scene(shared_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None], request: pytest.FixtureRequest) -> Iterator[Scene]:
    # Names of another test's blocks, with other bytes, are names in another namespace.
    yield Scene(shared_node, daemon, make_engine, request.node.name)
    shared_node.end_engines()


@pytest.mark.parametrize("way", EVICT)
def test_an_evict_stores_what_the_work_before_source_ready_wrote(scene: Scene, way: str) -> None:
    scene.store(way)
    # The event has come before, and was opened then: it is the latest record that counts.
    scene.engine.run(f"""
        event.record(int(stream))
        engine.evict([8], ["before"], {EVICT[way]}, source_ready=event.handle)
    """)
    scene.hold()
    scene.engine.run("""
        engine.queue(stream, range(8), "new")
        event.record(int(stream))
        hashes = [f"new {number}" for number in range(8)]
    """)
    before = scene.copied()
    scene.ask(f"engine.evict(range(8), hashes, {EVICT[way]}, source_ready=event.handle)")
    waited, copied = not scene.answered(), scene.copied() - before
    scene.release()
    evicted = scene.answer()
    restored, equal = scene.engine.run(f"""
        restored = engine.restore(range(8, 16), hashes, {RESTORE[way]})["outcomes"]
        result = [restored, [engine.read(index) == engine.expected("new") for index in range(8, 16)]]
    """)
    assert equal == [True] * 8, "blocks were gathered before the engine had written them"
    assert waited and copied == 0
    assert {outcome[0] for outcome in evicted["outcomes"]} == {"STORED"}
    assert {outcome[0] for outcome in restored} == {"RESTORED"}


@pytest.mark.parametrize("way", RESTORE)
def test_a_restore_lands_after_the_work_before_destination_free(scene: Scene, way: str) -> None:
    scene.store(way)
    scene.hold()
    # Work that still uses the destination: what it writes would stand over blocks that came too early.
    scene.engine.run("""
        engine.queue(stream, range(8, 16), "still in use")
        event.record(int(stream))
    """)
    before = scene.copied()
    scene.ask(f"engine.restore(range(8, 16), names, {RESTORE[way]}, destination_free=event.handle)")
    waited, copied = not scene.answered(), scene.copied() - before
    scene.release()
    restored = scene.answer()
    wrong = scene.engine.run("result = engine.wrong(range(8, 16), names)")
    assert wrong == [], "blocks were scattered before their places were free"
    assert waited and copied == 0
    assert {outcome[0] for outcome in restored["outcomes"]} == {"RESTORED"}


REQUESTS = {
    "evict to the arena": "engine.evict(range(8), hashes, tier='ARENA', source_ready=event.handle, {options})",
    "durable evict": "engine.evict(range(8), hashes, durable=True, source_ready=event.handle, {options})",
    "restore from the arena": "engine.restore(range(8, 16), names, destination_free=event.handle, {options})",
    "restore from a volume": "engine.restore(range(8, 16), names, path='BOUNCE', require_path=True, destination_free=event.handle, {options})",
}


def _with_an_event_that_does_not_come(scene: Scene, kind: str) -> None:
    scene.store("bounce" if "volume" in kind else "ddr")
    scene.engine.run("hashes, digest = [f'new {number}' for number in range(8)], engine.digest()")
    scene.hold()
    # Work that changes nothing, and is never done.
    scene.engine.run("""
        engine.queue(stream, range(8), "other")
        event.record(int(stream))
    """)


@pytest.mark.parametrize("kind", REQUESTS)
def test_an_event_that_never_comes_ends_the_request_at_its_deadline(scene: Scene, kind: str) -> None:
    _with_an_event_that_does_not_come(scene, kind)
    before = scene.copied()
    scene.ask(REQUESTS[kind].format(options="deadline_s=1.0"))
    answer = scene.answer()
    # QUARANTINED would say that a copy may still come: none can.
    assert {tuple(outcome[:2]) for outcome in answer["outcomes"]} == {("FAILED", "DEADLINE")}
    assert answer["paths"] == [] and scene.copied() == before
    scene.release()
    assert scene.engine.run("result = engine.digest() == digest")
    scene.works()


@pytest.mark.parametrize("kind", ["durable evict", "restore from the arena"])
def test_a_cancel_ends_a_request_that_waits_for_its_event(scene: Scene, kind: str) -> None:
    _with_an_event_that_does_not_come(scene, kind)
    before = scene.copied()
    scene.ask(REQUESTS[kind].format(options="deadline_s=120, request_id='it'"))
    assert scene.engine.run("result = engine.client.cancel('it')")
    answer = scene.answer()
    assert {tuple(outcome[:2]) for outcome in answer["outcomes"]} == {("FAILED", "CANCELLED")}
    assert answer["paths"] == [] and scene.copied() == before
    scene.release()
    assert scene.engine.run("result = engine.digest() == digest")
    scene.works()


@pytest.mark.parametrize("kind", ["evict to the arena", "restore from a volume"])
def test_an_engine_that_dies_before_its_event_leaves_nothing(scene: Scene, kind: str) -> None:
    _with_an_event_that_does_not_come(scene, kind)
    scene.ask(REQUESTS[kind].format(options="deadline_s=120"))
    assert scene.mover.counters.event_handles_open_now == 1
    scene.engine.kill()
    wait_until(lambda: not scene.mover.counters.memory_handles_open_now, "the end of the mapping")
    assert scene.mover.counters.event_handles_open_now == 0
    wait_until(lambda: not scene.daemon.status().sessions, "the end of the session")
    assert scene.node.mover(scene.daemon).pid == scene.mover.pid
    scene.engine = scene.new_engine()
    scene.works()


@pytest.mark.parametrize("kind", ["evict to the arena", "durable evict"])
def test_an_event_that_does_not_come_holds_up_no_other_engine(scene: Scene, kind: str) -> None:
    other = scene.new_engine(instance="other")
    stored = other.run("""
        names = [f"mine {number}" for number in range(4)]
        for number, name in enumerate(names):
            engine.write(number, name)
        result = [engine.evict([0, 1], names[:2], tier="ARENA"), engine.evict([2, 3], names[2:], durable=True)]
    """)
    assert {outcome[0] for answer in stored for outcome in answer["outcomes"]} == {"STORED"}
    _with_an_event_that_does_not_come(scene, kind)
    scene.ask(REQUESTS[kind].format(options="deadline_s=120"))
    restored, wrong = other.run("""
        restored = engine.restore(range(8, 12), names, deadline_s=5)["outcomes"]
        result = [restored, engine.wrong(range(8, 12), names)]
    """)
    assert not scene.answered()
    assert {tuple(outcome[:2]) for outcome in restored} == {("RESTORED", "NONE")}
    assert wrong == []


def test_events_are_refused_where_they_can_not_be_waited_for(scene: Scene) -> None:
    evict, restore, short, long = scene.engine.run("""
        from offloadd.client import HostMemory
        host = engine.client.register_region(
            block_count=2, planes=[Plane(0, 0, 4096, 4096)], memories=[HostMemory.allocate(8192)], namespace=engine.namespace
        )
        blocks = Blocks(host, [0], [b"name"])
        result = [
            Request(lambda: engine.client.evict(blocks, source_ready=event.handle)).finish()["error"],
            Request(lambda: engine.client.restore(blocks, destination_free=event.handle)).finish()["error"],
            Request(lambda: engine.evict([0], ["name"], source_ready=event.handle[:-1])).finish()["error"],
            Request(lambda: engine.restore([0], ["name"], destination_free=event.handle + b"0")).finish()["error"],
        ]
    """)
    assert evict == ["InvalidRequest", "source_ready is for regions on a GPU; this one is on device host"]
    assert restore == ["InvalidRequest", "destination_free is for regions on a GPU; this one is on device host"]
    assert short == ["InvalidRequest", "source_ready has a handle of 63 bytes; a CUDA IPC event handle has 64"]
    assert long == ["InvalidRequest", "destination_free has a handle of 65 bytes; a CUDA IPC event handle has 64"]
    scene.works()


@pytest.mark.parametrize("whose", ["nobody's", "a dead process's"])
def test_an_event_that_can_not_be_opened_fails_its_request_alone(scene: Scene, whose: str) -> None:
    if whose == "nobody's":
        handle = "2a" * 64
    else:
        dead = scene.node.engine()
        handle = dead.run("result = new_event().handle.hex()")
        dead.kill()
    scene.store("ddr")
    before = scene.copied()
    evicted, restored, same = scene.engine.run(f"""
        handle, digest = bytes.fromhex({handle!r}), engine.digest()
        evicted = engine.evict(range(8), [f"new {{number}}" for number in range(8)], source_ready=handle)
        restored = engine.restore(range(8, 16), names, destination_free=handle)
        result = [evicted, restored, engine.digest() == digest]
    """)
    assert {outcome[0] for answer in (evicted, restored) for outcome in answer["outcomes"]} == {"FAILED"}
    assert same and scene.copied() == before
    scene.works()

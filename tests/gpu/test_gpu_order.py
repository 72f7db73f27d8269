"""Copies keep the order that an engine's events and flags demand, and nothing waits for ever for an engine that does not come."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offloadd.model.device_event import FLAG_WORD_BYTES
from offloadd.units import KIB, MIB

from ..standin.controls import Control, Process, wait_until
from ..standin_tests.child import Child
from ..system.daemon_process import DaemonProcess
from .conftest import Node

#: CUresult.
MAP_FAILED = 205

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
    """A GPU's mover, and an engine with an event or a flag and a stream, in which work can be held."""

    def __init__(self, node: Node, daemon: DaemonProcess, make_engine: Callable[..., None], weights: str, kind: str) -> None:
        self.node, self.daemon, self.weights, self.kind = node, daemon, weights, kind
        self._make_engine = make_engine
        self.mover: Process = node.mover(daemon)
        # The engines of the test before are gone.
        wait_until(lambda: not self.mover.counters.memory_handles_open_now, "the end of old mappings")
        self.engine = self.new_engine()

    def new_engine(self, **options: object) -> Child:
        engine = self.node.engine()
        self._make_engine(engine, self.daemon, **SHAPE, weights=self.weights, **options)
        engine.run(f"stream, mark = stream_and_mark({self.kind!r})")
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
        """At events, by the mover. It also looks at its own, at the end of copies, those of flags too."""
        return self.mover.calls.get("cuEventQuery", 0)

    def copied(self) -> int:
        """Bytes that the mover has copied, either way, less 8 a copy: so looks at flags, which are copies of 8 bytes, do not count."""
        # A copy is counted a moment before its bytes: only what is twice the same is true.
        while (counters := self.mover.counters) != self.mover.counters:
            pass
        copies = counters.device_to_host_copies + counters.host_to_device_copies
        return counters.device_to_host_bytes + counters.host_to_device_bytes - FLAG_WORD_BYTES * copies

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
            mark.record(int(stream))
            evicted = engine.evict(range(8), later, durable=True, source_ready=mark.name)["outcomes"]
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


@pytest.fixture(params=["event", "flag"])
def scene(shared_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None], request: pytest.FixtureRequest) -> Iterator[Scene]:
    # Names of another test's blocks, with other bytes, are names in another namespace.
    yield Scene(shared_node, daemon, make_engine, request.node.name, request.param)
    shared_node.end_engines()


#: For tests that are about the one or the other.
of_events = pytest.mark.parametrize("scene", ["event"], indirect=True)
of_flags = pytest.mark.parametrize("scene", ["flag"], indirect=True)


@pytest.mark.parametrize("way", EVICT)
def test_incident_4_an_evict_stores_what_the_work_before_source_ready_wrote(scene: Scene, way: str) -> None:
    scene.store(way)
    # The event has come before, and was opened then: it is the latest record that counts. Of a flag, the value.
    scene.engine.run(f"""
        mark.record(int(stream))
        engine.evict([8], ["before"], {EVICT[way]}, source_ready=mark.name)
    """)
    scene.hold()
    scene.engine.run("""
        engine.queue(stream, range(8), "new")
        mark.record(int(stream))
        hashes = [f"new {number}" for number in range(8)]
    """)
    before = scene.copied()
    scene.ask(f"engine.evict(range(8), hashes, {EVICT[way]}, source_ready=mark.name)")
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
def test_incident_4_a_restore_lands_after_the_work_before_destination_free(scene: Scene, way: str) -> None:
    scene.store(way)
    scene.hold()
    # Work that still uses the destination: what it writes would stand over blocks that came too early.
    scene.engine.run("""
        engine.queue(stream, range(8, 16), "still in use")
        mark.record(int(stream))
    """)
    before = scene.copied()
    scene.ask(f"engine.restore(range(8, 16), names, {RESTORE[way]}, destination_free=mark.name)")
    waited, copied = not scene.answered(), scene.copied() - before
    scene.release()
    restored = scene.answer()
    wrong = scene.engine.run("result = engine.wrong(range(8, 16), names)")
    assert wrong == [], "blocks were scattered before their places were free"
    assert waited and copied == 0
    assert {outcome[0] for outcome in restored["outcomes"]} == {"RESTORED"}


REQUESTS = {
    "evict to the arena": "engine.evict(range(8), hashes, tier='ARENA', source_ready=mark.name, {options})",
    "durable evict": "engine.evict(range(8), hashes, durable=True, source_ready=mark.name, {options})",
    "restore from the arena": "engine.restore(range(8, 16), names, destination_free=mark.name, {options})",
    "restore from a volume": "engine.restore(range(8, 16), names, path='BOUNCE', require_path=True, destination_free=mark.name, {options})",
}


def _with_an_event_that_does_not_come(scene: Scene, kind: str) -> None:
    scene.store("bounce" if "volume" in kind else "ddr")
    scene.engine.run("hashes, digest = [f'new {number}' for number in range(8)], engine.digest()")
    scene.hold()
    # Work that changes nothing, and is never done.
    scene.engine.run("""
        engine.queue(stream, range(8), "other")
        mark.record(int(stream))
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
    counters = scene.mover.counters
    assert (counters.event_handles_open_now, counters.memory_handles_open_now) == ((1, 1) if scene.kind == "event" else (0, 2))
    scene.engine.kill()
    wait_until(lambda: not scene.mover.counters.memory_handles_open_now, "the end of the mapping")
    assert scene.mover.counters.event_handles_open_now == 0
    wait_until(lambda: not scene.daemon.status().sessions, "the end of the session")
    assert scene.node.mover(scene.daemon).pid == scene.mover.pid
    scene.engine = scene.new_engine()
    scene.works()


@pytest.mark.parametrize("kind", ["evict to the arena", "restore from a volume"])
def test_a_mover_that_is_killed_before_the_event_costs_the_request_and_copies_nothing(scene: Scene, kind: str) -> None:
    _with_an_event_that_does_not_come(scene, kind)
    scene.ask(REQUESTS[kind].format(options="deadline_s=120"))
    dead = scene.mover
    os.kill(dead.pid, signal.SIGKILL)
    answer = scene.answer()
    assert {tuple(outcome[:2]) for outcome in answer["outcomes"]} == {("FAILED", "WORKER_LOST")} and answer["paths"] == []
    scene.release()
    assert scene.engine.run("result = engine.digest() == digest")
    scene.mover = scene.node.mover(scene.daemon, after=dead)
    scene.works()


@pytest.mark.parametrize("kind", ["evict to the arena", "restore from a volume"])
def test_a_request_whose_front_is_killed_before_its_event_is_repeated_and_waits_for_it(scene: Scene, kind: str) -> None:
    _with_an_event_that_does_not_come(scene, kind)
    scene.ask(REQUESTS[kind].format(options="deadline_s=120"))
    dead = scene.mover
    scene.daemon.restart(signal.SIGKILL)
    scene.mover = scene.node.mover(scene.daemon, after=dead)
    before = scene.looks()
    wait_until(lambda: scene.looks() > before + 2 or scene.answered(), "the looks of the new mover")
    assert not scene.answered()
    scene.release()
    outcomes = scene.answer()["outcomes"]
    assert {outcome[0] for outcome in outcomes} == {"STORED" if "evict" in kind else "RESTORED"}
    if "restore" in kind:
        assert scene.engine.run("result = engine.wrong(range(8, 16), names)") == []
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


@of_events
def test_events_are_refused_where_they_can_not_be_waited_for(scene: Scene) -> None:
    evict, restore, short, long = scene.engine.run("""
        from offloadd.client import HostMemory
        host = engine.client.register_region(
            block_count=2, planes=[Plane(0, 0, 4096, 4096)], memories=[HostMemory.allocate(8192)], namespace=engine.namespace
        )
        blocks = Blocks(host, [0], [b"name"])
        mark.record(int(stream))
        flag = Mark("flag")
        flag.record(int(stream))
        result = [
            Request(lambda: engine.client.evict(blocks, source_ready=mark.name)).finish()["error"],
            Request(lambda: engine.client.restore(blocks, destination_free=flag.name)).finish()["error"],
            Request(lambda: engine.evict([0], ["name"], source_ready=mark.name[:-1])).finish()["error"],
            Request(lambda: engine.restore([0], ["name"], destination_free=mark.name + b"0")).finish()["error"],
        ]
    """)
    assert evict == ["InvalidRequest", "source_ready is for regions on a GPU; this one is on device host"]
    assert restore == ["InvalidRequest", "destination_free is for regions on a GPU; this one is on device host"]
    assert short == ["InvalidRequest", "source_ready has a handle of 63 bytes; a CUDA IPC event handle has 64"]
    assert long == ["InvalidRequest", "destination_free has a handle of 65 bytes; a CUDA IPC event handle has 64"]
    scene.works()


def _fails_alone(scene: Scene, name: str, *told: str) -> None:
    """An evict and a restore that wait for what `name`, an expression in the engine, names, which can't be opened: nothing is copied, and the log says why."""
    scene.store("ddr")
    before = scene.copied()
    evicted, restored, same = scene.engine.run(f"""
        name, digest = {name}, engine.digest()
        evicted = engine.evict(range(8), [f"new {{number}}" for number in range(8)], source_ready=name)
        restored = engine.restore(range(8, 16), names, destination_free=name)
        result = [evicted, restored, engine.digest() == digest]
    """)
    assert {tuple(outcome[:2]) for answer in (evicted, restored) for outcome in answer["outcomes"]} == {("FAILED", "EVENT_NOT_OPENED")}
    assert same and scene.copied() == before
    log = scene.daemon.log.read_text()
    assert all(text in log for text in told), log
    scene.works()
    # What could not be opened was not kept open.
    assert scene.mover.counters.memory_handles_open_now == (1 if scene.kind == "event" else 2)


@of_events
@pytest.mark.parametrize("whose", ["nobody's", "a dead process's", "one of another container"])
def test_an_event_that_can_not_be_opened_fails_its_request_alone(scene: Scene, whose: str) -> None:
    if whose == "one of another container":
        scene.engine.run("mark.record(int(stream))")
        with scene.control.fail("cuIpcOpenEventHandle", MAP_FAILED, pid=scene.mover.pid):
            evicted = scene.engine.run("result = engine.evict(range(8), [f'x {number}' for number in range(8)], source_ready=mark.name)")
            flagged = scene.engine.run("""
                flag = Mark("flag")
                flag.record(int(stream))
                result = engine.evict(range(8), [f'y {number}' for number in range(8)], source_ready=flag.name)
            """)
        assert {tuple(outcome[:2]) for outcome in evicted["outcomes"]} == {("FAILED", "EVENT_NOT_OPENED")}
        assert {outcome[0] for outcome in flagged["outcomes"]} == {"STORED"}, "a flag does without"
        log = scene.daemon.log.read_text()
        assert "CUDA_ERROR_MAP_FAILED" in log and "share /dev/shm, or order the request by a flag" in log
        return
    if whose == "nobody's":
        handle = "2a" * 64
    else:
        dead = scene.node.engine()
        handle = dead.run("result = new_event().handle.hex()")
        dead.kill()
    _fails_alone(scene, f"bytes.fromhex({handle!r})", "open a CUDA IPC event handle on cuda:0", "share /dev/shm, or order the request by a flag")


def _flag(handle: str, offset_bytes: int) -> str:
    return f"flag_value({handle!r}, {offset_bytes}, 1)"


@of_flags
@pytest.mark.parametrize("whose", ["nobody's", "a dead process's", "outside of its allocation", "of another GPU"])
def test_a_flag_that_can_not_be_opened_fails_its_request_alone(scene: Scene, whose: str) -> None:
    if whose == "nobody's":
        name, told = _flag("2a" * 64, 0), "CUDA_ERROR_INVALID_VALUE"
    elif whose == "outside of its allocation":
        name, told = "flag_value(engine.memories[0].ipc_handle.hex(), engine.memories[0].allocation_bytes, 1)", "memory of 8 bytes at offset"
    else:
        other = scene.node.engine(0 if whose == "a dead process's" else 1)
        handle = other.run("result = memory_handle(ok(cu.cuMemAlloc(4096)))")
        name, told = _flag(handle, 0), "this mover works on cuda:0"
        if whose == "a dead process's":
            other.kill()
            told = "the process that exported it has ended"
    _fails_alone(scene, name, told, "a flag lies in cudaMalloc memory of an engine that lives")


@of_flags
def test_flags_that_can_not_be_are_refused(scene: Scene) -> None:
    errors = scene.engine.run("""
        from dataclasses import replace
        mark.record(int(stream))
        names = [replace(mark.name, **change) for change in ({"offset_bytes": 4}, {"value": 0}, {"handle": b"x" * 63})]
        result = [Request(lambda: engine.evict([0], ["name"], source_ready=name)).finish()["error"] for name in names]
        result += [Request(lambda: engine.restore([0], ["name"], destination_free=name)).finish()["error"] for name in names]
    """)
    assert {error[0] for error in errors} == {"InvalidRequest"}
    for number, field in enumerate(("source_ready", "destination_free")):
        assert [error[1] for error in errors[3 * number : 3 * number + 3]] == [
            f"{field} has a flag at offset 4; it must be a multiple of 8",
            f"{field} has a flag with value 0, which every word has reached; at least 1 is needed",
            f"{field} has a flag with a handle of 63 bytes; a CUDA IPC memory handle has 64",
        ]
    scene.works()


@of_flags
def test_a_flag_has_come_from_its_value_on_and_not_before(scene: Scene) -> None:
    scene.store("ddr")
    # By hand, without the client's own: values above those of a signed number.
    scene.engine.run("""
        word, digest = int(ok(cu.cuMemAlloc(64))), engine.digest()
        ok(cu.cuMemsetD8(word, 0, 64))
        ok(cu.cuCtxSynchronize())
        handle, big = memory_handle(word), (1 << 63) + 5

        def write(value):
            ok(cu.cuStreamWriteValue64(stream, word + 8, value, 0))
            ok(cu.cuStreamSynchronize(stream))

        write(big - 1)
    """)
    before = scene.copied()
    scene.ask("engine.restore(range(8, 16), names, destination_free=flag_value(handle, 8, big), deadline_s=120)")
    assert not scene.answered() and scene.copied() == before
    scene.engine.run("write(big)")
    assert {outcome[0] for outcome in scene.answer()["outcomes"]} == {"RESTORED"}
    # Smaller values have come with it, and the largest that there is has not.
    again = scene.engine.run("result = engine.restore(range(8, 16), names, destination_free=flag_value(handle, 8, 1))['outcomes']")
    assert {outcome[0] for outcome in again} == {"RESTORED"}
    late = scene.engine.run("result = engine.restore(range(8, 16), names, destination_free=flag_value(handle, 8, (1 << 64) - 1), deadline_s=1.0)['outcomes']")
    assert {tuple(outcome[:2]) for outcome in late} == {("FAILED", "DEADLINE")}


@of_flags
def test_many_flags_of_a_client_are_one_mapping(scene: Scene) -> None:
    scene.store("ddr")
    outcomes = scene.engine.run("""
        outcomes = []
        for number in range(100):
            with new_flag() as flag:
                outcomes += engine.restore([8 + number % 8], names[:1], destination_free=flag.write(int(stream)))["outcomes"]
        flags = [new_flag() for number in range(600)]
        streams = [int(stream)] * 600
        outcomes += engine.restore([8], names[:1], destination_free=[flag.write(int(stream)) for flag in flags][-1])["outcomes"]
        result = outcomes
    """)
    assert {outcome[0] for outcome in outcomes} == {"RESTORED"}
    # Of the region, and of flags: 512 words, and as many again for those that did not find room.
    assert scene.mover.counters.memory_handles_open_now == 3
    scene.engine.run("engine.client.unregister_region(engine.region)")
    assert scene.mover.counters.memory_handles_open_now == 0
    scene.engine.run("engine.register()")


def test_an_engine_that_does_not_come_fills_no_window(shared_node: Node, make_engine: Callable[..., None]) -> None:
    # Room for one slice in flight: the evict that waits takes all of it.
    daemon = shared_node.daemon(mover={"lane_threads": 1, "staging_slot_bytes": 8 * MIB + 4 * KIB, "evict_slices_in_flight": 1})
    slow, other = shared_node.engine(), shared_node.engine()
    shape = {"block_count": 16, "memory_bytes": [16 * MIB], "planes": [(0, 0, MIB, MIB)]}
    make_engine(slow, daemon, **shape)
    make_engine(other, daemon, **shape, instance="other")
    assert shared_node.control is not None
    slow.run("stream, mark = stream_and_mark('flag')")
    shared_node.control.process(slow.pid).hold()
    slow.run("""
        mark.record(int(stream))
        names = [f"slow {number}" for number in range(16)]
        request = Request(lambda: engine.evict(range(16), names, durable=True, source_ready=mark.name, deadline_s=240))
    """)
    mover = shared_node.mover(daemon)
    wait_until(lambda: mover.calls.get("cuMemcpyAsync", 0) > 2, "the mover's looks at the flag")
    stored = other.run("result = engine.evict(range(16), [f'other {number}' for number in range(16)], durable=True, deadline_s=60)['outcomes']")
    assert {tuple(outcome[:2]) for outcome in stored} == {("STORED", "NONE")}
    assert not slow.run("result = request.answer is not None")
    shared_node.control.process(slow.pid).release()
    assert {outcome[0] for outcome in slow.run("result = request.finish()['outcomes']")} == {"STORED"}
    shared_node.end_engines()

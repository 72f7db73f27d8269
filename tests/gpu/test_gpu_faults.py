"""Bad regions, dead engines and movers, broken drivers and volumes: a clear outcome each, no wrong byte, nothing left behind, and the daemon goes on."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offloadd.units import KIB
from offloadd.v1 import offload_pb2 as pb

from ..standin.controls import Control, Process, wait_until
from ..standin_tests.child import Child
from ..system.daemon_process import DaemonProcess
from .conftest import Node

COUNT, BLOCK_BYTES = 16, 32 * KIB
#: K and V of two layers, in one memory.
SHAPE: dict[str, object] = {
    "block_count": COUNT,
    "memory_bytes": [COUNT * BLOCK_BYTES],
    "planes": [(0, plane * COUNT * BLOCK_BYTES // 4, BLOCK_BYTES // 4, BLOCK_BYTES // 4) for plane in range(4)],
}
#: CUresult.
OUT_OF_MEMORY, NO_DEVICE, INVALID_VALUE, ILLEGAL_ADDRESS = 2, 100, 1, 700


def control_of(node: Node) -> Control:
    assert node.control is not None
    return node.control


def store(engine: Child, how: str, prefix: str = "block") -> None:
    """Blocks 0 to 7 are evicted under `names`, and get other bytes."""
    outcomes = engine.run(f"""
        names = [f"{prefix} {{number}}" for number in range(8)]
        for number, name in enumerate(names):
            engine.write(number, name)
        result = engine.evict(range(8), names, {how})["outcomes"]
        for number in range(8):
            engine.write(number, "other")
    """)
    assert {outcome[0] for outcome in outcomes} == {"STORED"}


def restores(engine: Child, options: str = "") -> list[list[object]]:
    """`names` into blocks 8 to 15, right; the ways taken."""
    restored, wrong = engine.run(f"""
        restored = engine.restore(range(8, 16), names, {options})
        result = [restored, engine.wrong(range(8, 16), names)]
    """)
    assert {outcome[0] for outcome in restored["outcomes"]} == {"RESTORED"}
    assert wrong == []
    paths: list[list[object]] = restored["paths"]
    return paths


def works(engine: Child, prefix: str = "later") -> None:
    store(engine, "durable=True", prefix)
    restores(engine)


# ---- regions that can't be ----


@pytest.fixture(scope="module")
def shared_daemon(shared_node: Node) -> DaemonProcess:
    return shared_node.daemon()


@pytest.fixture
def survivor(shared_node: Node, shared_daemon: DaemonProcess, make_engine: Callable[..., None], request: pytest.FixtureRequest) -> Iterator[Child]:
    """An engine of a daemon that other tests use too."""
    wait_until(lambda: not shared_daemon.status().sessions, "the end of old sessions")
    mover = shared_node.mover(shared_daemon)
    wait_until(lambda: not mover.counters.memory_handles_open_now, "the end of old mappings")
    engine = shared_node.engine()
    make_engine(engine, shared_daemon, **SHAPE, weights=request.node.name)
    yield engine
    shared_node.end_engines()


@pytest.fixture
def shared(survivor: Child, shared_node: Node, shared_daemon: DaemonProcess) -> Iterator[Child]:
    """As `survivor`; when the test is over, the daemon must serve it still, by the same mover and with one mapping."""
    mover = shared_node.mover(shared_daemon)
    yield survivor
    works(survivor)
    assert mover.counters.memory_handles_open_now == 1
    assert shared_node.mover(shared_daemon).pid == mover.pid
    survivor.run("engine.client.unregister_region(engine.region)")
    assert mover.counters.memory_handles_open_now == 0, "what was refused is still open"


def test_a_gpu_that_the_daemon_does_not_serve_is_refused_by_name(shared: Child) -> None:
    wrong, ordinal = shared.run("""
        from dataclasses import replace
        uuid = "GPU-00000000-0000-0000-0000-00000000dead"
        result = [engine.try_region([replace(engine.memories[0], device_uuid=name)]) for name in (uuid, "cuda:7")]
    """)
    assert wrong[0] == ordinal[0] == "PathUnavailable"
    assert "device 'GPU-00000000-0000-0000-0000-00000000dead' has no mover on this node" in wrong[1]
    assert re.search(r"device 'cuda:7' has no mover on this node; devices are host, cuda:0 \(GPU-[0-9a-f-]{36}\)", ordinal[1])


def test_a_gpu_is_known_by_its_uuid_and_by_its_name(shared: Child) -> None:
    # The engine's own region was registered by UUID: that is what `export_pointer` says.
    uuid, error = shared.run("""
        from dataclasses import replace
        error = engine.try_region([replace(engine.memories[0], device_uuid="cuda:0")])
        result = [engine.region.device, error]
        engine.client.unregister_region(engine.client._regions[-1])
    """)
    assert uuid.startswith("GPU-") and error is None


def test_memory_that_is_not_there_is_refused(shared: Child) -> None:
    errors = shared.run(f"""
        from dataclasses import replace
        memory = engine.memories[0]
        result = [
            engine.try_region([replace(memory, memory_bytes=memory.memory_bytes + 1)]),
            engine.try_region([replace(memory, offset_bytes=memory.offset_bytes + {BLOCK_BYTES})]),
            engine.try_region([replace(memory, offset_bytes=(1 << 64) - 1)]),
            engine.try_region([memory], block_count={COUNT + 1}),
        ]
    """)
    size, allocation = COUNT * BLOCK_BYTES, COUNT * BLOCK_BYTES + 512
    assert {error[0] for error in errors} == {"InvalidRequest"}
    assert f"memory of {size + 1} bytes at offset 512 is outside its allocation of {allocation} bytes" in errors[0][1]
    assert f"memory of {size} bytes at offset {512 + BLOCK_BYTES} is outside its allocation of {allocation} bytes" in errors[1][1]
    assert f"at offset {(1 << 64) - 1} is outside" in errors[2][1]
    assert str(size) in errors[3][1]


def test_handles_that_open_nothing_are_refused(shared: Child, shared_node: Node) -> None:
    dead = shared_node.engine()
    handle = dead.run("result = export_pointer(int(ok(cu.cuMemAlloc(1 << 20))), 1 << 20).ipc_handle.hex()")
    dead.kill()
    errors = shared.run(f"""
        from dataclasses import replace
        handles = [bytes.fromhex({handle!r}), b"*" * 64, engine.memories[0].ipc_handle[:-1]]
        result = [engine.try_region([replace(engine.memories[0], ipc_handle=handle)]) for handle in handles]
    """)
    assert {error[0] for error in errors} == {"InvalidRequest"}
    for error in errors[:2]:
        assert "open a CUDA IPC memory handle on cuda:0 (GPU-" in error[1] and "the process that exported it has ended" in error[1]
    assert errors[2][1] == "memory 0 has a CUDA IPC handle of 63 bytes; it has 64"


def test_memory_of_another_gpu_is_refused(shared: Child, shared_node: Node) -> None:
    other = shared_node.engine(ordinal=1)
    handle, uuid = other.run("""
        memory = export_pointer(int(ok(cu.cuMemAlloc(1 << 20))), 1 << 20)
        result = [memory.ipc_handle.hex(), memory.device_uuid]
    """)
    honest, forged, mixed = shared.run(f"""
        from dataclasses import replace
        memory = replace(engine.memories[0], ipc_handle=bytes.fromhex({handle!r}), device_uuid={uuid!r})
        forged = replace(memory, device_uuid=engine.memories[0].device_uuid)
        result = [engine.try_region([memory]), engine.try_region([forged]), engine.try_region([engine.memories[0], memory])]
    """)
    assert honest[0] == "PathUnavailable" and uuid in honest[1]
    assert forged[0] == "InvalidRequest" and "is for memory of cuda:1; this mover works on cuda:0" in forged[1]
    assert mixed[0] == "InvalidRequest" and "lie on 2 devices" in mixed[1]


def test_memory_of_the_wrong_kind_is_refused(shared: Child) -> None:
    on_gpu, on_host, closed = shared.run("""
        from dataclasses import replace
        from offloadd.client import HostMemory
        from offloadd.client.values import Region

        def register(device, memory):
            # The client itself takes the device from the memory; other clients may err.
            region = Region(device, 0, 1, (Plane(0, 0, 4096, 4096),), (memory,), engine.namespace)
            return Request(lambda: engine.client._call(lambda link: engine.client._register(link, region))).finish()["error"]

        closed = export_pointer(engine.pointers[0], 4096)
        closed.close()
        result = [register("cuda:0", HostMemory.allocate(4096)), register("host", engine.memories[0]), engine.try_region([closed])]
    """)
    assert on_gpu == ["InvalidRequest", "memory 0 is not CUDA memory; a region on device cuda:0 takes no other kind"]
    assert on_host == ["InvalidRequest", "memory 0 is not an attached memfd; a region on device host takes no other kind"]
    assert closed[0] == "InvalidRequest" and "closed" in closed[1]


# ---- the life of a mapping ----


def test_two_regions_of_one_allocation_open_it_once(shared: Child, shared_node: Node, shared_daemon: DaemonProcess) -> None:
    mover = shared_node.mover(shared_daemon)
    shared.run("""
        half = engine.memories[0].memory_bytes // 2
        parts = [export_pointer(engine.pointers[0] + at, half) for at in (0, half)]
        regions = [
            engine.client.register_region(block_count=4, planes=[Plane(0, 0, 4096, 4096)], memories=[part], namespace=engine.namespace) for part in parts
        ]
    """)
    assert mover.counters.memory_handles_open_now == 1
    shared.run("for region in regions: engine.client.unregister_region(region)")
    assert mover.counters.memory_handles_open_now == 1
    shared.run("engine.client.unregister_region(engine.region)")
    assert mover.counters.memory_handles_open_now == 0
    shared.run("engine.register()")


def test_an_engine_that_dies_leaves_nothing(survivor: Child, shared_node: Node, shared_daemon: DaemonProcess, make_engine: Callable[..., None]) -> None:
    daemon, engine, other = shared_daemon, survivor, shared_node.engine()
    mover = shared_node.mover(daemon)
    make_engine(other, daemon, **SHAPE, instance="other", weights="other test_an_engine_that_dies_leaves_nothing")
    store(engine, "keep=True")
    assert daemon.status().held_count == 8
    assert mover.counters.memory_handles_open_now == 2
    engine.kill()
    wait_until(lambda: mover.counters.memory_handles_open_now == 1, "the end of the mapping")
    wait_until(lambda: daemon.status().held_count == 0, "the end of its keeps")
    assert [session.instance for session in daemon.status().sessions] == ["other"]
    works(other)


def test_an_engine_that_dies_in_the_middle_of_a_restore_leaves_nothing(
    survivor: Child, shared_node: Node, shared_daemon: DaemonProcess, make_engine: Callable[..., None]
) -> None:
    daemon, engine, other = shared_daemon, survivor, shared_node.engine()
    mover = shared_node.mover(daemon)
    make_engine(other, daemon, **SHAPE, instance="other", weights="other test_an_engine_that_dies_in_the_middle_o")
    store(engine, "tier='ARENA'")
    _hold_in_the_middle(mover, engine, "engine.restore(range(8, 16), names)")
    engine.kill()
    wait_until(lambda: len(daemon.status().sessions) == 1, "the end of the session")
    # Copies that a GPU has begun can't be taken back: the memory stays open until they have ended, whoever has died.
    assert mover.counters.memory_handles_open_now == 2
    mover.release()
    wait_until(lambda: mover.counters.memory_handles_open_now == 1, "the end of the mapping")
    assert shared_node.mover(daemon).pid == mover.pid
    works(other)


def _hold_in_the_middle(mover: Process, engine: Child, call: str) -> None:
    """Begin a request in a thread of the engine; one piece of its work on the GPU is done, more is queued."""
    mover.hold()
    before = mover.counters
    engine.run(f"request = Request(lambda: {call})")
    wait_until(lambda: mover.counters.work_queued > before.work_queued, "the copies")
    mover.permit(1)
    wait_until(lambda: mover.counters.work_done > before.work_done and mover.counters.work_queued > mover.counters.work_done, "the first copy")
    assert not engine.run("result = request.answer")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_restarted_daemon_gives_back_what_is_on_the_volume(standin_node: Node, make_engine: Callable[..., None], number: int) -> None:
    daemon, engine = standin_node.daemon(), standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    store(engine, "durable=True")
    before = standin_node.mover(daemon)
    daemon.restart(number)
    assert restores(engine, "path='BOUNCE', require_path=True") == [["VOLUME", "BOUNCE", 8]]
    assert standin_node.mover(daemon, after=before).counters.memory_handles_open_now == 1


# ---- movers that die ----


@pytest.mark.parametrize("operation", ["evict", "restore"])
def test_a_mover_that_is_killed_in_the_middle_of_copies_is_replaced(survivor: Child, shared_node: Node, shared_daemon: DaemonProcess, operation: str) -> None:
    daemon, engine = shared_daemon, survivor
    store(engine, "durable=True")
    mover = shared_node.mover(daemon)
    engine.run("hashes = [f'new {number}' for number in range(8)]")
    _hold_in_the_middle(mover, engine, {"evict": "engine.evict(range(8), hashes)", "restore": "engine.restore(range(8, 16), names)"}[operation])
    os.kill(mover.pid, signal.SIGKILL)
    outcomes = engine.run("result = request.finish()")["outcomes"]
    assert len(outcomes) == 8
    assert {tuple(outcome[:2]) for outcome in outcomes} == {("FAILED", "WORKER_LOST")}
    assert shared_node.mover(daemon, after=mover).pid != mover.pid
    assert restores(engine) == [["VOLUME", "BOUNCE", 8]]
    works(engine)
    assert shared_node.mover(daemon).counters.memory_handles_open_now == 1


def test_a_mover_whose_context_is_lost_is_replaced(survivor: Child, shared_node: Node, shared_daemon: DaemonProcess) -> None:
    daemon, engine = shared_daemon, survivor
    store(engine, "durable=True")
    mover = shared_node.mover(daemon)
    with control_of(shared_node).fail("copy", ILLEGAL_ADDRESS, times=1, pid=mover.pid):
        outcomes = engine.run("result = engine.restore(range(8, 16), names)")["outcomes"]
    assert {outcome[0] for outcome in outcomes} <= {"FAILED", "RESTORED"}
    assert ["FAILED", "WORKER_LOST"] in [outcome[:2] for outcome in outcomes]
    assert shared_node.mover(daemon, after=mover).pid != mover.pid
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in daemon.log.read_text()
    restores(engine)
    works(engine)


def test_a_copy_that_the_driver_refuses_fails_its_blocks_alone(survivor: Child, shared_node: Node, shared_daemon: DaemonProcess) -> None:
    daemon, engine = shared_daemon, survivor
    store(engine, "durable=True")
    mover = shared_node.mover(daemon)
    copy = next(name for name in mover.calls if name in ("cuMemcpyBatchAsync", "cuMemcpy2DAsync"))
    with control_of(shared_node).fail(copy, INVALID_VALUE, times=1, pid=mover.pid):
        outcomes, good = engine.run("""
            outcomes = engine.restore(range(8, 16), names)["outcomes"]
            wrong = engine.wrong(range(8, 16), names)
            result = [outcomes, all(outcome[0] != "RESTORED" or 8 + number not in wrong for number, outcome in enumerate(outcomes))]
        """)
    assert ["FAILED", "IO_ERROR"] in [outcome[:2] for outcome in outcomes]
    assert good, "a block that was not copied was answered RESTORED"
    assert shared_node.mover(daemon).pid == mover.pid
    restores(engine)


def test_blocks_whose_copy_does_not_end_are_quarantined_at_the_deadline(survivor: Child, shared_node: Node, shared_daemon: DaemonProcess) -> None:
    daemon, engine = shared_daemon, survivor
    store(engine, "durable=True")
    mover = shared_node.mover(daemon)
    _hold_in_the_middle(mover, engine, "engine.restore(range(8, 16), names, deadline_s=1.0)")
    outcomes = engine.run("result = request.finish()")["outcomes"]
    assert {tuple(outcome[:2]) for outcome in outcomes} == {("QUARANTINED", "DEADLINE")}
    mover.release()
    works(engine)


def test_a_mover_ends_itself_behind_a_copy_that_does_not_end(standin_node: Node) -> None:
    process = Child(standin_node.environment)
    standin_node.engines.append(process)
    process.run("""
        from offloadd.mover import cuda_device
        cuda_device.COPY_TIMEOUT_S = 0.1
        device = cuda_device.CudaDevice("cuda:0")
    """)
    control_of(standin_node).process(process.pid).hold()
    # The mark at the stream's end does not come either.
    with pytest.raises(RuntimeError, match="the child ended with 1"):
        process.run("with device.copying(): pass")


# ---- GPUs that can't be used ----

UNUSABLE: dict[str, tuple[str, tuple[str, int] | None, str]] = {
    "no such GPU": ("cuda:7", None, "no such GPU; a selector is cuda:N or GPU-<uuid>, and this process sees cuda:0"),
    "out of memory": ("cuda:0", ("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY), "CUDA_ERROR_OUT_OF_MEMORY"),
    "no driver": ("cuda:0", ("cuInit", NO_DEVICE), "CUDA_ERROR_NO_DEVICE"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_gpu_that_can_not_be_used_is_told_with_its_cause_and_the_host_is_served(standin_node: Node, make_engine: Callable[..., None], kind: str) -> None:
    gpu, fault, cause = UNUSABLE[kind]
    engine = standin_node.engine()
    held = control_of(standin_node).fail(*fault) if fault else None
    daemon = standin_node.daemon(gpus=(gpu,))
    if held:
        held.clear()
    ways = {(way.device, way.tier, way.path): way for way in daemon.status().paths}
    notes = [way.note for (device, *_), way in ways.items() if device == gpu]
    assert len(notes) == 3 and all(cause in note for note in notes)
    assert not any(way.available for (device, *_), way in ways.items() if device == gpu)
    assert all(way.available for (device, *_), way in ways.items() if device == "host")
    capable, named, by_uuid, right = engine.run(f"""
        import numpy
        from dataclasses import replace
        from offloadd.client import HostMemory
        host = HostMemory.allocate(8 * 4096)
        view = host.numpy(numpy.uint8, (8, 4096))
        view[:4] = 7
        client = Client.connect({str(daemon.runtime_dir)!r}, instance="engine")
        region = client.register_region(block_count=8, planes=[Plane(0, 0, 4096, 4096)], memories=[host], namespace=Namespace(model="m", weights="w"))
        client.evict(Blocks(region, range(4), [b"%d" % number for number in range(4)]))
        client.restore(Blocks(region, range(4, 8), [b"%d" % number for number in range(4)]))
        memory = export_pointer(int(ok(cu.cuMemAlloc(4096))), 4096)

        def error(memory):
            return Request(lambda: client.register_region(
                block_count=1, planes=[Plane(0, 0, 4096, 4096)], memories=[memory], namespace=Namespace(model="m", weights="w")
            )).finish()["error"]

        capable = [path.note for path in client.capabilities().paths if path.device == {gpu!r}]
        result = [capable, error(replace(memory, device_uuid={gpu!r})), error(memory), bool((view == 7).all())]
    """)
    assert right and len(capable) == 3 and all(cause in note for note in capable)
    assert named[0] == by_uuid[0] == "PathUnavailable" and cause in named[1]
    # Engines know their GPU by its UUID, the daemon this one by the name in its configuration alone: the cause must be in the answer all the same.
    assert cause in by_uuid[1]


def test_without_page_locked_memory_a_way_is_not_served_and_told_why(standin_node: Node, make_engine: Callable[..., None]) -> None:
    # Enough for nothing at all: the arena's lane holds no memory that it would have to page-lock.
    control_of(standin_node).limit_host_registration(1)
    daemon, engine = standin_node.daemon(), standin_node.engine()
    ways = {(way.device, pb.Path.Name(way.path)): way for way in daemon.status().paths}
    bounce = ways["cuda:0", "PATH_BOUNCE"]
    assert not bounce.available and "page-lock" in bounce.note and "LimitMEMLOCK" in bounce.note
    assert ways["cuda:0", "PATH_DDR"].available and ways["host", "PATH_HOST"].available
    make_engine(engine, daemon, **SHAPE)
    # The arena's way does without, at the speed of the driver's own buffers.
    store(engine, "tier='ARENA'")
    assert restores(engine, "path='DDR', require_path=True") == [["ARENA", "DDR", 8]]
    durable, required, lost = engine.run("""
        result = [
            engine.evict(range(8), ["a" + name for name in names], durable=True)["outcomes"],
            Request(lambda: engine.evict([0], ["b"], durable=True, path="BOUNCE", require_path=True)).finish()["error"],
            engine.restore([0], ["a" + names[0]])["outcomes"],
        ]
    """)
    assert {tuple(outcome[:2]) for outcome in durable} == {("REJECTED", "NO_TIER")}
    assert required[0] == "PathUnavailable" and "page-lock" in required[1]
    assert lost[0][0] == "NOT_FOUND"
    assert daemon.counters().get("faults", 0) == 0
    restores(engine)


# ---- what is answered is true ----


def test_a_payload_that_changed_on_the_volume_is_not_handed_over(survivor: Child, shared_node: Node, shared_daemon: DaemonProcess) -> None:
    daemon, engine = shared_daemon, survivor
    store(engine, "durable=True", "changed")
    payload = bytes.fromhex(engine.run("result = engine.expected(names[3]).hex()"))
    _flip_a_bit(daemon.volumes[0], payload)
    restored, same, wrong = engine.run("""
        before = [engine.read(index) for index in range(16)]
        restored = engine.restore(range(8, 16), names, path="BOUNCE", require_path=True)
        others = [index for index in range(16) if index not in (8, 9, 10, 12, 13, 14, 15)]
        result = [
            restored,
            [index for index in others if engine.read(index) != before[index]],
            engine.wrong([8, 9, 10, 12, 13, 14, 15], [name for number, name in enumerate(names) if number != 3]),
        ]
    """)
    assert [outcome[:2] for outcome in restored["outcomes"]] == [["RESTORED", "NONE"]] * 3 + [["DATA_LOSS", "CHECKSUM_MISMATCH"]] + [["RESTORED", "NONE"]] * 4
    assert same == [], "a byte of a bad block reached the engine"
    assert wrong == []
    again = engine.run("result = engine.restore([8], [names[3]])['outcomes']")
    assert again[0][0] == "NOT_FOUND", "a copy that is bad is dropped"


def _flip_a_bit(volume: Path, payload: bytes) -> None:
    with volume.open("r+b") as file:
        at = file.read().index(payload) + len(payload) // 2
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())


@pytest.fixture
def without_gds(standin_node: Node) -> DaemonProcess:
    # No nvidia-fs. What it needs besides may be missing, too.
    control_of(standin_node).fail("cuFileDriverOpen", 5001)
    return standin_node.daemon()


def test_the_ways_in_answers_are_those_that_were_taken(without_gds: DaemonProcess, standin_node: Node, make_engine: Callable[..., None]) -> None:
    engine = standin_node.engine()
    make_engine(engine, without_gds, **SHAPE)
    mover = standin_node.mover(without_gds)

    def moved(call: str) -> tuple[Any, int, int]:
        before = mover.counters
        answer = engine.run(f"result = {call}")
        spent = mover.counters - before
        return answer, spent.device_to_host_bytes, spent.host_to_device_bytes

    engine.run("names = [f'block {number}' for number in range(8)]")
    # verify_target 1: what was copied is read back once for the comparison.
    evicted, out, _ = moved("engine.evict(range(8), names, durable=True, path='GDS')")
    assert (evicted["paths"], out) == ([["VOLUME", "BOUNCE", 8]], 2 * 8 * BLOCK_BYTES)
    restored, _, into = moved("engine.restore(range(8, 16), names, path='GDS')")
    assert (restored["paths"], into) == ([["VOLUME", "BOUNCE", 8]], 8 * BLOCK_BYTES)
    evicted, out, _ = moved("engine.evict(range(8), ['a' + name for name in names], tier='ARENA')")
    assert (evicted["paths"], out) == ([["ARENA", "DDR", 8]], 2 * 8 * BLOCK_BYTES)
    restored, _, into = moved("engine.restore(range(8, 16), names[:4] + ['a' + name for name in names[:4]])")
    assert (sorted(restored["paths"]), into) == ([["ARENA", "DDR", 4], ["VOLUME", "BOUNCE", 4]], 8 * BLOCK_BYTES)


def test_gds_is_refused_where_it_is_required_and_not_there(without_gds: DaemonProcess, standin_node: Node, make_engine: Callable[..., None]) -> None:
    engine = standin_node.engine()
    make_engine(engine, without_gds, **SHAPE)
    store(engine, "durable=True, path='BOUNCE'")
    errors = engine.run("""
        result = [
            Request(lambda: engine.evict([0], ["one"], durable=True, path="GDS", require_path=True)).finish()["error"],
            Request(lambda: engine.restore([0], names[:1], path="GDS", require_path=True)).finish()["error"],
        ]
    """)
    for kind, message in errors:
        assert kind == "PathUnavailable" and message.startswith("path gds is not available: ")
    gds = [way for way in without_gds.status().paths if (way.device, pb.Path.Name(way.path)) == ("cuda:0", "PATH_GDS")]
    assert [way.available for way in gds] == [False] and gds[0].note
    assert engine.run("result = engine.wrong([0], ['other'])") == []
    restores(engine)


# ---- leaks ----


def test_rounds_leave_nothing_behind(survivor: Child, shared_node: Node, shared_daemon: DaemonProcess) -> None:
    daemon, engine = shared_daemon, survivor
    mover = shared_node.mover(daemon)
    engine.run("""
        stream, event = stream_and_event()

        def turn(number):
            names = [f"round {number} {index}" for index in range(8)]
            event.record(int(stream))
            for name, options in zip(("ARENA", "ANY"), ({"tier": "ARENA"}, {"durable": True}), strict=True):
                mine = [f"{name} {one}" for one in names]
                engine.evict(range(8), mine, source_ready=event.handle, **options)
                engine.restore(range(8, 16), mine, destination_free=event.handle)
            engine.client.unregister_region(engine.region)
            engine.register()
    """)

    def held() -> dict[str, int]:
        folder, counters = Path(f"/proc/{mover.pid}"), mover.counters
        # Each thread of the lanes has a stream and a registered buffer from its first copy on. A stream of the stand-in is a thread.
        threads = len(list((folder / "task").iterdir())) - counters.streams_now
        memories, events = counters.memory_handles_open_now, counters.event_handles_open_now
        return {"memories": memories, "events": events, "fds": len(list((folder / "fd").iterdir())), "threads": threads}

    wait_until(lambda: mover.counters.host_registered_bytes_now >= daemon.arena_bytes, "the page-locked arena")
    engine.run("turn(0)")
    before = held()
    engine.run("for number in range(1, 31): turn(number)")
    assert held() == before
    assert (before["memories"], before["events"]) == (1, 0)
    counters = mover.counters
    assert max(counters.streams_now, counters.events_now) <= before["threads"]
    assert counters.host_registrations_now <= 2 * before["threads"]

"""GPU memory in chunks of virtual memory management: handed over by descriptors, mapped, moved byte for byte, and nothing of it left behind."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offloadd.units import KIB, MIB

from ..standin.build import Paths
from ..standin.controls import Control, Process, environment, wait_until
from ..standin_tests.child import Child
from ..standin_tests.conftest import needs
from ..system.daemon_process import DaemonProcess
from .conftest import Node, settled_gds

CHUNK = 2 * MIB


def flat(block_bytes: int, count: int, chunk_bytes: list[int], inside_bytes: int) -> dict[str, object]:
    return {
        "block_count": count,
        "memory_bytes": [count * block_bytes],
        "planes": [(0, 0, block_bytes, block_bytes)],
        "chunk_bytes": [chunk_bytes],
        "inside_bytes": inside_bytes,
    }


def layers(piece_bytes: int, count: int, chunk_bytes: list[int], inside_bytes: int) -> dict[str, object]:
    """K and V of three layers each, in memories of their own."""
    span = count * piece_bytes
    planes = [(which, layer * span, piece_bytes, piece_bytes) for layer in range(3) for which in (0, 1)]
    return {"block_count": count, "memory_bytes": [3 * span] * 2, "planes": planes, "chunk_bytes": [chunk_bytes] * 2, "inside_bytes": inside_bytes}


SHAPES = {
    "one chunk": flat(64 * KIB, 24, [CHUNK], 512),
    "many chunks": flat(400 * KIB, 24, [CHUNK, 2 * CHUNK, CHUNK, CHUNK], 0),
    # Memory and blocks begin and end anywhere: blocks lie across the chunks' borders.
    "begins inside a chunk and ends inside another": flat(300_001, 20, [CHUNK] * 4, CHUNK - 5_003),
    "two memories": layers(72 * KIB, 24, [CHUNK, CHUNK, 2 * CHUNK], CHUNK - 4096),
}
WAYS = {
    "ddr": ("tier='ARENA', path='DDR', require_path=True", "path='DDR', require_path=True", ["ARENA", "DDR"]),
    "gds": ("durable=True, path='GDS', require_path=True", "path='GDS', require_path=True", ["VOLUME", "GDS"]),
    "bounce": ("durable=True, path='BOUNCE', require_path=True", "path='BOUNCE', require_path=True", ["VOLUME", "BOUNCE"]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_in_chunks_come_back_into_other_places_by_every_way(node: Node, make_engine: Callable[..., None], shape: str) -> None:
    daemon, engine = node.daemon(arena_bytes=128 * MIB, slab_bytes=64 * MIB, volume_bytes=512 * MIB), node.engine()
    make_engine(engine, daemon, **SHAPES[shape])
    half = int(SHAPES[shape]["block_count"]) // 2  # type: ignore[call-overload]
    available, why = settled_gds(daemon)
    assert available or node.control is None, why
    for way, (evict, restore, path) in WAYS.items():
        if way == "gds" and not available:
            continue
        evicted, restored, wrong, disturbed, untouched = engine.run(f"""
            half = {half}
            names = [f"{way} {{number}}" for number in range(half)]
            for number, name in enumerate(names):
                engine.write(number, name)
                engine.write(half + number, "not restored")
            evicted = engine.evict(range(half), names, {evict})
            for number in range(half):
                engine.write(number, "something else")
            order = list(reversed(range(half, 2 * half)))
            restored = engine.restore(order, names, {restore})
            result = [evicted, restored, engine.wrong(order, names), engine.wrong(range(half), ["something else"] * half), engine.margins()]
        """)
        assert {outcome[0] for outcome in evicted["outcomes"]} == {"STORED"}
        assert {outcome[0] for outcome in restored["outcomes"]} == {"RESTORED"}
        assert evicted["paths"] == [[*path, half]] and restored["paths"] == [[*path, half]]
        assert (wrong, disturbed, untouched) == ([], [], True), way


# ---- the life of a mapping ----

COUNT, BLOCK_BYTES = 16, 320 * KIB
#: 5 MiB that begin inside the first of four chunks and end inside the last.
SHAPE = flat(BLOCK_BYTES, COUNT, [CHUNK] * 4, CHUNK - 64 * KIB)


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory, paths: Paths) -> Iterator[Node]:
    needs("cuda.bindings")
    folder = tmp_path_factory.mktemp("node")
    control = Control.create(folder / "control", device_count=2)
    node = Node(folder, environment(paths, control), control)
    yield node
    node.close()


@pytest.fixture(scope="module")
def daemon(two_gpus: Node) -> DaemonProcess:
    return two_gpus.daemon(gpus=("cuda:0", "cuda:1"))


@pytest.fixture
def engine(two_gpus: Node, daemon: DaemonProcess, make_engine: Callable[..., None], request: pytest.FixtureRequest) -> Iterator[Child]:
    wait_until(lambda: not daemon.status().sessions, "the end of old sessions")
    mover = two_gpus.mover(daemon)
    wait_until(lambda: held(mover) == (0, 0, 0), "the end of old mappings")
    made = two_gpus.engine()
    make_engine(made, daemon, **SHAPE, weights=request.node.name)
    yield made
    two_gpus.end_engines()


def held(mover: Process) -> tuple[int, int, int]:
    """Chunks mapped, ranges of addresses, handles of chunks."""
    counters = mover.counters
    return counters.mappings_now, counters.reservations_now, counters.allocation_handles_now


def chunk_fds(pid: int) -> int:
    """Descriptors of chunks in a process."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += "standin-chunk" in str(entry.readlink())
        except FileNotFoundError:
            # Closed since the folder was read.
            continue
    return count


def front_fds(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    return chunk_fds(daemon.process.pid)


def assert_held(node: Node, daemon: DaemonProcess, *, mapped: int, ranges: int, front: int) -> None:
    """What mover and front hold now. Descriptors of a mover are of its mappings' own: in the stand-ins, one a chunk that is mapped."""
    mover = node.mover(daemon)
    assert held(mover) == (mapped, ranges, 0)
    assert chunk_fds(mover.pid) == mapped
    # What came with a refused message is closed after the answer.
    wait_until(lambda: front_fds(daemon) == front, f"{front} descriptors in the front", timeout_s=30)


def works(engine: Child, prefix: str, options: str = "durable=True") -> None:
    stored, restored, wrong = engine.run(f"""
        names = [f"{prefix} {{number}}" for number in range(8)]
        for number, name in enumerate(names):
            engine.write(number, name)
        stored = engine.evict(range(8), names, {options})["outcomes"]
        restored = engine.restore(range(8, 16), names)["outcomes"]
        result = [stored, restored, engine.wrong(range(8, 16), names)]
    """)
    assert {outcome[0] for outcome in stored} == {"STORED"}
    assert {outcome[0] for outcome in restored} == {"RESTORED"}
    assert wrong == []


def test_two_regions_of_one_memory_share_its_descriptors_and_the_last_one_closes_them(engine: Child, two_gpus: Node, daemon: DaemonProcess) -> None:
    assert_held(two_gpus, daemon, mapped=4, ranges=1, front=4)
    engine.run("""
        second = engine.client.register_region(block_count=4, planes=[Plane(0, 4096, 8192, 8192)], memories=engine.memories, namespace=engine.namespace)
    """)
    assert_held(two_gpus, daemon, mapped=8, ranges=2, front=4)
    engine.run("engine.client.unregister_region(second)")
    assert_held(two_gpus, daemon, mapped=4, ranges=1, front=4)
    works(engine, "after one of two")
    engine.run("engine.client.unregister_region(engine.region)")
    assert_held(two_gpus, daemon, mapped=0, ranges=0, front=0)
    engine.run("engine.register()")
    works(engine, "registered again")


def test_a_region_may_have_memories_of_both_kinds_in_any_order(engine: Child, two_gpus: Node, daemon: DaemonProcess) -> None:
    engine.run(f"""
        engine.client.unregister_region(engine.region)
        allocation = int(ok(cu.cuMemAlloc({CHUNK})))
        chunk = virtual_memory([{CHUNK}])
        engine.memories += [export_pointer(allocation, {CHUNK}), export_pointer(chunk, {CHUNK})]
        engine.pointers += [allocation, chunk]
        engine.planes = [Plane(memory, 0, 8192, 8192) for memory in (2, 0, 1)]
        engine.register()
    """)
    works(engine, "both kinds")
    engine.run("engine.client.unregister_region(engine.region)")
    assert_held(two_gpus, daemon, mapped=0, ranges=0, front=0)
    assert two_gpus.mover(daemon).counters.memory_handles_open_now == 0


def test_an_engine_that_dies_leaves_no_chunk(engine: Child, two_gpus: Node, daemon: DaemonProcess) -> None:
    works(engine, "before")
    mover = two_gpus.mover(daemon)
    engine.kill()
    wait_until(lambda: held(mover) == (0, 0, 0) and front_fds(daemon) == 0, "the end of its mappings")
    assert chunk_fds(mover.pid) == 0


def test_a_mover_that_dies_is_given_the_chunks_again(engine: Child, two_gpus: Node, daemon: DaemonProcess) -> None:
    works(engine, "before")
    dead = two_gpus.mover(daemon)
    os.kill(dead.pid, signal.SIGKILL)
    fresh = two_gpus.mover(daemon, after=dead)
    wait_until(lambda: held(fresh) == (4, 1, 0), "the chunks to be mapped again")
    works(engine, "after")
    assert_held(two_gpus, daemon, mapped=4, ranges=1, front=4)


def test_a_client_hands_its_chunks_over_again_when_the_daemon_was_restarted(standin_node: Node, make_engine: Callable[..., None]) -> None:
    daemon, engine = standin_node.daemon(), standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    engine.run("""
        for number in range(8):
            engine.write(number, str(number))
        engine.evict(range(8), map(str, range(8)), durable=True)
    """)
    daemon.restart(signal.SIGKILL)
    restored, wrong = engine.run("""
        restored = engine.restore(range(8, 16), map(str, range(8)))["outcomes"]
        result = [restored, engine.wrong(range(8, 16), map(str, range(8)))]
    """)
    assert {outcome[0] for outcome in restored} == {"RESTORED"} and wrong == []
    mover = standin_node.mover(daemon)
    assert (mover.counters.mappings_now, front_fds(daemon)) == (4, 4)


def test_the_asynchronous_client_hands_over_and_takes_back(engine: Child, two_gpus: Node, daemon: DaemonProcess) -> None:
    assert daemon.process is not None
    outcomes, wrong = engine.run(f"""
        import asyncio
        from pathlib import Path as FilePath
        from offloadd.client import AsyncClient

        async def main():
            async with await AsyncClient.connect({str(daemon.runtime_dir)!r}, instance="async") as client:
                region = await client.register_region(block_count=16, planes=engine.planes, memories=engine.memories, namespace=engine.namespace)
                engine.write(3, "async")
                await client.evict(Blocks(region, [3], [b"async"]))
                restored = await client.restore(Blocks(region, [12], [b"async"]))
                refused = ""
                try:
                    await client.register_region(block_count=17, planes=engine.planes, memories=[in_chunks(engine.memories[0])], namespace=engine.namespace)
                except OffloaddError as error:
                    refused = str(error)
                await client.unregister_region(region)
                left = [str(fd.readlink()) for fd in FilePath("/proc/{daemon.process.pid}/fd").iterdir() if fd.is_symlink()]
                return [restored.outcomes[0].status.name, refused, sum("standin-chunk" in name for name in left)]

        engine.client.unregister_region(engine.region)
        result = [asyncio.run(main()), engine.wrong([12], ["async"])]
    """)
    assert outcomes[0] == "RESTORED" and str(COUNT * BLOCK_BYTES) in outcomes[1] and wrong == []
    assert outcomes[2] == 0, "what was refused or unregistered is still in the daemon"
    assert_held(two_gpus, daemon, mapped=0, ranges=0, front=0)


def test_a_region_of_more_chunks_than_a_packet_carries_is_mapped_in_order(
    two_gpus: Node, daemon: DaemonProcess, engine: Child, make_engine: Callable[..., None]
) -> None:
    many = two_gpus.engine()
    # Two memories of 153 chunks, each with a block over the borders of chunks far apart: a descriptor out of its place would give wrong bytes.
    stride = 16 * MIB
    shape = {
        "block_count": 19,
        "memory_bytes": [19 * stride] * 2,
        "planes": [(0, CHUNK - 3000, stride, 6000), (1, CHUNK - 3000, stride, 6000)],
        "chunk_bytes": [[CHUNK] * 153] * 2,
        "filled": False,
    }
    make_engine(many, daemon, **shape, instance="many", weights="many")
    assert held(two_gpus.mover(daemon)) == (310, 3, 0)
    stored, restored, wrong = many.run("""
        names = [str(number) for number in range(9)]
        for number, name in enumerate(names):
            engine.write(2 * number, name)
        stored = engine.evict(range(0, 18, 2), names)["outcomes"]
        order = [2 * number + 1 for number in reversed(range(9))]
        result = [stored, engine.restore(order, names)["outcomes"], engine.wrong(order, names)]
    """)
    assert {outcome[0] for outcome in stored} == {"STORED"} and {outcome[0] for outcome in restored} == {"RESTORED"} and wrong == []
    dead = two_gpus.mover(daemon)
    os.kill(dead.pid, signal.SIGKILL)
    fresh = two_gpus.mover(daemon, after=dead)
    wait_until(lambda: held(fresh) == (310, 3, 0), "all to be mapped again")
    assert many.run("engine.client.unregister_region(engine.region)") is None
    assert_held(two_gpus, daemon, mapped=4, ranges=1, front=4)


# ---- what can't be ----


@pytest.fixture
def bad(engine: Child, two_gpus: Node, daemon: DaemonProcess) -> Iterator[Child]:
    """An engine that hands over what can't be; when the test is over, the daemon must serve it still and hold nothing else."""
    mover = two_gpus.mover(daemon)
    yield engine
    assert two_gpus.mover(daemon).pid == mover.pid
    assert_held(two_gpus, daemon, mapped=4, ranges=1, front=4)
    works(engine, "later")


def test_a_memfd_does_not_pass_for_a_chunk(bad: Child) -> None:
    kind, error = bad.run(f"""
        memory = engine.memories[0]
        memfd = os.memfd_create("no chunk")
        os.ftruncate(memfd, {CHUNK})
        # The first memory is mapped when the second is refused.
        result = engine.try_region([in_chunks(memory), in_chunks(memory, fds=[*memory.fds[:3], memfd])])
    """)
    assert kind == "InvalidRequest"
    assert re.search(rf"import chunk 3 of {CHUNK} bytes from descriptor \d+ on cuda:0.*must come from cuMemExportToShareableHandle", error)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (CHUNK - 1, f"chunk 1 has {CHUNK - 1} bytes; it must be a multiple of {CHUNK}, the granularity of cuda:0"),
        (2 * CHUNK, f"map chunk 1: CUDA_ERROR_INVALID_VALUE.*it must have {2 * CHUNK} bytes at least"),
    ],
)
def test_chunks_of_another_size_than_announced_are_refused(bad: Child, size: int, words: str) -> None:
    kind, error = bad.run(f"memory = engine.memories[0]; result = engine.try_region([in_chunks(memory, sizes=[{CHUNK}, {size}, {CHUNK}, {CHUNK}])])")
    assert kind == "InvalidRequest" and re.search(words, error), error


def test_memory_outside_its_chunks_is_refused_at_the_attach_socket(bad: Child) -> None:
    errors = bad.run(f"""
        memory = engine.memories[0]
        result = [
            engine.try_region([in_chunks(memory, offset_bytes={4 * CHUNK})]),
            engine.try_region([in_chunks(memory, memory_bytes={4 * CHUNK})]),
            engine.try_region([in_chunks(memory, offset_bytes=-1)]),
        ]
    """)
    for (kind, error), (offset, size) in zip(errors, [(4 * CHUNK, COUNT * BLOCK_BYTES), (CHUNK - 64 * KIB, 4 * CHUNK), (-1, COUNT * BLOCK_BYTES)], strict=True):
        assert kind == "InvalidRequest" and f"memory of {size} bytes at offset {offset} is outside its chunks of {4 * CHUNK} bytes" in error


def test_a_layout_beyond_the_memory_is_refused_though_the_chunk_goes_on(bad: Child) -> None:
    kind, error = bad.run(f"result = engine.try_region([in_chunks(engine.memories[0])], block_count={COUNT + 1})")
    assert kind == "InvalidRequest" and f"ends at byte {(COUNT + 1) * BLOCK_BYTES}; its memory 0 has {COUNT * BLOCK_BYTES} bytes" in error


def test_chunks_of_another_gpu_are_refused_whatever_their_owner_calls_them(bad: Child, two_gpus: Node, daemon: DaemonProcess) -> None:
    wrong, named, forged, missing = bad.run(f"""
        from offloadd.client.values import Region

        memory = engine.memories[0]
        context = ok(cu.cuDevicePrimaryCtxRetain(1))
        ok(cu.cuCtxPushCurrent(context))
        other = export_pointer(virtual_memory([{CHUNK}]), {CHUNK})
        ok(cu.cuCtxPopCurrent())

        def register(device, memory):
            # The client itself takes the device from the memory; other clients may err.
            region = Region(device, 0, 1, (Plane(0, 0, 4096, 4096),), (memory,), engine.namespace)
            call = Request(lambda: engine.client._call(lambda link: engine.client._register(link, region)))
            error = call.finish()["error"]
            engine.client._detach(engine.client._link, region)
            return error

        result = [
            register("cuda:0", other),
            register("host", other),
            engine.try_region([in_chunks(other, device_uuid=memory.device_uuid)], block_count=1, planes=[Plane(0, 0, 4096, 4096)]),
            engine.try_region([in_chunks(memory, device_uuid="GPU-00000000-0000-0000-0000-00000000dead")]),
        ]
    """)
    assert wrong[0] == "InvalidRequest" and re.search(r"memory 0 is on device GPU-\S+; the region is on device cuda:0 \(GPU-", wrong[1])
    assert named == ["InvalidRequest", "memory 0 is not an attached memfd; a region on device host takes no other kind"]
    assert forged[0] == "InvalidRequest" and "chunk 0 is memory of cuda:1; this mover works on cuda:0" in forged[1]
    assert missing[0] == "PathUnavailable" and "has no mover on this node" in missing[1]


def test_a_memory_that_was_closed_is_refused(bad: Child) -> None:
    kind, error = bad.run("closed = in_chunks(engine.memories[0]); closed.close(); result = engine.try_region([closed])")
    assert (kind, error) == ("InvalidRequest", "the device memory is closed")


def test_a_driver_that_maps_no_more_refuses_the_region_and_leaves_nothing(bad: Child, two_gpus: Node, daemon: DaemonProcess) -> None:
    control, pid = two_gpus.control, two_gpus.mover(daemon).pid
    assert control is not None
    for function, skip in (("cuMemAddressReserve", 0), ("cuMemImportFromShareableHandle", 2), ("cuMemMap", 3), ("cuMemSetAccess", 0)):
        with control.fail(function, 2, skip=skip, times=1, pid=pid):
            kind, error = bad.run("result = engine.try_region([in_chunks(engine.memories[0])])")
        assert kind == "InvalidRequest" and "CUDA_ERROR_OUT_OF_MEMORY" in error, function
        assert_held(two_gpus, daemon, mapped=4, ranges=1, front=4)


def test_chunks_over_the_limit_of_a_session_are_refused(standin_node: Node, make_engine: Callable[..., None]) -> None:
    daemon, engine = standin_node.daemon(limits={"memories_per_session_max": 1}), standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    kind, error = engine.run("result = engine.try_region([in_chunks(engine.memories[0])])")
    assert kind == "LimitExceeded" and "memories_per_session_max is 1" in error
    assert_held(standin_node, daemon, mapped=4, ranges=1, front=4)
    works(engine, "later")

"""Two NUMA nodes with a GPU each: movers run at home, evicts find slots at home, and slots are right whatever is page-locked yet."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from offloadd.units import KIB, MIB

from ..memory.trees import pci_device, two_nodes
from ..standin.controls import Process, wait_until
from ..standin_tests.child import Child
from ..system.daemon_process import DaemonProcess
from .conftest import Node, settled_gds

CPUS = sorted(os.sched_getaffinity(0))
COUNT, BLOCK_BYTES = 24, 2 * MIB
#: Each node has half of it: eight blocks.
ARENA_BYTES = 32 * MIB
SHAPE: dict[str, object] = {
    "block_count": COUNT,
    "memory_bytes": [COUNT * BLOCK_BYTES],
    "planes": [(0, plane * COUNT * BLOCK_BYTES // 2, BLOCK_BYTES // 2, BLOCK_BYTES // 2) for plane in range(2)],
}
CHUNKS = 2
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="this process has one CPU")


@pytest.fixture
def root(standin_node: Node, tmp_path: Path) -> Path:
    """The machine of the movers: one CPU and one GPU a node. The arena is page-locked at once."""
    root = tmp_path / "root"
    two_nodes(root, f"{CPUS[0]}", f"{CPUS[1]}")
    # As the stand-in numbers them.
    pci_device(root, "0000:10:00.0", 0)
    pci_device(root, "0000:11:00.0", 1)
    standin_node.environment["OFFLOADD_TEST_ROOT"] = str(root)
    for number in range(CHUNKS):
        allow(root, number)
    return root


def allow(root: Path, number: int) -> None:
    (root / f"locks-{number}").touch()


def start(node: Node, *gpus: str, **options: object) -> DaemonProcess:
    options = {"arena_bytes": ARENA_BYTES, "volume_count": 0, "command": ("-m", "tests.gpu.daemon_on_two_nodes")} | options
    return node.daemon(gpus=gpus, **options)


def cpus_of(pid: int) -> set[frozenset[int]]:
    """Of each of its threads."""
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in Path(f"/proc/{pid}/task").iterdir()}


def used(daemon: DaemonProcess) -> list[int]:
    """Blocks by node."""
    nodes = daemon.status().arena.nodes
    assert [(one.node, one.arena_bytes) for one in nodes] == [(0, ARENA_BYTES // 2), (1, ARENA_BYTES // 2)]
    return [one.used_bytes // BLOCK_BYTES for one in nodes]


def store(engine: Child, count: int, prefix: str = "block") -> None:
    outcomes = engine.run(f"""
        names = [f"{prefix} {{number}}" for number in range({count})]
        for number, name in enumerate(names):
            engine.write(number, name)
        result = engine.evict(range({count}), names, tier='ARENA')["outcomes"]
        for number in range({count}):
            engine.write(number, "other")
    """)
    assert {outcome[0] for outcome in outcomes} == {"STORED"}


def restore(engine: Child) -> None:
    """All of `names`, right, into the last blocks."""
    restored, wrong = engine.run(f"""
        places = range({COUNT} - len(names), {COUNT})
        restored = engine.restore(places, names, path='DDR', require_path=True)
        result = [restored, engine.wrong(places, names)]
    """)
    assert {outcome[0] for outcome in restored["outcomes"]} == {"RESTORED"} and wrong == []


def remote(daemon: DaemonProcess) -> dict[str, int]:
    return {name.split('"')[1]: count for name, count in daemon.counters().items() if name.startswith("offloadd_arena_remote_blocks")}


def test_movers_run_and_blocks_lie_on_the_node_of_their_gpu(standin_node: Node, root: Path, make_engine: Callable[..., None]) -> None:
    daemon = start(standin_node, "cuda:0", "cuda:1")
    assert cpus_of(daemon.worker_pid("mover cuda:0")) == {frozenset({CPUS[0]})}
    assert cpus_of(daemon.worker_pid("mover cuda:1")) == {frozenset({CPUS[1]})}
    assert cpus_of(daemon.worker_pid("mover host")) == {frozenset(CPUS)}, "it serves no node more than another"
    placements = {worker.name: worker.placement for worker in daemon.status().workers}
    assert placements == {"mover host": "", "mover cuda:0": f"NUMA node 0, CPUs {CPUS[0]}", "mover cuda:1": f"NUMA node 1, CPUs {CPUS[1]}"}
    assert f"NUMA node 1, CPUs {CPUS[1]}" in daemon.log.read_text()
    engine = standin_node.engine(1)
    make_engine(engine, daemon, **SHAPE)
    store(engine, 8)
    assert used(daemon) == [0, 8] and remote(daemon) == {}
    restore(engine)
    assert remote(daemon) == {}
    store(engine, 6, "more")
    assert used(daemon) == [6, 8] and remote(daemon) == {"evict": 6}, "far slots rather than victims"
    restore(engine)
    assert remote(daemon) == {"evict": 6, "restore": 6}
    other = standin_node.engine(0)
    make_engine(other, daemon, **SHAPE, instance="other", weights="other")
    store(other, 4)
    assert used(daemon) == [8, 8] and remote(daemon) == {"evict": 6, "restore": 6}, "two slots at home were free, and two more are reclaimed there"
    restore(other)


def test_a_mover_that_is_started_again_is_bound_again(standin_node: Node, root: Path, make_engine: Callable[..., None]) -> None:
    daemon, engine = start(standin_node, "cuda:1"), standin_node.engine(1)
    make_engine(engine, daemon, **SHAPE)
    store(engine, 8)
    before = standin_node.mover(daemon, "cuda:1")
    os.kill(before.pid, signal.SIGKILL)
    again = standin_node.mover(daemon, "cuda:1", after=before)
    daemon.wait_until(lambda: cpus_of(again.pid) == {frozenset({CPUS[1]})}, "its binding")
    engine.run("result = engine.restore([0], names[:1])")
    restore(engine)


def test_numa_can_be_turned_off(standin_node: Node, root: Path, make_engine: Callable[..., None]) -> None:
    daemon, engine = start(standin_node, "cuda:1", mover={"numa": False}), standin_node.engine(1)
    assert cpus_of(daemon.worker_pid("mover cuda:1")) == {frozenset(CPUS)}
    status = daemon.status()
    assert not status.arena.nodes and not any(worker.placement for worker in status.workers)
    make_engine(engine, daemon, **SHAPE)
    store(engine, 14)
    restore(engine)
    assert remote(daemon) == {}


def registered(mover: Process) -> int:
    return mover.counters.host_registered_bytes_now


def test_slots_are_right_before_while_and_after_the_arena_is_page_locked(standin_node: Node, root: Path, make_engine: Callable[..., None]) -> None:
    for number in range(CHUNKS):
        (root / f"locks-{number}").unlink()
    daemon, engine = start(standin_node, "cuda:1"), standin_node.engine(1)
    make_engine(engine, daemon, **SHAPE)
    mover = standin_node.mover(daemon, "cuda:1")
    # Both parts of the arena, none of them page-locked.
    store(engine, 14, "before")
    restore(engine)
    none = registered(mover)
    allow(root, 0)
    wait_until(lambda: registered(mover) == none + ARENA_BYTES // 2, "the first chunk")
    restore(engine)
    store(engine, 14, "while")
    restore(engine)
    allow(root, 1)
    wait_until(lambda: registered(mover) == none + ARENA_BYTES, "the second chunk")
    restore(engine)
    store(engine, 14, "after")
    restore(engine)
    assert mover.counters.pageable_copies == 0, "the driver saw memory that was not page-locked"


def test_what_the_system_refuses_to_page_lock_is_told_once_and_served(standin_node: Node, root: Path, make_engine: Callable[..., None]) -> None:
    control = standin_node.control
    assert control is not None
    (root / "locks-1").unlink()
    daemon, engine = start(standin_node, "cuda:1", volume_count=1), standin_node.engine(1)
    make_engine(engine, daemon, **SHAPE)
    mover = standin_node.mover(daemon, "cuda:1")
    wait_until(lambda: registered(mover) >= ARENA_BYTES // 2, "the first chunk")
    # Tables of the kernels are uploaded once, from ordinary memory.
    settled_gds(daemon, "cuda:1")
    uploads = mover.counters.pageable_copies
    store(engine, 14, "before")
    before = registered(mover)
    control.limit_host_registration(before + ARENA_BYTES // 4)
    allow(root, 1)
    wait_until(lambda: "copies to and from the others are slower" in daemon.log.read_text(), "the word of it")
    assert registered(mover) == before - ARENA_BYTES // 2, "the chunk before it makes room for staging slots"
    restore(engine)
    store(engine, 14, "later")
    restore(engine)
    assert mover.counters.pageable_copies == uploads
    assert daemon.log.read_text().count("slower") == 1 and "locked_bytes=0" in daemon.log.read_text()
    assert daemon.counters().get("faults", 0) == 0 and standin_node.mover(daemon, "cuda:1").pid == mover.pid


#: Shorter than the memory that copies pass through, so that several go together, and longer, so that one goes in pieces; with odd ends.
@pytest.mark.parametrize("block_bytes", [5_001, 96 * KIB, 3 * MIB + 17])
def test_blocks_of_any_length_pass_through_memory_of_ours(standin_node: Node, root: Path, make_engine: Callable[..., None], block_bytes: int) -> None:
    for number in range(CHUNKS):
        (root / f"locks-{number}").unlink()
    daemon, engine = start(standin_node, "cuda:0", mover={"verify_target": 1}), standin_node.engine(0)
    stride = block_bytes + 7
    make_engine(engine, daemon, block_count=COUNT, memory_bytes=[COUNT * stride], planes=[(0, 0, stride, block_bytes)])
    store(engine, 8)
    restore(engine)
    assert engine.run("result = engine.margins()")
    assert standin_node.mover(daemon, "cuda:0").counters.pageable_copies == 0


@pytest.fixture
def inside(standin_node: Node) -> Child:
    """A mover's device and a region of 8 blocks of 64 KiB of an engine's, to be called directly; `arena` has slabs of 2 MiB on nodes 0, 1 and 0."""
    engine = standin_node.engine(0)
    handle = engine.run("""
        pointer = int(ok(cu.cuMemAlloc(8 << 16)))
        ok(cu.cuMemsetD8(pointer, 0xEE, 8 << 16))
        result = export_pointer(pointer, 8 << 16).ipc_handle.hex()
    """)
    child = Child(standin_node.environment)
    standin_node.engines.append(child)
    child.run(f"""
        import numpy as np
        from offloadd.memory.memfd import create_sealed
        from offloadd.model.region import Layout, Plane
        from offloadd.mover.arena import map_arena
        from offloadd.mover.cuda_device import CudaDevice
        from offloadd.mover.messages import ArenaPart, IpcPiece
        from offloadd.transfer.gather import Payloads
        device = CudaDevice("cuda:0")
        layout = Layout(8, (Plane(0, 0, 1 << 16, 1 << 16),))
        region = device.map_region(layout, (8 << 16,), [], [IpcPiece(bytes.fromhex({handle!r}), 0)])
        parts = tuple(ArenaPart(node, 2 << 20) for node in (0, 1, 0))
        arena = map_arena(create_sealed("arena", 6 << 20), 6 << 20, huge_pages=False, slab_bytes=2 << 20, parts=parts)
        device.scratch()

        def reached():
            answer = [None] * 3
            for mine, reached in device.parts(Payloads(arena.bytes, np.arange(3) * (2 << 20), 2 << 20), 4096):
                for number in np.arange(3)[mine].tolist():
                    answer[number] = reached
            return answer
    """)
    return child


def test_chunks_on_its_own_node_are_page_locked_first(standin_node: Node, inside: Child) -> None:
    assert standin_node.control is not None
    with standin_node.control.hang("cuMemHostRegister", skip=2, pid=inside.pid) as fault:
        inside.run("device.adopt_arena(arena, 1)")
        wait_until(lambda: bool(fault.waiting_now), "the third chunk")
        # The one before it is locked, but not told of yet.
        assert inside.run("result = reached()") == [False, True, False]
    wait_until(lambda: bool(inside.run("result = all(reached())")), "the end")


def test_a_block_that_the_region_does_not_have_is_refused_before_any_byte_moves(standin_node: Node, inside: Child) -> None:
    assert standin_node.control is not None
    with standin_node.control.hang("cuMemHostRegister", pid=inside.pid) as fault:
        inside.run("device.adopt_arena(arena, 0)")
        wait_until(lambda: bool(fault.waiting_now), "the first chunk")
        told, before, right = inside.run("""
            def block():
                answer = np.zeros(1 << 16, np.uint8)
                region.gather(np.array([0], np.uint32), Payloads(answer, np.zeros(1, np.int64), 1 << 16), 0, None)
                return answer
            blocks = np.arange(17, dtype=np.uint32) % 8
            blocks[16] = 8
            # More than pass at once, in two chunks.
            places = Payloads(arena.bytes, np.arange(17) * (1 << 17) + (1 << 20), 1 << 17)
            arena.bytes[:] = 7
            told = ""
            try:
                region.scatter(blocks, places, 0, None)
            except ValueError as error:
                told = str(error)
            before = bool((block() == 0xEE).all())
            region.scatter(blocks[:8], Payloads(places.buffer, places.offsets[:8], 1 << 17), 0, None)
            result = [told, before, bool((block() == 7).all())]
        """)
    assert told == "block index 8 is outside the region of 8 blocks"
    assert before and right


def test_neighbours_in_two_chunks_are_not_copied_as_one(inside: Child) -> None:
    inside.run("device.adopt_arena(arena, 0)")
    wait_until(lambda: bool(inside.run("result = all(reached())")), "the page-locked arena")
    # Four slots before a border and four behind it, which touch each other on both sides: one copy, if the border were not there.
    assert inside.run("""
        places = Payloads(arena.bytes, (2 << 20) + (np.arange(8) - 4) * (1 << 16), 1 << 16)
        region.gather(np.arange(8, dtype=np.uint32), places, 0, None)
        result = bool((arena.bytes[(2 << 20) - (4 << 16) : (2 << 20) + (4 << 16)] == 0xEE).all())
    """)

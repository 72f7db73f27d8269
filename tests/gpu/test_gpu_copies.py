"""Blocks move by kernels or by the copy engines, as configured or as measured, and what fails in kernels ends as what fails in copies does."""

from collections.abc import Callable

import pytest

from offloadd.units import MIB

from ..standin.controls import Control, Process, wait_until
from ..standin_tests.child import Child
from ..system.daemon_process import DaemonProcess
from .conftest import Node, settled_gds

COUNT, PIECE_BYTES, LAYERS = 16, 1008, 3
#: K and V of three layers in two memories, with gaps; not even rows of 16 bytes lie equally on both sides.
SHAPE: dict[str, object] = {
    "block_count": COUNT,
    "memory_bytes": [LAYERS * COUNT * 1024, LAYERS * COUNT * 1031],
    "planes": [(which, layer * COUNT * stride, stride, PIECE_BYTES + which) for layer in range(LAYERS) for which, stride in ((0, 1024), (1, 1031))],
}
WAYS = {
    "ddr": ("tier='ARENA'", "path='DDR', require_path=True"),
    "bounce": ("durable=True, path='BOUNCE', require_path=True", "path='BOUNCE', require_path=True"),
    "gds": ("durable=True, path='GDS', require_path=True", "path='GDS', require_path=True"),
}
ENGINE_CALLS = ("cuMemcpy2DAsync", "cuMemcpyBatchAsync")
#: Long beside what the copies of a few KiB take here.
DELAY_US = 100_000
#: CUresult.
INVALID_VALUE, ILLEGAL_ADDRESS = 1, 700


def control_of(node: Node) -> Control:
    assert node.control is not None
    return node.control


def unmeasured(node: Node, **options: object) -> DaemonProcess:
    """Tables of 5 MiB and seven slabs, so no scratch area: nothing moves but what the test moves."""
    return node.daemon(volume_bytes=(5 + 7 * 16) * MIB, **options)


def settled(daemon: DaemonProcess, times: int = 1, words: str = "copies were chosen") -> str:
    """The log, when that many choices were told."""
    daemon.wait_until(lambda: daemon.log.read_text().count(words) >= times, f"{words!r} in the log", timeout_s=120)
    return daemon.log.read_text()


def moves(engine: Child, way: str, prefix: str = "block") -> None:
    """Blocks go out and come back into other places."""
    evict, restore = WAYS[way]
    evicted, restored, wrong, untouched = engine.run(f"""
        half = {COUNT // 2}
        names = [f"{prefix} {way} {{number}}" for number in range(half)]
        for number, name in enumerate(names):
            engine.write(number, name)
        evicted = engine.evict(range(half), names, {evict})["outcomes"]
        order = list(reversed(range(half, 2 * half)))
        restored = engine.restore(order, names, {restore})["outcomes"]
        result = [evicted, restored, engine.wrong(order, names) + engine.wrong(range(half), names), engine.margins()]
    """)
    assert {outcome[0] for outcome in evicted} == {"STORED"} and {outcome[0] for outcome in restored} == {"RESTORED"}
    assert wrong == [] and untouched


def launched(mover: Process) -> dict[str, int]:
    return {verb: mover.calls.get(f"kernel {verb}", 0) for verb in ("gather", "scatter")}


@pytest.mark.parametrize("way", WAYS)
def test_blocks_come_back_by_kernels(node: Node, make_engine: Callable[..., None], way: str) -> None:
    if node.control is None:
        pytest.importorskip("cupy", reason="CuPy is not installed")
    daemon, engine = unmeasured(node, gpu_copies="kernels"), node.engine()
    if way == "gds" and not settled_gds(daemon)[0]:
        pytest.skip(f"this machine has no way past the host: {settled_gds(daemon)[1]}")
    make_engine(engine, daemon, **SHAPE)
    assert "gather to the host by kernels" in settled(daemon)
    if node.control is None:
        moves(engine, way)
        return
    mover = node.mover(daemon)
    before, counted = launched(mover), mover.counters
    moves(engine, way)
    assert all(after > before[verb] for verb, after in launched(mover).items())
    if way != "gds":
        # All that copy engines still move is tables, and the blocks that verify_target compares.
        assert (mover.counters - counted).device_to_host_bytes == 2 * (COUNT // 2) * LAYERS * (2 * PIECE_BYTES + 1)


@pytest.mark.parametrize(("slow", "chosen"), [(ENGINE_CALLS, "kernels"), (("cuLaunchKernel",), "copy engines")], ids=["slow engines", "slow launches"])
def test_what_measures_better_moves_the_blocks(standin_node: Node, make_engine: Callable[..., None], slow: tuple[str, ...], chosen: str) -> None:
    daemon, engine = unmeasured(standin_node, gpu_copies="auto"), standin_node.engine()
    mover = standin_node.mover(daemon)
    for name in slow:
        control_of(standin_node).delay(name, DELAY_US, pid=mover.pid)
    make_engine(engine, daemon, **SHAPE)
    log = settled(daemon)
    assert f"gather to the host by {chosen} (GB/s" in log and f"scatter from the host by {chosen} (GB/s" in log
    control_of(standin_node).reset()
    before = launched(mover)
    moves(engine, "bounce")
    assert (launched(mover) != before) == (chosen == "kernels")


def test_measuring_touches_no_engine_memory(standin_node: Node, make_engine: Callable[..., None]) -> None:
    """Neither a byte of its blocks nor one beside them changes, and what the driver copies is what was asked for."""
    daemon, engine = unmeasured(standin_node, gpu_copies="auto"), standin_node.engine()
    engine.run("result = None")
    make_engine(engine, daemon, **SHAPE)
    before = engine.run("""
        for number in range(engine.block_count):
            engine.write(number, f"canary {number}")
        result = engine.digest()
        engine.client.unregister_region(engine.region)
        engine.memories = [export_pointer(pointer, size) for pointer, size in zip(engine.pointers, engine.memory_bytes)]
        engine.register()
    """)
    settled(daemon, times=2)
    assert engine.run("result = [engine.digest(), engine.margins()]") == [before, True]


@pytest.mark.parametrize("mode", ["auto", "kernels"])
@pytest.mark.parametrize("lack", ["no CuPy", "a compiler that refuses"])
def test_without_kernels_blocks_move_by_the_engines_and_it_is_told(standin_node: Node, make_engine: Callable[..., None], lack: str, mode: str) -> None:
    control = control_of(standin_node)
    if lack == "no CuPy":
        broken = standin_node.folder / "broken" / "cupy"
        broken.mkdir(parents=True)
        (broken / "__init__.py").write_text("raise ImportError('no CuPy here')")
        standin_node.environment["PYTHONPATH"] = f"{broken.parent}:{standin_node.environment['PYTHONPATH']}"
        words = "compile the kernels: CuPy can't be imported (no CuPy here); install offloadd with its extra cuda12 or cuda13"
    else:
        control.fail("cuModuleLoad", 209)
        words = "compile the kernels: CUDADriverError: CUDA_ERROR_NO_BINARY_FOR_GPU"
    daemon, engine = unmeasured(standin_node, gpu_copies=mode), standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    assert f"all copies go by the copy engines: {words}" in settled(daemon)
    moves(engine, "bounce")
    moves(engine, "ddr")
    assert not any(launched(standin_node.mover(daemon)).values())
    available, why = settled_gds(daemon)
    assert not available and words in why


def by_kernels(node: Node, make_engine: Callable[..., None], mode: str) -> tuple[DaemonProcess, Child, Process]:
    """A daemon that moves blocks by kernels, be it that it was told to or that they are faster, and an engine with blocks stored."""
    daemon, engine = unmeasured(node, gpu_copies=mode), node.engine()
    mover = node.mover(daemon)
    for name in ENGINE_CALLS if mode == "auto" else ():
        control_of(node).delay(name, DELAY_US, pid=mover.pid)
    make_engine(engine, daemon, **SHAPE)
    assert "scatter from the host by kernels" in settled(daemon)
    control_of(node).reset()
    moves(engine, "bounce")
    return daemon, engine, mover


@pytest.mark.parametrize(("mode", "later"), [("auto", False), ("kernels", True)])
def test_a_kernel_that_fails_ends_the_mover(standin_node: Node, make_engine: Callable[..., None], mode: str, later: bool) -> None:
    """And the next one goes without kernels, unless they were asked for: it would end the same way."""
    daemon, engine, mover = by_kernels(standin_node, make_engine, mode)
    with control_of(standin_node).fail("kernel scatter", ILLEGAL_ADDRESS, times=1, pid=mover.pid):
        outcomes = engine.run(f"result = engine.restore(range({COUNT // 2}, {COUNT}), names, {WAYS['bounce'][1]})")["outcomes"]
    assert ["FAILED", "WORKER_LOST"] in [outcome[:2] for outcome in outcomes]
    assert {outcome[0] for outcome in outcomes} <= {"FAILED", "RESTORED"}
    fresh = standin_node.mover(daemon, after=mover)
    if later:
        settled(daemon, times=2)
    moves(engine, "bounce", "later")
    log = daemon.log.read_text()
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in log
    assert ("kernels failed; later movers go by the copy engines" in log) != later
    assert any(launched(fresh).values()) == later


def register_while_measured(node: Node, daemon: DaemonProcess, engine: Child, make_engine: Callable[..., None]) -> None:
    """The region is registered before its measurement goes on: a mover that dies earlier would fail the registration."""
    with control_of(node).hang("cuLaunchKernel", times=1) as measuring:
        make_engine(engine, daemon, **SHAPE)
        wait_until(lambda: measuring.waiting_now == 1, "a measurement")


def test_a_context_that_is_lost_while_copies_are_measured_costs_no_choice(standin_node: Node, make_engine: Callable[..., None]) -> None:
    daemon, engine = unmeasured(standin_node, gpu_copies="auto"), standin_node.engine()
    mover = standin_node.mover(daemon)
    # Whatever was to blame, it has passed when the next mover measures.
    control_of(standin_node).fail("kernel gather", ILLEGAL_ADDRESS, times=1)
    for name in ENGINE_CALLS:
        control_of(standin_node).delay(name, DELAY_US)
    register_while_measured(standin_node, daemon, engine, make_engine)
    fresh = standin_node.mover(daemon, after=mover)
    assert "scatter from the host by kernels" in settled(daemon)
    control_of(standin_node).reset()
    moves(engine, "bounce")
    assert all(launched(fresh).values())
    log = daemon.log.read_text()
    assert "the next mover measures them again" in log and "later movers go by the copy engines" not in log


def test_a_kernel_that_fails_whenever_it_is_measured_costs_two_movers(standin_node: Node, make_engine: Callable[..., None]) -> None:
    daemon, engine = unmeasured(standin_node, gpu_copies="auto"), standin_node.engine()
    control_of(standin_node).fail("kernel gather", ILLEGAL_ADDRESS)
    first = standin_node.mover(daemon)
    register_while_measured(standin_node, daemon, engine, make_engine)
    settled(daemon, words="kernels failed; later movers go by the copy engines")
    settled(daemon, times=2, words="worker died; restarting")
    standin_node.mover(daemon, after=first)
    moves(engine, "bounce")
    assert daemon.log.read_text().count("worker died; restarting") == 2


def test_a_launch_that_the_driver_refuses_fails_its_blocks_alone(standin_node: Node, make_engine: Callable[..., None]) -> None:
    daemon, engine, mover = by_kernels(standin_node, make_engine, "kernels")
    with control_of(standin_node).fail("cuLaunchKernel", INVALID_VALUE, times=1, pid=mover.pid):
        outcomes = engine.run(f"result = engine.restore(range({COUNT // 2}, {COUNT}), names, {WAYS['bounce'][1]})")["outcomes"]
    assert ["FAILED", "IO_ERROR"] in [outcome[:2] for outcome in outcomes]
    assert standin_node.mover(daemon).pid == mover.pid
    moves(engine, "bounce", "later")


@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_a_block_is_answered_after_its_kernel_has_ended(standin_node: Node, make_engine: Callable[..., None], verb: str) -> None:
    _, engine, _ = by_kernels(standin_node, make_engine, "kernels")
    call = {
        "gather": "engine.evict([0], ['late'], durable=True)",
        "scatter": f"engine.restore([{COUNT - 1}], names[:1], {WAYS['bounce'][1]})",
    }[verb]
    engine.run(f"engine.write(0, 'late'); engine.write({COUNT - 1}, 'before')")
    with control_of(standin_node).hang(f"kernel {verb}") as kernel:
        engine.run(f"request = Request(lambda: {call})")
        wait_until(lambda: kernel.waiting_now == 1, "the kernel")
        assert engine.run(f"result = [request.answer, engine.wrong([{COUNT - 1}], ['before'])]") == [None, []]
    outcomes = engine.run("result = request.finish()")["outcomes"]
    assert outcomes[0][0] == {"gather": "STORED", "scatter": "RESTORED"}[verb]
    name = "'before'" if verb == "gather" else "names[0]"
    assert engine.run(f"result = engine.wrong([{COUNT - 1}], [{name}])") == []

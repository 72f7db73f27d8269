"""After each fault the driver holds for a mover what it held before: no mapping, registration, file, stream or allocation more."""

import errno
import os
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
from .test_gpu_faults import OUT_OF_MEMORY, _hold_in_the_middle, control_of, restores, store

COUNT, BLOCK_BYTES = 16, 64 * KIB
SHAPE: dict[str, object] = {"block_count": COUNT, "memory_bytes": [COUNT * BLOCK_BYTES], "planes": [(0, 0, BLOCK_BYTES, BLOCK_BYTES)]}
WAYS = {"ddr": "tier='ARENA'", "bounce": "durable=True, path='BOUNCE', require_path=True", "gds": "durable=True, path='GDS', require_path=True"}


@pytest.fixture(scope="module")
def gds_node(tmp_path_factory: pytest.TempPathFactory, paths: Paths, kernels: Path) -> Iterator[Node]:
    needs("cuda.bindings", "kvikio")
    folder = tmp_path_factory.mktemp("node")
    control = Control.create(folder / "control")
    node = Node(folder, environment(paths, control, kernels=kernels), control)
    yield node
    node.close()


@pytest.fixture(scope="module")
def daemon(gds_node: Node) -> DaemonProcess:
    # One thread a lane: after its first slice each thread has all that it ever keeps (a stream, a buffer, events).
    daemon = gds_node.daemon(io_threads=1, mover={"lane_threads": 1, "verify_target": 1})
    assert settled_gds(daemon) == (True, "")
    return daemon


def held(mover: Process) -> dict[str, int]:
    """What the driver and cuFile hold for a mover, regions not counted."""
    return {name: value for name, value in mover.counters.held.items() if name != "memory_handles_open_now"}


class Scene:
    """An engine with one region, blocks in every tier, and a mover whose threads have all worked once."""

    def __init__(self, node: Node, daemon: DaemonProcess, engine: Child) -> None:
        self.node, self.daemon, self.engine = node, daemon, engine
        self.mover = node.mover(daemon)
        wait_until(lambda: self.mover.counters.host_registered_bytes_now >= daemon.arena_bytes, "the page-locked arena")
        for way, options in WAYS.items():
            store(engine, options, way)
            restores(engine, f"path={way.upper()!r}, require_path=True")
        self.before = held(self.mover)

    def names(self, way: str) -> None:
        self.engine.run(f"names = [f'{way} {{number}}' for number in range(8)]")

    def nothing_more_is_held(self, *, regions: int) -> None:
        wait_until(lambda: self.mover.counters.memory_handles_open_now == regions, "the end of mappings")
        wait_until(lambda: self.mover.counters.work_queued == self.mover.counters.work_done, "the end of the work")
        assert held(self.mover) == self.before
        assert self.mover.counters.freed_while_registered == 0
        assert self.node.mover(self.daemon).pid == self.mover.pid


@pytest.fixture
def scene(gds_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None], request: pytest.FixtureRequest) -> Iterator[Scene]:
    wait_until(lambda: not daemon.status().sessions, "the end of old sessions")
    wait_until(lambda: not gds_node.mover(daemon).counters.memory_handles_open_now, "the end of old mappings")
    engine = gds_node.engine()
    make_engine(engine, daemon, **SHAPE, weights=request.node.name[:60])
    yield Scene(gds_node, daemon, engine)
    gds_node.end_engines()


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_is_killed_during_a_restore(scene: Scene, way: str) -> None:
    scene.names(way)
    _hold_in_the_middle(scene.mover, scene.engine, f"engine.restore(range(8, 16), names, path={way.upper()!r}, require_path=True)")
    scene.engine.kill()
    wait_until(lambda: not scene.daemon.status().sessions, "the end of the session")
    # What the GPU has begun can't be taken back: the memory stays mapped until it has ended.
    assert scene.mover.counters.memory_handles_open_now == 1
    scene.mover.release()
    scene.nothing_more_is_held(regions=0)


@pytest.mark.parametrize("call", ["cuFileRead", "cuFileWrite"])
def test_cufile_fails_in_the_middle_of_a_request(scene: Scene, call: str) -> None:
    scene.names("gds")
    with control_of(scene.node).fail(call, errno.EIO, times=1, pid=scene.mover.pid) as fault:
        if call == "cuFileRead":
            outcomes = scene.engine.run("result = engine.restore(range(8, 16), names, path='GDS', require_path=True)['outcomes']")
        else:
            outcomes = scene.engine.run("result = engine.evict(range(8), ['x' + name for name in names], durable=True, path='GDS')['outcomes']")
        assert fault.hits == 1
    assert ["FAILED", "IO_ERROR"] in [outcome[:2] for outcome in outcomes]
    scene.nothing_more_is_held(regions=1)
    restores(scene.engine, "path='GDS', require_path=True")


def test_a_short_transfer(scene: Scene) -> None:
    scene.names("gds")
    with control_of(scene.node).short("cuFileRead", 8192, times=1, pid=scene.mover.pid):
        outcomes = scene.engine.run("result = engine.restore(range(8, 16), names, path='GDS', require_path=True)['outcomes']")
    assert ["DATA_LOSS", "SHORT_IO"] in [outcome[:2] for outcome in outcomes]
    scene.nothing_more_is_held(regions=1)


def test_a_region_of_which_the_driver_opens_one_memory_and_not_the_other(scene: Scene) -> None:
    with control_of(scene.node).fail("cuIpcOpenMemHandle", OUT_OF_MEMORY, skip=1, times=1, pid=scene.mover.pid) as fault:
        error = scene.engine.run("""
            others = [export_pointer(int(ok(cu.cuMemAlloc(4096))), 4096) for _ in range(2)]
            result = engine.try_region(others, block_count=1, planes=[Plane(0, 0, 4096, 4096), Plane(1, 0, 4096, 4096)])
        """)
        assert fault.hits == 1
    assert error[0] == "InvalidRequest" and "CUDA_ERROR_OUT_OF_MEMORY" in error[1]
    scene.nothing_more_is_held(regions=1)


def test_regions_that_can_not_be(scene: Scene) -> None:
    dead = scene.node.engine()
    handle = dead.run("result = export_pointer(int(ok(cu.cuMemAlloc(4096))), 4096).ipc_handle.hex()")
    dead.kill()
    errors = scene.engine.run(f"""
        from dataclasses import replace
        memory = engine.memories[0]
        bad = [
            replace(memory, ipc_handle=bytes.fromhex({handle!r})),
            replace(memory, memory_bytes=memory.memory_bytes + 1),
            replace(memory, device_uuid="GPU-00000000-0000-0000-0000-00000000dead"),
        ]
        result = [engine.try_region([one])[0] for one in bad] + [engine.try_region([memory, bad[1]])[0]]
    """)
    assert errors == ["InvalidRequest", "InvalidRequest", "PathUnavailable", "InvalidRequest"]
    scene.nothing_more_is_held(regions=1)


@pytest.mark.parametrize("way", ["bounce", "gds"])
def test_a_mover_that_is_killed_during_dma(scene: Scene, way: str) -> None:
    scene.names(way)
    _hold_in_the_middle(scene.mover, scene.engine, f"engine.restore(range(8, 16), names, path={way.upper()!r}, require_path=True)")
    os.kill(scene.mover.pid, signal.SIGKILL)
    outcomes = scene.engine.run("result = request.finish()['outcomes']")
    assert {tuple(outcome[:2]) for outcome in outcomes} == {("FAILED", "WORKER_LOST")}
    after = scene.node.mover(scene.daemon, after=scene.mover)
    wait_until(lambda: after.counters.memory_handles_open_now == 1, "the region in the next mover")
    assert settled_gds(scene.daemon) == (True, "")
    restores(scene.engine, f"path={way.upper()!r}, require_path=True")
    # The next mover gives back as much as it took.
    scene.engine.run("engine.client.unregister_region(engine.region)")
    assert after.counters.memory_handles_open_now == 0


@pytest.mark.parametrize(
    ("limit", "served"),
    [(lambda control: control.limit_bar(20 * MIB), 2), (lambda control: control.limit_host_registration(30 * MIB), 1)],
    ids=["BAR1", "page-locked"],
)
def test_staging_slots_that_can_not_be_registered(standin_node: Node, limit: Callable[[Control], None], served: int) -> None:
    control = control_of(standin_node)
    # Some of the lane's slots of 8 MiB fit, then no more: those must be given back.
    limit(control)
    daemon = standin_node.daemon(arena_bytes=16 * MIB, mover={"lane_threads": 1})
    available, why = settled_gds(daemon)
    assert not available and why
    mover = standin_node.mover(daemon)
    ways = [way for way in daemon.status().paths if way.device == "cuda:0" and way.available]
    assert len(ways) == served
    bounce = served - 1
    # The arena, and where `bounce` is served its lane's slots.
    wait_until(lambda: mover.counters.host_registered_bytes_now == daemon.arena_bytes + bounce * 8 * 8 * MIB, "the end of all other registrations")
    left = mover.counters
    assert (left.cufile_buffers_now, left.cufile_buffer_bytes_now, left.cufile_handles_now) == (0, 0, 0)
    assert left.host_registrations_now == 1 + bounce * 8 and left.freed_while_registered == 0
    # Tables of the kernels, which a double of CuPy never gives back.
    assert left.allocated_bytes_now < MIB

"""The load whose steps are timed beside restores, and a mover of a GPU driven alone: what their figures rest on."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.support.gpu_load import BATCH, KERNELS, SOURCE, TINY, Shape, TorchLoad
from bench.support.process import Commanded, CommandedError
from offloadd.units import GIB

from ..standin.block import CufileMode
from ..standin.build import build, compiler
from ..standin.controls import Control, environment, wait_until
from ..standin.kernels import build_kernels
from ..standin_tests.child import PRELUDE, Child
from ..standin_tests.conftest import needs
from ..transfer.kernels.devices import gcc


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.create(tmp_path / "control")


@pytest.fixture
def child(tmp_path: Path, control: Control) -> Iterator[Child]:
    needs("cuda.bindings", "kvikio")
    if compiler() is None or gcc() is None:
        pytest.skip("gcc or g++ is not installed")
    child = Child(environment(build(tmp_path), control, kernels=build_kernels(tmp_path, {SOURCE: KERNELS})))
    child.run(PRELUDE)
    yield child
    control.reset()
    child.close()


def test_a_step_reads_every_weight_and_every_byte_of_kv(child: Child) -> None:
    outputs, expected, sums, xor = child.run("""
        import numpy as np
        from bench.support.gpu_load import BATCH, READERS, KernelLoad, Shape
        from offloadd.cuda.device import Device

        # The last warps of the last CTA have no row, and the last readers one word less than the first ones.
        shape = Shape(layers=1, rows=36, columns=320, kv_bytes=16 * 1000)
        device = Device.open("cuda:0")
        load = KernelLoad(device, shape)
        draw = np.random.default_rng(1)
        weights = draw.integers(0x3C00, 0x4000, (shape.rows, shape.columns), dtype=np.uint16)
        inputs = draw.random((BATCH, shape.columns), dtype=np.float32)
        kv = draw.integers(0, 1 << 32, shape.kv_bytes // 4, dtype=np.uint32)
        write(load.weights[0], weights.tobytes())
        write(load.inputs, inputs.tobytes())
        write(load.kv[0], kv.tobytes())
        load.step()
        outputs = np.frombuffer(read(load.outputs, BATCH * shape.rows * 4), dtype=np.float32)
        sums = np.frombuffer(read(load.sums, READERS * 4), dtype=np.uint32)
        values = (weights.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        result = [outputs.tolist(), (inputs.astype(np.float64) @ values.T).ravel().tolist(), int(np.bitwise_xor.reduce(sums)), int(np.bitwise_xor.reduce(kv))]
        load.close()
        device.close()
    """)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4)
    assert sums == xor


def test_torch_does_the_same_steps() -> None:
    load = TorchLoad("cpu", TINY)
    load.step()
    assert tuple(load.outputs.shape) == (TINY.rows, BATCH)
    np.testing.assert_allclose(load.outputs.float().numpy(), 0.01 * TINY.columns, rtol=0.01)


@pytest.mark.parametrize(("free_bytes", "step_bytes_max"), [(100 * GIB, 10 * GIB), (8 * GIB, 2 * GIB), (64 << 20, 16 << 20)])
def test_the_load_leaves_most_of_a_gpu_to_others(free_bytes: int, step_bytes_max: int) -> None:
    shape = Shape.for_memory(free_bytes)
    assert 0.9 * step_bytes_max <= shape.weight_bytes + shape.layers * shape.kv_bytes <= step_bytes_max * 1.1
    assert shape.rows % 4 == 0 and shape.columns % 8 == 0 and shape.kv_bytes % 16 == 0


def test_the_ceiling_of_gds_tells_when_it_bounced_itself(child: Child, control: Control, tmp_path: Path) -> None:
    child.run(f"""
        import contextlib
        from pathlib import Path
        from bench.gpu.device import EngineMemory, Gpu
        from bench.gpu.moves import gpu_mover, opened
        from bench.support.mover import layout_of, make_records
        from bench.support.restoring import make_volume
        from bench.support.workload import Blocks
        from offloadd.mover.messages import Operation
        from offloadd.tiers.format import slot_bytes_for

        work = Blocks("x", 128 * 1024, 12, 1, 1, 1)
        path = Path({str(tmp_path)!r}) / "volume"
        geometry = make_volume(path, work)
        held = contextlib.ExitStack()
        gpu = held.enter_context(Gpu("cuda:0"))
        engine = held.enter_context(EngineMemory(gpu, layout_of(work.block_bytes, work.block_count, 1)))
        file = held.enter_context(opened(path))
        lane = held.enter_context(gpu_mover(gpu, engine)).add_lane(1, file, geometry, path="gds")
        records, slot_bytes = make_records(work.block_bytes, work.block_count), slot_bytes_for(work.block_bytes)
        lane.run(Operation.EVICT, records, slot_bytes)
    """)
    read = """
        lane.run(Operation.READ_ONLY, records, slot_bytes)
        result = [lane.slice_count, lane.bounced_count]
    """
    slices, bounced = child.run(read)
    assert slices and bounced == 0
    # Bare KvikIO reads as much in as many I/Os.
    child.run("from bench.gpu.moves import read_slices")
    offsets = child.run("result = sorted(read_slices(geometry, work))")
    assert len(offsets) == slices and sum(size_bytes for _, size_bytes in offsets) == 12 * child.run("result = slot_bytes")
    assert all(offset + size_bytes == following for (offset, size_bytes), (following, _) in itertools.pairwise(offsets))
    control.cufile_mode = CufileMode.COMPAT
    assert child.run(read) == [slices, slices]
    child.run("held.close()")


def test_kvikio_alone_that_bounces_is_no_ceiling_of_gds(child: Child, control: Control, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    child.run(f"""
        import asyncio
        from bench.grid.engine import GridEngine
        from bench.grid.engine import Refused

        engine = GridEngine(None)
        asyncio.run(engine.open_gpu(gpu="cuda:0"))
        def ceiling():
            ios = [(0, 0, 1 << 19), (0, 1 << 19, 1 << 19)]
            try:
                return asyncio.run(engine.bare_kvikio(paths=[{str(path)!r}], ios=ios, threads=2, writes=False))["seconds"] > 0
            except Refused as error:
                return str(error)
    """)
    assert child.run("result = ceiling()") is True
    control.cufile_mode = CufileMode.COMPAT
    assert child.run("result = ceiling()") == "I/Os of KvikIO alone did not all go past the host: 2 by cufile_posix"


def test_a_figure_of_gds_beside_a_ceiling_that_bounced_is_left_out(child: Child, tmp_path: Path) -> None:
    figures, skipped = child.run(f"""
        import argparse
        from pathlib import Path
        from bench.gpu import moves
        from bench.gpu.device import Gpu
        from bench.gpu.figures import Figures
        from bench.support.report import Report
        from bench.support.workload import Blocks
        from offloadd.model.enums import Way

        class Bounced(moves.BareReads):
            def run(self):
                return super().run()[0], {{Way.GDS_NVFS: 11, Way.CUFILE_POSIX: 1}}

        moves.BareReads = Bounced
        folder = Path({str(tmp_path)!r})
        report = Report("x", "?", argparse.Namespace(dir=folder, tiny=True, results=folder))
        with Gpu("cuda:0") as gpu:
            moves.gds(Figures(report, standin=True), gpu, Blocks("x", 128 * 1024, 12, 1, 1, 1), folder)
        result = [[figure.name for figure in report.figures], report.facts["skipped: x: restore by gds"]]
    """)
    assert figures == [] and skipped == "I/Os of KvikIO alone did not all go past the host: 11 by gds_nvfs, 1 by cufile_posix"


def test_an_arena_that_is_not_page_locked_is_told(child: Child, control: Control) -> None:
    begin = """
        from bench.gpu.device import EngineMemory, Gpu
        from bench.gpu.moves import arena_memory, arena_way, gpu_mover
        from bench.support.mover import layout_of, make_records
        from bench.support.workload import Blocks
        from offloadd.mover.messages import Operation

        work = Blocks("x", 128 * 1024, 12, 1, 1, 1)
        arenas = arena_memory(work)
        fd, arena = arenas.__enter__()
        gpu = Gpu("cuda:0")
        engine = EngineMemory(gpu, layout_of(work.block_bytes, work.block_count, 1))
        movers = gpu_mover(gpu, engine)
        mover = movers.__enter__()
        locked = mover.map_locked_arena(fd, arena.bytes.nbytes)
        result = [locked.locked_bytes == arena.bytes.nbytes, locked.why]
    """
    restore = """
        lane, records = mover.add_lane(1), make_records(work.block_bytes, work.block_count)
        lane.run(Operation.ARENA_EVICT, records, work.block_bytes)
        engine.wipe()
        lane.run(Operation.ARENA_RESTORE, records, work.block_bytes)
        engine.require_original("restore")
        result = arena_way([locked])
        movers.__exit__(None, None, None)
    """
    assert child.run(begin) == [True, ""]
    assert "NOT" not in child.run(restore)
    # After the two that the mover measures copies with.
    with control.fail("cuMemHostRegister", 304, skip=2, times=1):
        locked, why = child.run(begin)
        assert not locked and "page-lock" in why
        assert "NOT page-locked" in child.run(restore)


def test_the_arena_of_a_figure_is_page_locked_before_it_is_used(child: Child, control: Control, tmp_path: Path) -> None:
    child.run("""
        from bench.gpu.device import EngineMemory, Gpu
        from bench.gpu.moves import arena_memory, gpu_mover
        from bench.support.mover import layout_of
        from bench.support.workload import Blocks

        work = Blocks("x", 128 * 1024, 12, 1, 1, 1)
        arenas = arena_memory(work)
        fd, arena = arenas.__enter__()
        gpu = Gpu("cuda:0")
        engine = EngineMemory(gpu, layout_of(work.block_bytes, work.block_count, 1))
        movers = gpu_mover(gpu, engine)
        mover = movers.__enter__()
        result = mover.pid
    """)
    with control.hang("cuMemHostRegister", times=1) as fault:
        child.start(f"""
            from pathlib import Path
            notice = mover._notice
            def waiting(what):
                Path({str(tmp_path)!r}, "waits").touch()
                notice(what)
            mover._notice = waiting
            result = mover.map_locked_arena(fd, arena.bytes.nbytes).locked_bytes == arena.bytes.nbytes
        """)
        wait_until(lambda: fault.waiting_now == 1, "the mover to page-lock the arena")
        wait_until(lambda: (tmp_path / "waits").exists(), "the figure to wait for it")
    assert child.finish() is True
    child.run("movers.__exit__(None, None, None)")


def test_copies_and_checksums_that_are_wrong_give_no_figures(child: Child, tmp_path: Path) -> None:
    said = child.run(f"""
        import argparse
        from pathlib import Path
        from bench.gpu.checksums import checksums
        from bench.gpu.copies import gather_and_scatter
        from bench.gpu.device import EngineMemory, Gpu
        from bench.gpu.figures import Figures
        from bench.support.mover import layout_of
        from bench.support.report import Report
        from bench.support.workload import Blocks
        from offloadd.transfer.kernels.cupy_launcher import open_cupy_kernels

        class Idle:
            # As fast as can be.
            def gather(self, *_, **__): pass
            scatter = checksums = gather

        class Half:
            # What it gathers is right, what it scatters nothing.
            def __init__(self, kernels): self.gather = kernels.gather
            def scatter(self, *_, **__): pass

        def attempt(work):
            try:
                work()
            except RuntimeError as error:
                said.append(str(error))

        said = []
        work = Blocks("x", 64 * 1024, 4, 2, 1, 1)
        folder = Path({str(tmp_path)!r})
        report = Report("x", "?", argparse.Namespace(dir=folder, tiny=True, results=folder))
        with Gpu("cuda:0") as gpu:
            figures = Figures(report, standin=True)
            with EngineMemory(gpu, layout_of(work.block_bytes, work.block_count, 2)) as engine:
                engine.wipe()
                attempt(lambda: engine.require_original("a restore"))
            attempt(lambda: gather_and_scatter(figures, gpu, work, Idle()))
            attempt(lambda: gather_and_scatter(figures, gpu, work, Half(open_cupy_kernels(0))))
            attempt(lambda: checksums(figures, gpu, work, Idle()))
        result = [said, len(report.figures)]
    """)
    texts, figure_count = said
    assert len(texts) == 4 and figure_count == 0
    wanted = ("a restore: ", "was gathered wrong by kernels", "gather and scatter by kernels: ", "checksums by the kernel differ")
    for text, expected in zip(texts, wanted, strict=True):
        assert expected in text


def test_a_process_that_is_commanded_tells_why_it_failed_and_that_it_ended() -> None:
    with pytest.raises(CommandedError, match="device"):
        Commanded("bench.gpu.bare_kvikio", {})
    with pytest.raises(CommandedError, match="ended with status"):
        Commanded("bench.gpu.mps", {})


def test_a_device_that_a_mover_cant_use_is_told() -> None:
    code = "from bench.support.mover import MoverProcess\nMoverProcess('cuda:0')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={"CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert done.returncode == 1 and "can't use it" in done.stderr and "Exception ignored" not in done.stderr

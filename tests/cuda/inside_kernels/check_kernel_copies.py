"""Gather and scatter by kernels move the bytes that the host mover moves, and what kernels can't do is not asked of them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError
from offloadd.cuda.memory import DeviceMemory
from offloadd.cuda.region import CudaRegion, Places
from offloadd.memory.mapping import map_private
from offloadd.model.region import Layout, Plane
from offloadd.transfer.kernels.copies import TABLE_BYTES, KernelCopies
from offloadd.transfer.kernels.source import COPY_TILE_BYTES

from ...standin.controls import Control, Process
from ..inside.check_copies import HOST_BYTES, TIMEOUT_S, Bench, moved, read, write
from ..layouts import MoveCase, cases, host_result


class At:
    """Copies with launches for this rate."""

    def __init__(self, kernels: KernelCopies, bytes_per_s: float) -> None:
        self._kernels, self._bytes_per_s = kernels, bytes_per_s

    def gather(self, *arguments: Any, **options: Any) -> None:
        self._kernels.gather(*arguments, **options, bytes_per_s=self._bytes_per_s)

    def scatter(self, *arguments: Any, **options: Any) -> None:
        self._kernels.scatter(*arguments, **options, bytes_per_s=self._bytes_per_s)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_moves_are_those_of_the_host_mover(bench: Bench, kernels: KernelCopies, on_device: bool) -> None:
    @settings(max_examples=80, deadline=None)
    @given(cases(), st.booleans(), st.sampled_from([0.0, 1.0]))
    def compare(case: MoveCase, out: bool, bytes_per_s: float) -> None:
        engine, ours = moved(bench, At(kernels, bytes_per_s), case, out=out, on_device=on_device)  # type: ignore[arg-type]
        assert (ours == (host_result(case, out=True) if out else case.ours)).all()
        assert (engine == (case.engine if out else host_result(case, out=False))).all()

    compare()


def region_and_places(bench: Bench, memory: DeviceMemory, offsets: list[int]) -> tuple[CudaRegion, Places]:
    region = CudaRegion.over(Layout(4, (Plane(0, 0, 1024, 1024),)), [memory], planes_max=1)
    return region, Places(bench.host.ctypes.data, 4096, np.array(offsets), 1024, on_device=False)


@pytest.mark.parametrize(
    ("blocks", "offsets", "text"),
    [([0, 4], [0, 1024], "block index 4 is outside the region of 4 blocks"), ([0, 1], [0, 3073], "offset 3073 is outside our memory of 4096")],
)
def test_numbers_out_of_range_move_nothing(bench: Bench, kernels: KernelCopies, blocks: list[int], offsets: list[int], text: str) -> None:
    memory = DeviceMemory.allocate(bench.device, 4096)
    write(memory.address, np.full(4096, 7, np.uint8))
    bench.host.fill(9)
    region, places = region_and_places(bench, memory, offsets)
    for move in (kernels.gather, kernels.scatter):
        with pytest.raises(ValueError, match=text):
            move(region, np.array(blocks, dtype="<u4"), places, bench.stream)
    bench.stream.synchronize(TIMEOUT_S)
    assert (bench.host == 9).all() and (read(memory.address, 4096) == 7).all()
    memory.close()


def test_only_memory_that_the_gpu_reaches_is_taken(bench: Bench, kernels: KernelCopies) -> None:
    """From the first byte to the last: a kernel that leaves it ends the context of all."""
    region = CudaRegion.over(Layout(4, (Plane(0, 0, 1024, 1024),)), [bench_memory := DeviceMemory.allocate(bench.device, 4096)], planes_max=1)
    pageable = map_private(4096)
    at = bench.host.ctypes.data

    def takes(address: int, size_bytes: int) -> bool:
        return kernels.takes(region, 1, Places(address, size_bytes, np.zeros(1, np.int64), 1024, on_device=False))

    assert takes(at, HOST_BYTES) and takes(at + HOST_BYTES - 1024, 1024)
    assert not takes(pageable.bytes.ctypes.data, 4096)
    assert not takes(at, HOST_BYTES + 1) and not takes(at - 1, 1024)
    pageable.close()
    bench_memory.close()


def test_memory_that_lies_elsewhere_for_the_gpu_is_not_taken(bench: Bench, kernels: KernelCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that does not use the host's addresses, as the driver tells."""
    from offloadd.cuda import memory
    from offloadd.cuda.driver import load

    cu = load()

    class Elsewhere:
        CUresult = cu.CUresult

        @staticmethod
        def cuMemHostGetDevicePointer(address: int, flags: int) -> tuple[Any, int]:
            return cu.CUresult.CUDA_SUCCESS, address + 4096

    assert memory.is_reached(bench.device, bench.host.ctypes.data)
    monkeypatch.setattr(memory, "load", lambda: Elsewhere)
    assert not memory.is_reached(bench.device, bench.host.ctypes.data)


def test_moves_whose_table_is_too_long_are_not_taken(bench: Bench, kernels: KernelCopies) -> None:
    memory = DeviceMemory.allocate(bench.device, 4096)
    region, places = region_and_places(bench, memory, [0])
    most = (TABLE_BYTES - 32) // 13
    assert kernels.takes(region, most, places) and not kernels.takes(region, most + 1, places)
    memory.close()


@pytest.mark.parametrize(("tiles_a_launch", "launches"), [(1, 8), (2, 4), (3, 4), (8, 1), (1000, 1)])
def test_launches_are_cut_by_the_rate(bench: Bench, kernels: KernelCopies, ours: Process, tiles_a_launch: int, launches: int) -> None:
    """Two blocks of four tiles each; a launch takes a millisecond at most."""
    size = 4 * COPY_TILE_BYTES
    memory = DeviceMemory.allocate(bench.device, 2 * size)
    region = CudaRegion.over(Layout(2, (Plane(0, 0, size, size),)), [memory], planes_max=1)
    places = Places(bench.host.ctypes.data, HOST_BYTES, np.array([size, 0]), size, on_device=False)
    bench.host[:] = np.arange(HOST_BYTES, dtype=np.uint32).view(np.uint8)[:HOST_BYTES]
    before = ours.counters
    kernels.scatter(region, np.array([0, 1]), places, bench.stream, bytes_per_s=tiles_a_launch * COPY_TILE_BYTES * 1000 + 1)
    bench.stream.synchronize(TIMEOUT_S)
    assert (ours.counters - before).kernels == launches
    assert (read(memory.address, 2 * size) == np.roll(bench.host[: 2 * size], size)).all()
    memory.close()


def test_no_byte_moves_before_the_stream_comes_to_it(bench: Bench, kernels: KernelCopies, ours: Process) -> None:
    memory = DeviceMemory.allocate(bench.device, 4096)
    region, places = region_and_places(bench, memory, [0])
    bench.host.fill(9)
    write(memory.address, np.full(4096, 7, np.uint8))
    ours.hold()
    kernels.gather(region, np.array([1]), places, bench.stream)
    with pytest.raises(TimeoutError):
        bench.stream.synchronize(0.02)
    assert (bench.host == 9).all()
    ours.release()
    bench.stream.synchronize(TIMEOUT_S)
    assert (bench.host[:1024] == 7).all() and (bench.host[1024:] == 9).all()
    memory.close()


def test_a_refused_launch_names_what_was_asked(bench: Bench, kernels: KernelCopies, control: Control) -> None:
    memory = DeviceMemory.allocate(bench.device, 4096)
    region, places = region_and_places(bench, memory, [0])
    with control.fail("cuLaunchKernel", 1), pytest.raises(CudaError, match=r"launch kernel 'gather' of 1 x 1 CTAs on cuda:0: CUDA_ERROR_INVALID_VALUE"):
        kernels.gather(region, np.array([1]), places, bench.stream)
    bench.stream.synchronize(TIMEOUT_S)
    memory.close()


@pytest.mark.parametrize("function", ["cuMemAlloc", "cuMemHostRegister"])
def test_a_thread_without_room_for_a_table_takes_nothing_and_holds_nothing(
    device: Device, kernels: KernelCopies, ours: Process, control: Control, function: str
) -> None:
    from threading import Thread

    region = CudaRegion.over(Layout(4, (Plane(0, 0, 1024, 1024),)), [memory := DeviceMemory.allocate(device, 4096)], planes_max=1)
    places = Places(memory.address, 4096, np.zeros(1, np.int64), 1024, on_device=True)
    taken: list[bool] = []
    before = ours.counters.held
    with control.fail(function, 2):
        thread = Thread(target=lambda: taken.append(kernels.takes(region, 1, places)))
        thread.start()
        thread.join()
    assert taken == [False] and ours.counters.held == before
    memory.close()

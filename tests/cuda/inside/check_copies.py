"""Gather and scatter by copy engines move the bytes that the host mover moves, in every way that the driver may have to be called."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloadd.cuda.batch import BatchCopy
from offloadd.cuda.copies import CopyEngines
from offloadd.cuda.device import Device
from offloadd.cuda.driver import check, load
from offloadd.cuda.memory import DeviceMemory, HostRegistration
from offloadd.cuda.region import CudaRegion, Memory, MemoryPart, Places
from offloadd.cuda.streams import Stream
from offloadd.memory.mapping import map_private
from offloadd.model.region import Layout, Plane

from ..layouts import MoveCase, cases, host_result

Bytes = npt.NDArray[np.uint8]
HOST_BYTES = 2 << 20
TIMEOUT_S = 120.0


def write(address: int, values: Bytes) -> None:
    check(load().cuMemcpyHtoD(address, values.ctypes.data, values.nbytes), "write")


def read(address: int, size_bytes: int) -> Bytes:
    values = np.empty(size_bytes, np.uint8)
    check(load().cuMemcpyDtoH(values.ctypes.data, address, size_bytes), "read")
    return values


def engines(device: Device, way: str, *, rows_min: int = 2, pitch_bytes_max: int | None = None) -> CopyEngines:
    """Copy engines that call the driver in that way. A driver may be taken for an older one."""
    batch = None if way == "calls" else BatchCopy.find(12080 if way == "batch of 12.8" else None)
    if way != "calls" and batch is None:
        pytest.skip("this driver has no cuMemcpyBatchAsync")
    return CopyEngines(batch=batch, rows_min=rows_min, pitch_bytes_max=device.pitch_bytes_max if pitch_bytes_max is None else pitch_bytes_max)


WAYS = ["batch", "batch of 12.8", "calls"]


@dataclass(frozen=True, slots=True)
class Bench:
    """A device, a stream, and page-locked host memory."""

    device: Device
    stream: Stream
    host: Bytes


@pytest.fixture
def bench(device: Device) -> Iterator[Bench]:
    host = map_private(HOST_BYTES)
    registration = HostRegistration.register(device, host.bytes.ctypes.data, HOST_BYTES)
    stream = Stream.create(device)
    yield Bench(device, stream, host.bytes)
    stream.close()
    registration.close()
    host.close()


@contextmanager
def engine_memories(device: Device, case: MoveCase) -> Iterator[list[Memory]]:
    """An allocation a memory, with the bytes of the case; `MemoryPart`s of just their length."""
    with ExitStack() as stack:
        parts: list[Memory] = []
        for offset, size_bytes in zip(case.memory_offsets, case.memory_bytes, strict=True):
            memory = DeviceMemory.allocate(device, size_bytes + 64)
            stack.callback(memory.close)
            write(memory.address + 64, case.engine[offset : offset + size_bytes])
            parts.append(MemoryPart.of(memory, 64, size_bytes))
        yield parts


def moved(bench: Bench, engines: CopyEngines, case: MoveCase, *, out: bool, on_device: bool) -> tuple[Bytes, Bytes]:
    """Engine memory and ours after the move."""
    with engine_memories(bench.device, case) as memories, ExitStack() as stack:
        address = bench.host.ctypes.data
        if on_device:
            slot = DeviceMemory.allocate(bench.device, len(case.ours))
            stack.callback(slot.close)
            address = slot.address
            write(address, case.ours)
        else:
            bench.host[: len(case.ours)] = case.ours
        region = CudaRegion.over(case.layout, memories, planes_max=1000)
        places = Places(address, len(case.ours), case.places, case.stride_bytes, on_device=on_device)
        move = engines.gather if out else engines.scatter
        move(region, case.blocks, places, bench.stream, first=case.first, last=case.last)
        bench.stream.synchronize(TIMEOUT_S)
        engine = case.engine.copy()
        for memory, offset in zip(memories, case.memory_offsets, strict=True):
            engine[offset : offset + memory.size_bytes] = read(memory.address, memory.size_bytes)
        return engine, read(address, len(case.ours)) if on_device else bench.host[: len(case.ours)].copy()


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("way", WAYS)
def test_moves_are_those_of_the_host_mover(bench: Bench, way: str, on_device: bool) -> None:
    @settings(max_examples=60)
    @given(cases(), st.booleans(), st.sampled_from([2, 8]), st.sampled_from([None, 40]))
    def compare(case: MoveCase, out: bool, rows_min: int, pitch_bytes_max: int | None) -> None:
        ways = engines(bench.device, way, rows_min=rows_min, pitch_bytes_max=pitch_bytes_max)
        engine, ours = moved(bench, ways, case, out=out, on_device=on_device)
        assert (ours == (host_result(case, out=True) if out else case.ours)).all()
        assert (engine == (case.engine if out else host_result(case, out=False))).all()

    compare()


@pytest.mark.parametrize(
    ("blocks", "offsets", "text"),
    [([0, 4], [0, 1024], "block index 4 is outside the region of 4 blocks"), ([0, 1], [0, 3073], "offset 3073 is outside our memory of 4096")],
)
@pytest.mark.parametrize("way", WAYS)
def test_numbers_out_of_range_move_nothing(bench: Bench, way: str, blocks: list[int], offsets: list[int], text: str) -> None:
    memory = DeviceMemory.allocate(bench.device, 4096)
    write(memory.address, np.full(4096, 7, np.uint8))
    bench.host.fill(9)
    region = CudaRegion.over(Layout(4, (Plane(0, 0, 1024, 1024),)), [memory], planes_max=1)
    places = Places(bench.host.ctypes.data, 4096, np.array(offsets), 1024, on_device=False)
    ways = engines(bench.device, way)
    for move in (ways.gather, ways.scatter):
        with pytest.raises(ValueError, match=text):
            move(region, np.array(blocks, dtype="<u4"), places, bench.stream)
    bench.stream.synchronize(TIMEOUT_S)
    assert (bench.host == 9).all() and (read(memory.address, 4096) == 7).all()
    memory.close()


def test_the_ways_chosen_for_a_device_move_blocks(bench: Bench) -> None:
    memory = DeviceMemory.allocate(bench.device, HOST_BYTES)
    bench.host[:] = np.arange(HOST_BYTES, dtype=np.uint8)
    region = CudaRegion.over(Layout(2, (Plane(0, 0, HOST_BYTES // 2, HOST_BYTES // 2),)), [memory], planes_max=1)
    places = Places(bench.host.ctypes.data, HOST_BYTES, np.array([HOST_BYTES // 2, 0]), HOST_BYTES // 2, on_device=False)
    CopyEngines.of(bench.device).scatter(region, np.array([0, 1]), places, bench.stream)
    bench.stream.synchronize(TIMEOUT_S)
    assert (read(memory.address, HOST_BYTES) == np.roll(bench.host, HOST_BYTES // 2)).all()
    memory.close()

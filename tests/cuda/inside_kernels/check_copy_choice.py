"""A mover measures a region's shape over memory of its own, and takes kernels only where they are better by far, or asked for."""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from offloadd.cuda.copies import CopyEngines
from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError
from offloadd.cuda.memory import DeviceMemory
from offloadd.cuda.region import CudaRegion, MemoryPart, Places
from offloadd.cuda.streams import Stream
from offloadd.model.region import Layout, Plane
from offloadd.mover.copy_choice import KERNELS_GAIN_MIN, CopyChoice, Mode, are_better
from offloadd.mover.messages import CopiesChosen, KernelsFailed
from offloadd.transfer.kernels.cupy_launcher import open_cupy_kernels
from offloadd.units import KIB

from ...standin.controls import Control, Process, wait_until
from ..inside.check_copies import TIMEOUT_S, Bench, read, write

COUNT, PIECE, PLANES = 4, 1 * KIB, 3
PAYLOAD = PIECE * PLANES
LAYOUT = Layout(COUNT, tuple(Plane(0, plane * COUNT * PIECE, PIECE, PIECE) for plane in range(PLANES)))
#: Long beside what the copies of a few KiB take here.
DELAY_US = 200_000
NAMES = ["gather to the host", "scatter from the host", "gather to the GPU", "scatter from the GPU"]
ENGINE_CALLS = ("cuMemcpy2DAsync", "cuMemcpyBatchAsync")


class Chooser:
    """A choice, and what it told."""

    def __init__(self, device: Device, mode: Mode, open_kernels: Callable[[], Any]) -> None:
        self.told: queue.Queue[CopiesChosen | KernelsFailed] = queue.Queue()
        self._device = device
        self._stream: Stream | None = None
        self.choice = CopyChoice(device=device, engines=CopyEngines.of(device), mode=mode, open_kernels=open_kernels, copying=self.copying, tell=self.told.put)

    @contextmanager
    def copying(self) -> Iterator[Stream]:
        stream = Stream.create(self._device)
        try:
            yield stream
        finally:
            stream.synchronize(TIMEOUT_S)
            stream.close()

    def next(self) -> CopiesChosen:
        told = self.told.get(timeout=TIMEOUT_S)
        assert isinstance(told, CopiesChosen)
        return told


@pytest.fixture
def chooser(device: Device) -> Callable[[Mode], Chooser]:
    return lambda mode: Chooser(device, mode, lambda: open_cupy_kernels(device.ordinal))


@pytest.fixture
def memory(device: Device) -> Iterator[DeviceMemory]:
    memory = DeviceMemory.allocate(device, COUNT * PAYLOAD)
    yield memory
    memory.close()


def region_in(memory: Any) -> CudaRegion:
    return CudaRegion.over(LAYOUT, [memory], planes_max=PLANES)


def places_at(address: int, *, on_device: bool) -> Places:
    return Places(address, COUNT * PAYLOAD, np.arange(COUNT) * PAYLOAD, PAYLOAD, on_device=on_device)


def places_in(bench: Bench) -> Places:
    return places_at(bench.host.ctypes.data, on_device=False)


#: No memory is there: whoever reads or writes it is refused, or loses the context.
NOWHERE = MemoryPart(0x7000_0000_0000, COUNT * PAYLOAD)


def by_kernels(chosen: CopiesChosen) -> list[str]:
    assert [move.name for move in chosen.moves] == NAMES and chosen.note == ""
    return [move.name for move in chosen.moves if move.kernels]


@pytest.mark.parametrize(("slow", "wanted"), [(ENGINE_CALLS, NAMES), (("cuLaunchKernel",), [])], ids=["slow engines", "slow launches"])
def test_the_choice_follows_what_is_measured(chooser: Callable[[Mode], Chooser], control: Control, slow: tuple[str, ...], wanted: list[str]) -> None:
    some = chooser("auto")
    for name in slow:
        control.delay(name, DELAY_US)
    some.choice.of(region_in(NOWHERE))
    chosen = some.next()
    assert chosen.shape == "3 pieces of 1 KiB"
    assert by_kernels(chosen) == wanted
    slowest = PAYLOAD * COUNT / (DELAY_US / 1e6)
    for move in chosen.moves:
        assert 0 < (move.engines_bytes_per_s if wanted else move.kernels_bytes_per_s) <= slowest


def test_kernels_must_be_better_by_far() -> None:
    assert KERNELS_GAIN_MIN > 1.1
    assert not are_better(1e9, 1e9) and not are_better(KERNELS_GAIN_MIN * 1e9 - 1e6, 1e9)
    assert are_better(KERNELS_GAIN_MIN * 1e9, 1e9)


def test_each_direction_goes_as_was_measured_for_it(
    chooser: Callable[[Mode], Chooser], control: Control, ours: Process, memory: DeviceMemory, bench: Bench
) -> None:
    some = chooser("auto")
    for name in ENGINE_CALLS:
        control.delay(name, DELAY_US)
    control.delay("kernel gather", 3 * DELAY_US)
    copies = some.choice.of(region_in(memory))
    assert by_kernels(some.next()) == [NAMES[1], NAMES[3]]
    control.reset()
    slots = DeviceMemory.allocate(bench.device, COUNT * PAYLOAD)
    write(memory.address, np.random.default_rng(1).integers(0, 256, COUNT * PAYLOAD, np.uint8))
    whole = read(memory.address, COUNT * PAYLOAD)
    for places in (places_in(bench), places_at(slots.address, on_device=True)):
        before = ours.counters
        copies.gather(np.arange(COUNT), places, bench.stream)
        bench.stream.synchronize(TIMEOUT_S)
        assert (ours.counters - before).kernels == 0
        write(memory.address, np.zeros(COUNT * PAYLOAD, np.uint8))
        copies.scatter(np.arange(COUNT), places, bench.stream)
        bench.stream.synchronize(TIMEOUT_S)
        assert (ours.counters - before).kernels > 0
        assert (read(memory.address, COUNT * PAYLOAD) == whole).all()
    slots.close()


def test_until_a_shape_was_measured_copies_go_by_the_engines(
    chooser: Callable[[Mode], Chooser], control: Control, ours: Process, memory: DeviceMemory, bench: Bench
) -> None:
    some = chooser("auto")
    with control.hang("cuLaunchKernel", times=1) as measuring:
        copies = some.choice.of(region_in(memory))
        wait_until(lambda: measuring.waiting_now == 1, "the measurement")
        before = ours.counters
        places = places_in(bench)
        copies.gather(np.arange(COUNT), places, bench.stream)
        bench.stream.synchronize(TIMEOUT_S)
        done = ours.counters - before
        assert done.kernels == 0 and done.device_to_host_bytes == COUNT * PAYLOAD
    some.next()


def test_a_shape_is_measured_once_and_told_for_each_region(chooser: Callable[[Mode], Chooser], ours: Process) -> None:
    some = chooser("auto")
    some.choice.of(region_in(NOWHERE))
    first = some.next()
    before = ours.counters
    some.choice.of(region_in(MemoryPart(NOWHERE.address + (1 << 30), COUNT * PAYLOAD)))
    assert some.next() == first
    assert (ours.counters - before).work_queued == 0


def test_clients_can_not_have_more_shapes_measured_than_the_limit(chooser: Callable[[Mode], Chooser], monkeypatch: pytest.MonkeyPatch) -> None:
    from offloadd.mover import copy_choice

    monkeypatch.setattr(copy_choice, "SHAPES_MAX", 2)
    some = chooser("auto")
    for alignment in (0, 16, 32, 0, 16):
        some.choice.of(region_in(MemoryPart(NOWHERE.address + alignment, COUNT * PAYLOAD)))
    for _ in range(4):
        some.next()
    assert some.told.empty() and len(some.choice._samples) == 2


@pytest.mark.parametrize("mode", ["engines", "kernels"])
def test_a_forced_mode_is_taken_whatever_is_faster(
    chooser: Callable[[Mode], Chooser], control: Control, ours: Process, memory: DeviceMemory, bench: Bench, mode: Mode
) -> None:
    some = chooser(mode)
    with control.delay("cuLaunchKernel" if mode == "kernels" else ENGINE_CALLS[0], 1000):
        copies = some.choice.of(region_in(memory))
        if mode == "kernels":
            chosen = some.next()
            assert by_kernels(chosen) == NAMES and {move.engines_bytes_per_s for move in chosen.moves} == {0.0}
    before = ours.counters
    copies.gather(np.arange(COUNT), places_in(bench), bench.stream)
    bench.stream.synchronize(TIMEOUT_S)
    assert ((ours.counters - before).kernels > 0) == (mode == "kernels")
    assert some.told.empty()


@pytest.mark.parametrize("mode", ["auto", "kernels"])
def test_without_kernels_copies_go_by_the_engines_and_it_is_told_why(device: Device, ours: Process, memory: DeviceMemory, bench: Bench, mode: Mode) -> None:
    def refuse() -> Any:
        raise CudaError("compile the kernels", "", "CuPy can't be imported (no such module)")

    some = Chooser(device, mode, refuse)
    copies = some.choice.of(region_in(memory))
    assert some.next().note == "all copies go by the copy engines: compile the kernels: CuPy can't be imported (no such module)"
    before = ours.counters
    copies.gather(np.arange(COUNT), places_in(bench), bench.stream)
    bench.stream.synchronize(TIMEOUT_S)
    assert (ours.counters - before).kernels == 0 and (ours.counters - before).device_to_host_bytes == COUNT * PAYLOAD


def test_a_gpu_without_room_to_measure_goes_by_the_engines(chooser: Callable[[Mode], Chooser], control: Control, ours: Process) -> None:
    some = chooser("auto")
    open_cupy_kernels(0)
    before = ours.counters.held
    with control.fail("cuMemHostRegister", 2):
        some.choice.of(region_in(NOWHERE))
        assert "all copies go by the copy engines: page-lock" in some.next().note
    assert {name: value for name, value in ours.counters.held.items() if "host" in name} == {name: value for name, value in before.items() if "host" in name}


def test_a_move_that_is_refused_while_it_is_measured_leaves_the_engines(chooser: Callable[[Mode], Chooser], control: Control) -> None:
    some = chooser("auto")
    with control.fail("cuLaunchKernel", 1, times=1):
        some.choice.of(region_in(NOWHERE))
        chosen = some.next()
    assert chosen.moves == () and "copies could not be measured: launch kernel 'gather'" in chosen.note
    some.choice.of(region_in(NOWHERE))
    assert len(some.next().moves) == 4, "the next region of the shape is measured"


@pytest.mark.parametrize(("mode", "told"), [("auto", True), ("kernels", False)])
def test_a_lost_context_is_blamed_on_kernels_that_ran_in_it(chooser: Callable[[Mode], Chooser], control: Control, mode: Mode, told: bool) -> None:
    some = chooser(mode)
    some.choice.blame("nothing ran")
    assert some.told.empty()
    for name in ENGINE_CALLS:
        control.delay(name, DELAY_US)
    some.choice.of(region_in(NOWHERE))
    some.next()
    some.choice.blame("an address")
    assert some.told.empty() != told
    if told:
        assert some.told.get() == KernelsFailed(why="an address", chosen=True)


def test_a_lost_context_is_blamed_on_kernels_that_are_being_measured(chooser: Callable[[Mode], Chooser], control: Control) -> None:
    some = chooser("auto")
    with control.hang("cuLaunchKernel") as measuring:
        some.choice.of(region_in(NOWHERE))
        wait_until(lambda: measuring.waiting_now == 1, "the measurement")
        some.choice.blame("an address")
        assert some.told.get(timeout=TIMEOUT_S) == KernelsFailed(why="an address", chosen=False)
    some.next()

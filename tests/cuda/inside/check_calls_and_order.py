"""How the driver is called for a move, and when its bytes move: only a driver that counts and holds back shows it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from offloadd.cuda.batch import BatchCopy
from offloadd.cuda.copies import CopyEngines
from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError
from offloadd.cuda.memory import DeviceMemory, HostRegistration
from offloadd.cuda.region import CudaRegion, Places
from offloadd.cuda.streams import Event, Stream
from offloadd.memory.mapping import map_private
from offloadd.model.region import Layout, Plane

from ...standin.controls import Control, Loaded, Process

PIECE, LAYERS, BLOCKS = 4096, 10, 16
PAYLOAD = PIECE * LAYERS
COPY_CALLS = ("cuMemcpy2DAsync", "cuMemcpyAsync", "cuMemcpyBatchAsync")
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Move:
    """A region of LAYERS planes and page-locked slots, each byte of a block being its index."""

    device: Device
    region: CudaRegion
    engine: np.ndarray
    slots: np.ndarray
    stream: Stream

    def places(self, count: int) -> Places:
        return Places(self.slots.ctypes.data, self.slots.nbytes, np.arange(count) * PAYLOAD, PAYLOAD, on_device=False)

    def gather(self, engines: CopyEngines, blocks: list[int]) -> None:
        engines.gather(self.region, np.array(blocks, dtype="<u4"), self.places(len(blocks)), self.stream)


@pytest.fixture
def move(device: Device, loaded: Loaded) -> Iterator[Move]:
    memory = DeviceMemory.allocate(device, LAYERS * BLOCKS * PIECE)
    engine = np.frombuffer(loaded.host_view(memory.address, memory.size_bytes), np.uint8).reshape(LAYERS, BLOCKS, PIECE)
    engine[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None]
    slots = map_private(2 << 20)
    registration = HostRegistration.register(device, slots.bytes.ctypes.data, 2 << 20)
    layout = Layout(BLOCKS, tuple(Plane(0, number * BLOCKS * PIECE, PIECE, PIECE) for number in range(LAYERS)))
    stream = Stream.create(device)
    yield Move(device, CudaRegion.over(layout, [memory], planes_max=LAYERS), engine, slots.bytes, stream)
    stream.synchronize(TIMEOUT_S)
    stream.close()
    registration.close()
    slots.close()
    memory.close()


def engines(device: Device, *, batch: bool = True, rows_min: int = 8, pitch_bytes_max: int | None = None) -> CopyEngines:
    pitch = device.pitch_bytes_max if pitch_bytes_max is None else pitch_bytes_max
    return CopyEngines(batch=BatchCopy.find() if batch else None, rows_min=rows_min, pitch_bytes_max=pitch)


@pytest.mark.parametrize(
    ("batch", "blocks", "rows_min", "pitch_bytes_max", "wanted"),
    [
        (True, [3], 8, None, (1, 0, 0)),
        (False, [3], 2, None, (1, 0, 0)),
        (True, [3, 9, 5], 8, None, (3, 0, 0)),
        (True, [3, 4, 5], 8, None, (3, 0, 0)),
        (True, list(range(12)), 8, None, (LAYERS, 0, 0)),
        (True, [3, 9, 5], LAYERS + 1, None, (0, 0, 1)),
        (True, [3, 9, 5], 8, BLOCKS * PIECE - 1, (0, 0, 1)),
        (False, [3], 2, BLOCKS * PIECE - 1, (0, LAYERS, 0)),
    ],
)
def test_a_move_takes_as_few_calls_as_can_be(
    move: Move, ours: Process, batch: bool, blocks: list[int], rows_min: int, pitch_bytes_max: int | None, wanted: tuple[int, ...]
) -> None:
    before = ours.calls
    move.gather(engines(move.device, batch=batch, rows_min=rows_min, pitch_bytes_max=pitch_bytes_max), blocks)
    made = tuple(ours.calls.get(name, 0) - before.get(name, 0) for name in COPY_CALLS)
    move.stream.synchronize(TIMEOUT_S)
    assert made == wanted
    assert (move.slots[: len(blocks) * PAYLOAD].reshape(len(blocks), PAYLOAD) == np.array(blocks, np.uint8)[:, None]).all()


def test_a_driver_before_12_8_has_no_batches(device: Device) -> None:
    assert BatchCopy.find(12070) is None
    assert BatchCopy.find(12080) is not None


def test_no_byte_moves_before_the_stream_comes_to_it(move: Move, ours: Process) -> None:
    move.slots.fill(255)
    ours.hold()
    move.gather(engines(move.device), [1])
    move.gather(engines(move.device, rows_min=LAYERS + 1), [2])
    with pytest.raises(TimeoutError, match=r"work on cuda:0 \(GPU-.*\) was not done within 0.02 s"):
        move.stream.synchronize(0.02)
    assert (move.slots == 255).all()
    ours.release()
    move.stream.synchronize(TIMEOUT_S)
    assert (move.slots[:PAYLOAD] == 2).all() and (move.slots[PAYLOAD:] == 255).all()


@pytest.mark.parametrize("rows_min", [8, LAYERS + 1], ids=["2D", "batch"])
def test_sources_are_read_when_the_stream_comes_to_them(move: Move, ours: Process, rows_min: int) -> None:
    """Whatever the stream waits for may still write them: the engine a block, or a read its slot."""
    move.slots[:PAYLOAD] = 1
    ours.hold()
    engines(move.device, rows_min=rows_min).scatter(move.region, np.array([6], dtype="<u4"), move.places(1), move.stream)
    move.slots[:PAYLOAD] = 77
    ours.release()
    move.stream.synchronize(TIMEOUT_S)
    assert (move.engine[:, 6] == 77).all() and (move.engine[:, 7] == 7).all()


def test_a_stream_waits_for_the_event_of_another(move: Move, ours: Process) -> None:
    move.slots.fill(255)
    other, event = Stream.create(move.device), Event.create(move.device)
    ours.hold()
    engines(move.device).scatter(move.region, np.array([5], dtype="<u4"), move.places(1), other)
    other.record(event)
    assert not event.is_done()
    move.stream.wait(event)
    move.gather(engines(move.device), [5])
    ours.release()
    move.stream.synchronize(TIMEOUT_S)
    assert event.is_done() and (move.slots[:PAYLOAD] == 255).all()
    event.close()
    other.close()


def test_work_that_failed_ends_the_wait(move: Move, control: Control) -> None:
    done = Event.create(move.device)
    with control.fail("cuEventQuery", 700):
        with pytest.raises(CudaError, match=r"wait for work on cuda:0 .*CUDA_ERROR_ILLEGAL_ADDRESS"):
            move.stream.synchronize(TIMEOUT_S)
        move.stream.record(done)
    done.close()


@pytest.mark.parametrize(("function", "rows_min", "batch"), [("cuMemcpy2DAsync", 8, True), ("cuMemcpyBatchAsync", 11, True), ("cuMemcpyAsync", 11, False)])
def test_a_refused_copy_names_what_was_asked(move: Move, control: Control, function: str, rows_min: int, batch: bool) -> None:
    with control.fail(function, 1), pytest.raises(CudaError) as raised:
        move.gather(engines(move.device, batch=batch, rows_min=rows_min), [1])
    assert raised.value.name == "CUDA_ERROR_INVALID_VALUE" and "on cuda:0" in str(raised.value)
    assert str(PIECE) in str(raised.value) or str(PAYLOAD) in str(raised.value)


def test_a_copy_behind_the_end_of_an_allocation_is_the_drivers_to_refuse(move: Move, device: Device) -> None:
    """The stand-in refuses it as a GPU does; a region that was validated never asks for one."""
    region = CudaRegion(move.region.groups, BLOCKS * 1000, PAYLOAD)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        engines(device).gather(region, np.array([BLOCKS * 900], dtype="<u4"), move.places(1), move.stream)


def test_streams_and_events_say_when_they_are_closed(device: Device) -> None:
    stream, event = Stream.create(device), Event.create(device)
    for one in (stream, event):
        one.close()
        one.close()
    with pytest.raises(ValueError, match=r"an event on cuda:0 .* is used after it was closed"):
        event.is_done()
    with pytest.raises(ValueError, match="used after it was closed"):
        stream.synchronize(1.0)


def test_a_priority_that_the_device_has_not_is_refused(device: Device) -> None:
    Stream.create(device, priority=-5).close()
    with pytest.raises(ValueError, match=r"stream priority 1 is outside -5 \(soonest\) to 0"):
        Stream.create(device, priority=1)


@pytest.mark.parametrize("function", ["cuCtxGetStreamPriorityRange", "cuEventCreate", "cuStreamCreate"])
def test_a_stream_that_can_not_be_made_leaves_nothing(device: Device, control: Control, function: str) -> None:
    with control.fail(function, 2, times=1), pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        Stream.create(device)
    assert control.process().counters.held == {"contexts_now": 1}


def test_only_interprocess_events_are_exported(device: Device) -> None:
    event = Event.create(device)
    with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_HANDLE.*created as an interprocess event"):
        event.ipc_handle()
    event.close()

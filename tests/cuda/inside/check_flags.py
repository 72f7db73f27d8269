"""Flags of engines: what is read, how often, what is held meanwhile, and that nothing is left."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError
from offloadd.cuda.flags import FlagReader
from offloadd.cuda.imports import IpcImports
from offloadd.errors import InvalidRequest
from offloadd.model.device_event import FlagValue
from offloadd.mover import cuda_events
from offloadd.mover.cuda_events import RegionEvents
from offloadd.mover.device import EventNotOpenedError

from ...standin.controls import Control, Process, wait_until
from ...standin_tests.child import Child

ONLY_US = {"contexts_now": 1}
WORDS_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Words:
    """Words of an engine, 0 at first, and what a mover has for a region."""

    engine: Child
    handle: bytes
    events: RegionEvents
    ours: Process

    def write(self, value: int, offset_bytes: int = 0) -> None:
        """In stream order, and done."""
        self.engine.run(f"ok(cu.cuStreamWriteValue64(stream, words + {offset_bytes}, {value}, 0)); ok(cu.cuStreamSynchronize(stream))")

    def has_come(self, value: int, offset_bytes: int = 0) -> bool:
        return self.events.has_come(FlagValue(self.handle, offset_bytes, value))

    def reads(self) -> int:
        """Copies that were queued to read words."""
        return self.ours.calls.get("cuMemcpyAsync", 0)

    def settled(self, value: int, offset_bytes: int = 0) -> bool:
        """What a look says once a read that began after this call has ended."""
        reads = self.reads()
        while not (come := self.has_come(value, offset_bytes)) and self.reads() < reads + 3:
            pass
        return come


def words_of(engine: Child) -> bytes:
    return bytes.fromhex(
        engine.run(f"""
            words = int(ok(cu.cuMemAlloc({WORDS_BYTES})))
            ok(cu.cuMemsetD8(words, 0, {WORDS_BYTES}))
            ok(cu.cuCtxSynchronize())
            stream = ok(cu.cuStreamCreate(1))
            result = memory_handle(words)
        """)
    )


@pytest.fixture
def reader(device: Device) -> Iterator[FlagReader]:
    reader = FlagReader(device)
    yield reader
    reader.close()


@pytest.fixture
def words(device: Device, reader: FlagReader, ours: Process, engine: Child) -> Iterator[Words]:
    events = RegionEvents(reader, IpcImports(device))
    yield Words(engine, words_of(engine), events, ours)
    # Closing waits for what is held.
    ours.release()
    events.close()
    assert ours.counters.memory_handles_open_now == 0


def test_a_flag_has_come_when_its_word_has_the_value_unsigned(words: Words) -> None:
    assert not words.settled(1)
    words.write(3)
    assert [words.settled(value) for value in (1, 3, 4)] == [True, True, False]
    # The top bit is no sign.
    assert not words.settled(1 << 63)
    words.write(1 << 63)
    assert [words.settled(value) for value in (4, 1 << 63, (1 << 63) + 1, (1 << 64) - 1)] == [True, True, False, False]
    words.write((1 << 64) - 1)
    assert words.settled((1 << 64) - 1)


def test_a_look_waits_for_nothing_and_leaves_one_read_under_way(words: Words) -> None:
    assert not words.settled(1)
    queued, reads = words.ours.counters.work_queued, words.reads()
    # Nothing of ours is done from here on: a look that waited would never return.
    words.ours.hold()
    assert not any(words.has_come(1) for _ in range(1000))
    assert words.reads() <= reads + 1, "reads pile up behind a device that does not answer"
    assert words.ours.counters.work_queued <= queued + 2, "more than a copy and its event"
    words.ours.release()
    words.write(1)
    assert words.settled(1)


def test_a_read_waits_in_no_stream_of_ours_for_the_engine(words: Words, device: Device) -> None:
    before = words.ours.calls
    assert not words.settled(1)
    calls = {name: count - before.get(name, 0) for name, count in words.ours.calls.items()}
    assert not any(calls.get(name) for name in ("cuStreamWaitValue64", "cuStreamWaitValue32", "cuStreamWaitEvent", "cuStreamSynchronize", "cuCtxSynchronize"))
    # What the driver lets wait for all of our work comes back at once, though the engine has not come.
    other = bytes.fromhex(words.engine.run("result = memory_handle(ok(cu.cuMemAlloc(64)))"))
    IpcImports(device).open(other).close()
    assert not words.settled(1)


def test_what_a_word_was_seen_to_be_is_not_read_again(words: Words) -> None:
    words.write(5)
    assert words.settled(5)
    reads = words.reads()
    assert all(words.has_come(value) for value in (1, 5) for _ in range(100))
    assert words.reads() == reads


def test_words_of_one_allocation_are_one_mapping(words: Words) -> None:
    for index in range(100):
        words.write(index + 1, 8 * index)
    assert all(words.settled(index + 1, 8 * index) and not words.settled(index + 2, 8 * index) for index in range(100))
    assert words.ours.counters.memory_handles_open_now == 1
    assert words.ours.counters.host_registrations_now == 1


def test_as_many_flags_as_may_be_are_open_and_those_that_wait_come(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_events, "FLAGS_MAX", 4)
    monkeypatch.setattr(cuda_events, "EVENTS_MAX", 4)
    for index in range(32):
        assert not words.settled(1, 8 * index)
        # Each has an event of ours, and their stream has one.
        assert words.ours.counters.events_now <= 4 + 1
    for index in range(32):
        words.write(1, 8 * index)
    assert all(words.settled(1, 8 * index) for index in range(32))
    handles = words.engine.run("result = [memory_handle(ok(cu.cuMemAlloc(64))) for _ in range(8)]")
    assert not any(words.events.has_come(FlagValue(bytes.fromhex(handle), 0, (1 << 64) - 1)) for handle in handles)
    assert words.ours.counters.memory_handles_open_now == 4, "the words of the one allocation are closed by now"
    raw = words.engine.run("made = [ok(cu.cuEventCreate(6)) for _ in range(8)]; result = [event_handle(one) for one in made]")
    assert all(words.events.has_come(bytes.fromhex(handle)) for handle in raw)
    assert words.ours.counters.event_handles_open_now == 4


def test_a_word_that_is_closed_while_it_is_read_gives_its_cell_to_no_other_before(words: Words, reader: FlagReader, device: Device) -> None:
    """The read that is late would else be taken for the other word's value."""
    words.write(7)
    words.ours.hold()
    flag = reader.open(IpcImports(device).open(words.handle), 0)
    assert not flag.has_reached(7)
    free = len(reader._free)
    done: list[bool] = []

    def close() -> None:
        flag.close()
        done.append(True)

    thread = threading.Thread(target=close)
    looks = words.ours.calls.get("cuEventQuery", 0)
    thread.start()
    wait_until(lambda: words.ours.calls.get("cuEventQuery", 0) > looks, "the close to look")
    assert not done and len(reader._free) == free
    words.ours.release()
    thread.join()
    assert len(reader._free) == free + 1


def test_a_cell_does_not_show_what_another_word_was(words: Words, reader: FlagReader, device: Device) -> None:
    words.write(9)
    imports = IpcImports(device)
    flag = reader.open(imports.open(words.handle), 0)
    wait_until(lambda: flag.has_reached(9), "the word")
    flag.close()
    words.ours.hold()
    again = reader.open(imports.open(words.handle), 8)
    assert int(again._cell[0]) == 0
    assert not again.has_reached(1) and not again.has_reached(1)
    words.ours.release()
    again.close()


@pytest.mark.parametrize("offset", [WORDS_BYTES, WORDS_BYTES - 4, 1 << 62])
def test_a_word_outside_of_its_allocation_is_not_opened(words: Words, offset: int) -> None:
    with pytest.raises(EventNotOpenedError, match=rf"memory of 8 bytes at offset {offset} is outside its allocation of {WORDS_BYTES} bytes"):
        words.has_come(1, offset)
    assert words.ours.counters.memory_handles_open_now == 0


def test_flags_and_events_of_dead_engines_are_not_opened_and_say_what_to_do(words: Words, engine: Child) -> None:
    event = bytes.fromhex(engine.run("result = event_handle(ok(cu.cuEventCreate(6)))"))
    engine.kill()
    with pytest.raises(EventNotOpenedError, match=r"has ended.*; a flag lies in cudaMalloc memory of an engine that lives"):
        words.has_come(1)
    with pytest.raises(EventNotOpenedError, match=r"has ended.*order the request by a flag"):
        words.events.has_come(event)
    assert words.ours.counters.held == ONLY_US


@pytest.mark.parametrize("function", ["cuEventCreate", "cuStreamCreate", "cuMemHostRegister"])
def test_a_flag_for_which_the_driver_has_nothing_left_leaves_nothing(words: Words, control: Control, function: str) -> None:
    with control.fail(function, 2, pid=words.ours.pid), pytest.raises(EventNotOpenedError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        words.has_come(1)
    counters = words.ours.counters
    assert counters.memory_handles_open_now == counters.host_registrations_now == 0
    assert not words.settled(1)


def test_a_device_whose_work_has_failed_is_an_error_and_no_answer(words: Words, control: Control) -> None:
    assert not words.settled(1)
    with control.fail("cuEventQuery", 700, pid=words.ours.pid), pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        words.settled(2)


def test_a_handle_of_another_length_is_refused(device: Device) -> None:
    with pytest.raises(InvalidRequest, match="CUDA IPC memory handle has 63 bytes"):
        IpcImports(device).open(b"x" * 63)

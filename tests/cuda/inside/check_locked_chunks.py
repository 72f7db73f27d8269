"""Host memory that becomes page-locked chunk by chunk: what is said of it at each moment."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError
from offloadd.cuda.locked_chunks import LockedChunks
from offloadd.memory.mapping import Mapping, map_private
from offloadd.units import MIB

from ...standin.controls import Control, Process, wait_until

SIZES = [2 * MIB, 2 * MIB, 4 * MIB]
#: One stretch in each chunk, and one over each border.
OFFSETS = np.array([0, 2 * MIB, 4 * MIB, 2 * MIB - 4096, 4 * MIB - 4096])


@pytest.fixture
def host() -> Iterator[Mapping]:
    mapping = map_private(sum(SIZES))
    yield mapping
    mapping.close()


@pytest.fixture
def chunks(device: Device, host: Mapping) -> Iterator[LockedChunks]:
    chunks = LockedChunks(device, host.bytes.ctypes.data, SIZES)
    yield chunks
    chunks.close()
    chunks.close()


def locked(chunks: LockedChunks) -> list[bool]:
    """For each of OFFSETS, whether a stretch of 8 KiB there is in a locked chunk; each stands in exactly one part."""
    answer: list[bool | None] = [None] * len(OFFSETS)
    for mine, is_locked in chunks.parts(OFFSETS, 8192):
        for index in np.arange(len(OFFSETS))[mine].tolist():
            assert answer[index] is None
            answer[index] = is_locked
    assert None not in answer
    return [bool(one) for one in answer]


def test_what_lies_in_two_chunks_is_never_locked(chunks: LockedChunks, ours: Process) -> None:
    assert locked(chunks) == [False] * 5
    chunks.lock(range(3))
    assert locked(chunks) == [True, True, True, False, False]
    assert ours.counters.host_registrations_now == 3 and chunks.locked_bytes == chunks.size_bytes == sum(SIZES)


def test_chunks_are_parts_of_their_own(chunks: LockedChunks) -> None:
    chunks.lock(range(3))
    parts = chunks.parts(np.array([0, 4096, 2 * MIB, 2 * MIB + 4096]), 4096)
    assert [(np.arange(4)[mine].tolist(), is_locked) for mine, is_locked in parts] == [([0, 1], True), ([2, 3], True)]
    ((mine, is_locked),) = chunks.parts(np.array([2 * MIB, 4 * MIB - 4096]), 4096)
    assert mine == slice(None) and is_locked
    with pytest.raises(IndexError):
        chunks.parts(np.array([sum(SIZES)]), 4096)


def test_a_chunk_counts_when_the_next_one_is_locked(chunks: LockedChunks, control: Control, ours: Process) -> None:
    with control.hang("cuMemHostRegister", skip=2, pid=ours.pid) as fault:
        thread = threading.Thread(target=chunks.lock, args=([2, 0, 1],))
        thread.start()
        wait_until(lambda: bool(fault.waiting_now), "the third chunk")
        assert locked(chunks) == [False, False, True, False, False], "in the order that was asked for"
        fault.clear()
        thread.join()
    assert locked(chunks) == [True, True, True, False, False]


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_after_a_refusal_no_more_is_tried_and_the_last_chunk_makes_room(chunks: LockedChunks, control: Control, ours: Process, refused: int) -> None:
    calls = ours.calls.get("cuMemHostRegister", 0)
    with control.fail("cuMemHostRegister", 2, skip=refused, pid=ours.pid), pytest.raises(CudaError, match="RLIMIT_MEMLOCK"):
        chunks.lock(range(3))
    assert ours.calls["cuMemHostRegister"] - calls == refused + 1
    expected = max(0, refused - 1)
    assert locked(chunks) == [number < expected for number in range(5)]
    assert ours.counters.host_registrations_now == expected and chunks.locked_bytes == sum(SIZES[:expected])


def test_addresses_are_told_apart(chunks: LockedChunks, host: Mapping) -> None:
    start = host.bytes.ctypes.data
    assert [chunks.holds(start + shift) for shift in (-1, 0, sum(SIZES) - 1, sum(SIZES))] == [False, True, True, False]


def test_closed_chunks_are_not_locked(chunks: LockedChunks, ours: Process) -> None:
    chunks.lock(range(3))
    chunks.close()
    assert locked(chunks) == [False] * 5 and ours.counters.host_registrations_now == 0

"""Syncs are shared, begin after the writes that they answer for, and are never tried again after a failure."""

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from offloadd.cuda.group_sync import GroupSync, VolumeDoomed

from ...standin.controls import Control, wait_until
from ...standin_tests.child import Child
from .conftest import SLOT

TIMEOUT_S = 120


class Disk:
    """Syncs that begin when they are called and end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Future[None]] = []

    def sync(self) -> None:
        end: Future[None] = Future()
        self.begun.append(end)
        end.result(TIMEOUT_S)

    def await_begun(self, count: int) -> None:
        wait_until(lambda: len(self.begun) >= count, f"sync {count} to begin")


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def group(disk: Disk) -> GroupSync:
    return GroupSync(disk.sync)


@pytest.fixture
def pool(disk: Disk) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool
        for end in disk.begun:
            if not end.done():
                end.set_result(None)


def await_waiting(group: GroupSync, count: int) -> None:
    # What a Condition knows of who waits for it; nothing public tells it.
    wait_until(lambda: len(group._changed._waiters) == count, f"{count} callers to wait")  # type: ignore[attr-defined]


def test_callers_during_a_sync_share_the_next_one(disk: Disk, group: GroupSync, pool: ThreadPoolExecutor) -> None:
    first = pool.submit(group.sync)
    disk.await_begun(1)
    others = [pool.submit(group.sync) for _ in range(8)]
    await_waiting(group, 8)
    disk.begun[0].set_result(None)
    first.result(TIMEOUT_S)
    disk.await_begun(2)
    # The sync that ran when they called may have begun before their writes returned.
    assert not any(other.done() for other in others)
    disk.begun[1].set_result(None)
    for other in others:
        other.result(TIMEOUT_S)
    assert len(disk.begun) == 2
    assert group.doomed == ""


def test_a_call_after_a_sync_has_ended_gets_one_of_its_own(disk: Disk, group: GroupSync, pool: ThreadPoolExecutor) -> None:
    for number in range(3):
        call = pool.submit(group.sync)
        disk.await_begun(number + 1)
        assert not call.done()
        disk.begun[number].set_result(None)
        call.result(TIMEOUT_S)
    assert len(disk.begun) == 3


def test_a_failed_sync_fails_all_who_wait_and_is_never_tried_again(disk: Disk, group: GroupSync, pool: ThreadPoolExecutor) -> None:
    good = pool.submit(group.sync)
    disk.await_begun(1)
    disk.begun[0].set_result(None)
    good.result(TIMEOUT_S)
    leader = pool.submit(group.sync)
    disk.await_begun(2)
    others = [pool.submit(group.sync) for _ in range(4)]
    await_waiting(group, 4)
    disk.begun[1].set_exception(OSError(errno.ENOSPC, "No space left on device"))
    for call in (leader, *others):
        with pytest.raises(VolumeDoomed, match="No space left on device") as raised:
            call.result(TIMEOUT_S)
        assert raised.value.errno == errno.ENOSPC
    for _ in range(3):
        with pytest.raises(VolumeDoomed):
            group.sync()
        with pytest.raises(VolumeDoomed):
            group.refuse_doomed()
    assert len(disk.begun) == 2
    assert "No space left on device" in group.doomed


def test_a_sync_that_ends_in_a_fault_of_ours_dooms_too() -> None:
    group = GroupSync(lambda: {}["no such key"])
    with pytest.raises(KeyError):
        group.sync()
    assert group.doomed
    with pytest.raises(VolumeDoomed):
        group.sync()


def test_many_threads_each_find_their_write_covered() -> None:
    """Each sync covers what was written before it began; no call may return before one that covers its write has ended."""
    written = [0] * 8
    covered = [0] * 8

    def sync() -> None:
        seen = written.copy()
        threading.Event().wait(0)  # let others in
        covered[:] = seen

    group = GroupSync(sync)

    def write_and_sync(number: int) -> bool:
        for value in range(1, 200):
            written[number] = value
            group.sync()
            if covered[number] < value:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_sync, range(8)))


# ---- a volume ----

COUNTED = """
synced = []
real = os.fdatasync
def fdatasync(fd):
    synced.append(fd)
    if failing:
        raise OSError(5, "Input/output error")
    real(fd)
os.fdatasync, failing = fdatasync, False
"""


def test_a_volume_syncs_its_second_descriptor(mover: Child) -> None:
    mover.run(COUNTED)
    assert mover.run("volume.write(slot, 0, SLOT_BYTES, 0); volume.sync(); result = synced == [synced_fd]") is True


def test_after_a_failed_sync_a_volume_is_doomed_writes_nothing_and_still_reads(mover: Child, control: Control) -> None:
    mover.run(COUNTED)
    mover.run("volume.write(slot, 0, SLOT_BYTES, 0); failing = True")
    assert mover.run("result = failure(volume.sync)")[:2] == ["VolumeDoomed", errno.EIO]
    mover.run("failing = False")
    assert mover.run("result = failure(volume.sync)")[0] == "VolumeDoomed"
    before = control.process(mover.pid).counters
    assert mover.run("result = failure(lambda: volume.write(slot, 0, SLOT_BYTES, 0))")[0] == "VolumeDoomed"
    assert mover.run("result = volume.read(slot, 0, SLOT_BYTES, 0)") == SLOT
    moved = control.process(mover.pid).counters - before
    assert (moved.cufile_writes, moved.cufile_reads) == (0, 1)
    assert mover.run("result = len(synced), volume.doomed") == [1, "[Errno 5] Input/output error"]

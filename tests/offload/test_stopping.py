"""When requests end, to the millisecond: the clock is the test's."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from offloadd import clock
from offloadd.ipc.channel import Channel, socket_pair
from offloadd.model.enums import AckLevel, EvictStatus, Path, Reason, RestoreStatus, Tier
from offloadd.model.requests import EvictOptions, RestoreOptions
from offloadd.model.slots import BLOCK_DTYPE
from offloadd.mover.messages import Job, Operation
from offloadd.offload.core import new_blocks
from offloadd.offload.lanes import Lane
from offloadd.offload.moves import Move
from offloadd.offload.stopping import FENCE_LEAD_S, FENCE_WAIT_S, FENCE_WAIT_S_MIN
from offloadd.offload.volume_health import HealthOptions, VolumeHealth
from offloadd.scheduler.fair_queue import Cut
from offloadd.scheduler.job_class import JobClass

from .held_clock import run_held
from .queues import queue_of
from .test_moves_in_order import Front, ScannedVolume, settle


class Deaf:
    """A mover that answers no fence until it is told to."""

    hello = None

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self.fences: list[asyncio.Future[None]] = []

    def fence(self, move: int) -> "asyncio.Future[None]":
        self.asked_s.append(clock.monotonic_s())
        self.fences.append(asyncio.get_running_loop().create_future())
        return self.fences[-1]

    def forget_move(self, move: int) -> None: ...


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Front, Deaf], Awaitable[None]]], None]:
    """Runs a test with a front whose mover is deaf."""

    def run(test: Callable[[Front, Deaf], Awaitable[None]]) -> None:
        async def work() -> None:
            mover = Deaf()
            front = Front(mover=mover)  # type: ignore[arg-type]
            await test(front, mover)
            front.device.arena_lane.disconnect()  # type: ignore[union-attr]
            await front.core.idle()
            front.core.catalog.check()
            assert front.core.catalog._pins.sum() == 0 and not front.core.active
            front.lane.close()

        run_held(monkeypatch, work())

    return run


async def _stored(front: Front, name: str) -> None:
    evict = front.evict(0, name)
    front.done(await front.job())
    await evict
    await front.core.idle()


@pytest.mark.parametrize("given_s", [30.0, 1.0, 0.5, 0.02])
def test_the_answer_is_there_at_the_deadline_though_the_mover_answers_no_fence(held: Any, given_s: float) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        await _stored(front, "a")
        start_s = clock.monotonic_s()
        restore = front.restore(8, "a", deadline_s=given_s)
        await front.job()
        answer = await restore
        asked_s = given_s - min(FENCE_LEAD_S, given_s / 10)
        assert mover.asked_s == [pytest.approx(start_s + asked_s, abs=1e-6)], "too late for the copies that run to end"
        assert clock.monotonic_s() - start_s == pytest.approx(max(given_s, asked_s + FENCE_WAIT_S_MIN), abs=1e-6)
        assert clock.monotonic_s() - start_s < given_s + 0.1
        assert (answer.status.tolist(), answer.reason.tolist()) == ([RestoreStatus.QUARANTINED], [Reason.DEADLINE])

    held(test)


def test_a_fence_that_is_answered_before_the_deadline_ends_the_quarantine(held: Any) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        end_s = clock.monotonic_s() + 60
        evict = front.evict(0, "a")
        await front.job()
        await asyncio.sleep(60 - FENCE_LEAD_S / 2)
        assert not evict.done()
        mover.fences[0].set_result(None)
        assert (await evict).status.tolist() == [EvictStatus.FAILED]
        assert clock.monotonic_s() < end_s

    held(test)


def test_what_the_mover_called_off_at_the_deadline_is_told_as_that(held: Any) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        await _stored(front, "ab")
        restore = front.restore(8, "ab")
        job = await front.job()
        await asyncio.sleep(60 - FENCE_LEAD_S / 2)
        front.done(job, {0: Reason.CANCELLED, 1: Reason.CANCELLED})
        await settle()
        mover.fences[0].set_result(None)
        answer = await restore
        assert (answer.status.tolist(), answer.reason.tolist()) == ([RestoreStatus.FAILED] * 2, [Reason.DEADLINE] * 2)

    held(test)


def test_a_cancelled_request_waits_for_its_fence_no_longer_than_for_a_copy(held: Any) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        evict = front.evict(0, "a", request_id="r")
        await front.job()
        start_s = clock.monotonic_s()
        assert front.core.cancel(front.session, "r")
        assert (await evict).status.tolist() == [EvictStatus.QUARANTINED]
        assert clock.monotonic_s() - start_s == pytest.approx(FENCE_WAIT_S)

    held(test)


def test_a_cancel_is_noticed_at_once_while_a_restore_waits_for_an_evict_of_its_block(held: Any) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        evict = front.evict(0, "a")
        job = await front.job()
        front.copied(job)
        await evict
        start_s = clock.monotonic_s()
        restore = front.restore(8, "a", request_id="r")
        await settle()
        assert not restore.done()
        front.core.cancel(front.session, "r")
        answer = await restore
        assert (answer.status.tolist(), answer.reason.tolist()) == ([RestoreStatus.FAILED], [Reason.CANCELLED])
        assert clock.monotonic_s() == start_s, "a timer ran before the cancel was seen"
        assert front.no_job() and not mover.fences, "a copy was begun for a request that had ended"
        front.done(job)

    held(test)


@pytest.mark.parametrize("ended_by", ["cancel", "deadline", "scan"])
def test_a_restore_that_waits_for_a_scan_ends_at_once(held: Any, ended_by: str) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        start_s = clock.monotonic_s()
        volume = ScannedVolume()
        volume.scan_until_s = start_s + 5
        front.core.volumes.append(volume)  # type: ignore[arg-type]
        restore = front.restore(8, "a", request_id="r", deadline_s=2.0 if ended_by == "deadline" else 60.0)
        await settle()
        assert not restore.done()
        if ended_by == "cancel":
            front.core.cancel(front.session, "r")
        elif ended_by == "scan":
            volume.scanning = False
            volume.slabs_changed.set()
        answer = await restore
        wanted = {"cancel": (RestoreStatus.FAILED, 0.0), "deadline": (RestoreStatus.FAILED, 1.9), "scan": (RestoreStatus.NOT_FOUND, 0.0)}
        assert (answer.status[0], clock.monotonic_s() - start_s) == (wanted[ended_by][0], pytest.approx(wanted[ended_by][1]))

    held(test)


class SlowVolume:
    """A volume of two slabs with eight slots each; only the first is ever opened."""

    def __init__(self, front: Front) -> None:
        catalog = front.core.catalog
        self.serving, self.scanning, self.slab_failures = True, False, 0
        self.health = VolumeHealth(HealthOptions(), lambda: None)
        self.ordinal = catalog.add_volume(slab_count=2, slot_count_for=lambda slot_bytes: 8, open_slabs_max=8)
        self.slabs_changed = asyncio.Event()
        self.pool = catalog.volumes[self.ordinal]
        self.pool.prepare(front.region.slot_bytes)
        for wish in self.pool.take_wishes():
            self.pool.ready(wish.slab, b"n" * 16)
        front.region.namespace.on_volumes[self.ordinal] = (0, 1)
        assert front.device.arena_lane is not None
        front.device.volume_lanes[self.ordinal, Path.HOST] = front.device.arena_lane
        front.core.volumes.append(self)  # type: ignore[arg-type]

    def grant_wishes(self) -> None: ...

    def nonce(self, slab: int) -> bytes:
        return self.pool.slabs[slab].nonce


@pytest.mark.parametrize(("ended_by", "after_s"), [(Reason.CANCELLED, 0.0), (Reason.DEADLINE, 60 - FENCE_LEAD_S)])
def test_an_evict_that_ends_while_it_waits_for_slots_begins_no_copy(held: Any, ended_by: Reason, after_s: float) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        volume = SlowVolume(front)
        start_s = clock.monotonic_s()
        options = EvictOptions(deadline_s=start_s + 60, ack=AckLevel.DURABLE, request_id="r")
        evict = asyncio.ensure_future(front.evictor.evict(front.session, [front.batch(0, "abcdefghijkl")], options))
        await settle()
        assert not evict.done()
        if ended_by == Reason.CANCELLED:
            front.core.cancel(front.session, "r")
        answer = await evict
        assert set(zip(answer.status.tolist(), answer.reason.tolist(), strict=True)) == {(EvictStatus.REJECTED, ended_by)}
        assert clock.monotonic_s() - start_s == pytest.approx(after_s, abs=1e-6)
        assert front.no_job() and not mover.fences and volume.pool.used_slots == 0

    held(test)


def test_an_evict_that_was_copied_when_its_end_came_goes_on_to_its_tier(held: Any) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        evict = front.evict(0, "ab")
        job = await front.job()
        (active,) = front.core.active.values()
        assert active.move is not None
        # Both in one turn of the loop: the request has not been told of the one when the other comes.
        active.move.on_copied(next(iter(active.move._uncopied)), 2)
        active.stop(Reason.DEADLINE)
        assert (await evict).status.tolist() == [EvictStatus.STORED] * 2
        assert not mover.fences, "what was told STORED would not be written"
        front.done(job)

    held(test)


def test_an_evict_that_is_stopped_is_not_stored_by_what_was_taken_back(held: Any) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        lane = front.device.arena_lane
        assert lane is not None
        # One block a job, one job at a time.
        lane._queue._windows = replace(lane._queue._windows, evict_bytes_in_flight=1, evict_job_bytes=4096)
        evict = front.evict(0, "ab")
        job = await front.job()
        front.copied(job)
        await settle()
        (active,) = front.core.active.values()
        active.stop(Reason.CANCELLED)
        # The other job is taken back, and with it the last source that was not copied.
        mover.fences[0].set_result(None)
        answer = await evict
        assert (answer.status.tolist(), answer.reason.tolist()) == ([EvictStatus.FAILED] * 2, [Reason.CANCELLED] * 2)
        front.done(job)

    held(test)


def test_a_stream_that_nobody_reads_ends_at_its_deadline_all_the_same(held: Any) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        await _stored(front, "a")
        await _stored(front, "b")
        start_s = clock.monotonic_s()
        assert front.device.arena_lane is not None
        front.device.arena_lane._queue._restore_cut = Cut(4096, 0, 1)  # one block a job
        stream = front.restorer.restore(front.session, [front.batch(8, "ab")], RestoreOptions(deadline_s=start_s + 60))
        first = asyncio.ensure_future(anext(stream))
        jobs = [await front.job(), await front.job()]
        front.done(jobs[0])
        assert (await first)[:2] == (0, 1)
        # Its client does not read on.
        await asyncio.sleep(61)
        assert mover.asked_s == [pytest.approx(start_s + 60 - FENCE_LEAD_S, abs=1e-6)], "copies go on after the deadline"
        mover.fences[0].set_result(None)
        _, stop, answer = await anext(stream)
        assert (stop, answer.status.tolist()) == (2, [RestoreStatus.RESTORED, RestoreStatus.FAILED])
        await stream.aclose()

    held(test)


def test_what_was_not_sent_by_the_end_of_a_prefetch_is_taken_back(held: Any) -> None:
    async def test(front: Front, mover: Deaf) -> None:
        lane = front.device.arena_lane
        assert lane is not None
        lane._queue._windows = replace(lane._queue._windows, evict_bytes_in_flight=1)  # one job at a time
        move = front.core.new_move(2)
        for position in range(2):
            blocks = new_blocks(1)
            blocks["position"] = position
            front.core.send_jobs(front.device, lane, move, Operation.PREFETCH, blocks, slot_bytes=8192, job_class=JobClass.PREFETCH)
        sent = await front.job()
        over = asyncio.ensure_future(front.core.stopping.over(move, clock.monotonic_s() + 5))
        await asyncio.sleep(6)
        assert front.no_job() and move.reasons[1] == Reason.DEADLINE and not over.done(), "its slot may still be read into"
        front.done(sent)
        await over
        assert front.no_job()

    held(test)


async def test_a_stopped_move_looks_at_its_own_jobs_only() -> None:
    ours, theirs = socket_pair()
    lane = Lane(number=0, name="arena", tier=Tier.ARENA, path=Path.DDR, queue=queue_of(job_bytes=1))
    moves = [Move(number=number, count=2) for number in range(100)]

    class Parts(dict[int, Any]):
        def values(self) -> Any:
            raise AssertionError("all that waits on the lane was looked at")

        __iter__ = items = values

    lane._parts = Parts()
    for move in moves:
        for position in range(2):
            blocks = new_blocks(1)
            blocks["position"] = position
            order = Job(job=2 * move.number + position, move=move.number, operation=int(Operation.ARENA_RESTORE), slot_bytes=4096, blocks=b"")
            lane.submit(move, order, blocks, JobClass.INTERACTIVE)
    lane.connect(ours)
    peer: Channel[Job] = Channel(theirs, Job)
    received = peer.receive()
    assert received is not None and received[0].move == 0 and len(received[0].blocks) == BLOCK_DTYPE.itemsize
    for move in reversed(moves):
        lane.abandon(move, Reason.DEADLINE)
    assert len(lane._sent) == 1 and [move.done for move in moves] == [False] + [True] * 99
    assert moves[0].pending_count == 1, "what was sent is not taken back"
    assert not lane._parts and not lane._parts_of
    lane._parts = {}
    lane.disconnect()
    assert moves[0].done and not lane._sent
    peer.close()

"""The front's end of a lane: requests go to the mover in jobs, and what was not sent can be taken back. The test is the mover."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from offloadd import clock
from offloadd.ipc.channel import Channel, socket_pair
from offloadd.model.enums import Path, Reason, Tier
from offloadd.model.slots import BLOCK_DTYPE, RESULT_DTYPE
from offloadd.mover.messages import Copied, Job, Operation, SliceDone
from offloadd.offload.lanes import Lane
from offloadd.offload.moves import PENDING, Move
from offloadd.scheduler.arbiter import Arbiter
from offloadd.scheduler.job_class import ARENA_PRECEDENCE, BACKGROUND, INTERACTIVE, PREEMPT, PREFETCH, VOLUME_PRECEDENCE, JobClass
from offloadd.scheduler.rate import DAY_NS, SECOND_NS, TokenBucket
from tests.offload.queues import queue_of

BLOCK_BYTES = 4096


def arbiter_of(evict_rate: TokenBucket | None = None) -> Arbiter:
    return Arbiter(VOLUME_PRECEDENCE, slice_bytes=BLOCK_BYTES, bytes_in_flight=64 * BLOCK_BYTES, evict_rate=evict_rate)


@dataclass
class Mover:
    """A lane whose jobs have up to four blocks, two at a time, and the mover's end of it."""

    arbiter: Arbiter = field(default_factory=lambda: Arbiter(ARENA_PRECEDENCE, slice_bytes=4 * BLOCK_BYTES, bytes_in_flight=8 * BLOCK_BYTES))
    lane: Lane = field(init=False)
    moves: int = 0

    def __post_init__(self) -> None:
        queue = queue_of(8 * BLOCK_BYTES, job_bytes=4 * BLOCK_BYTES, arbiter=self.arbiter)
        self.lane = Lane(number=1, name="lane", tier=Tier.VOLUME, path=Path.HOST, queue=queue)
        self.connect()

    def connect(self) -> None:
        ours, theirs = socket_pair()
        theirs.setblocking(False)
        self.channel: Channel[Job] = Channel(theirs, Job)
        self.lane.connect(ours)

    def submit(self, count: int, job_class: JobClass = PREEMPT, deadline_ns: int = 0) -> Move:
        self.moves += 1
        move = Move(number=self.moves, count=count)
        blocks = np.zeros(count, dtype=BLOCK_DTYPE)
        blocks["position"] = np.arange(count)
        operation = Operation.RESTORE if job_class in (INTERACTIVE, PREFETCH) else Operation.EVICT
        order = Job(job=1000 + self.moves, move=self.moves, operation=operation, slot_bytes=BLOCK_BYTES, blocks=b"", deadline_ns=deadline_ns)
        self.lane.submit(move, order, blocks, job_class)
        return move

    def jobs(self) -> list[Job]:
        """Those that were sent and not yet received."""
        found = []
        while True:
            try:
                received = self.channel.receive()
            except BlockingIOError:
                return found
            assert received is not None
            found.append(received[0])

    async def next_jobs(self) -> list[Job]:
        """Those that are sent next."""
        async with asyncio.timeout(60):
            while True:
                if found := self.jobs():
                    return found
                await asyncio.sleep(0)

    async def die(self) -> None:
        """The front has heard that it is gone."""
        self.channel.close()
        async with asyncio.timeout(60):
            while True:
                if not self.lane.connected:
                    return
                await asyncio.sleep(0)

    def copied(self, job: Job) -> None:
        self.channel.send(Copied(job=job.job, count=len(job.blocks) // BLOCK_DTYPE.itemsize))

    def done(self, job: Job) -> None:
        positions = np.frombuffer(job.blocks, dtype=BLOCK_DTYPE)["position"]
        results = np.zeros(positions.shape[0], dtype=RESULT_DTYPE)
        results["position"] = positions
        zeros = dict.fromkeys(("queue_ns", "copy_ns", "checksum_ns", "io_ns", "payload_bytes", "io_bytes"), 0)
        self.channel.send(SliceDone(job=job.job, results=results.tobytes(), **zeros))  # type: ignore[arg-type]


def positions(jobs: list[Job]) -> list[list[int]]:
    return [np.frombuffer(job.blocks, dtype=BLOCK_DTYPE)["position"].tolist() for job in jobs]


async def until(move: Move, what: str) -> None:
    async with asyncio.timeout(60):
        while not getattr(move, what):
            move.wake.clear()
            await move.wake.wait()


async def test_a_request_goes_in_jobs_and_its_results_come_back_as_one_move() -> None:
    mover = Mover()
    move = mover.submit(10)
    first, second = mover.jobs()
    assert positions([first, second]) == [[0, 1, 2, 3], [4, 5, 6]] and len({first.job, second.job}) == 2
    mover.done(second)
    third = await mover.next_jobs()
    assert positions(third) == [[7, 8, 9]]
    for job in (first, *third):
        mover.done(job)
    await until(move, "done")
    assert move.reasons.tolist() == [0] * 10
    mover.lane.disconnect()


async def test_a_move_is_copied_when_every_source_is_those_that_were_not_sent_yet_among_them() -> None:
    mover = Mover()
    move = mover.submit(10)
    sent = mover.jobs()
    for job in sent:
        mover.copied(job)
        mover.done(job)
    last = await mover.next_jobs()
    assert not move.copied
    mover.copied(last[0])
    await until(move, "copied")
    assert not move.done
    mover.lane.disconnect()


async def test_the_sources_of_a_job_that_is_over_are_free_whether_or_not_it_told_so() -> None:
    mover = Mover()
    move = mover.submit(8)
    first, second = mover.jobs()
    mover.copied(second)
    mover.done(first)
    await until(move, "copied")
    assert not move.done
    mover.lane.disconnect()


async def test_what_was_not_sent_is_taken_back_and_the_rest_ends_by_itself() -> None:
    mover = Mover()
    move, other = mover.submit(10), mover.submit(4)
    sent = mover.jobs()
    mover.lane.abandon(move, Reason.CANCELLED)
    assert move.reasons.tolist() == [PENDING] * 7 + [Reason.CANCELLED] * 3 and not move.copied
    assert mover.lane._queue.waiting_count == 1
    for job in sent:
        mover.copied(job)
    await until(move, "copied")
    for job in sent:
        mover.done(job)
    await until(move, "done")
    assert move.reasons.tolist() == [0] * 7 + [Reason.CANCELLED] * 3
    jobs = await mover.next_jobs()
    assert jobs[0].move == other.number
    mover.lane.disconnect()
    assert other.reasons.tolist() == [Reason.WORKER_LOST] * 4


async def test_a_request_whose_deadline_has_passed_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = Mover()
    first = mover.submit(8)
    late = mover.submit(4, deadline_ns=clock.monotonic_ns() + 3600 * SECOND_NS)
    sent = mover.jobs()
    now_ns = clock.monotonic_ns() + 3600 * SECOND_NS
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now_ns)
    for job in sent:
        mover.done(job)
    await until(late, "done")
    assert late.reasons.tolist() == [Reason.DEADLINE] * 4 and late.copied
    assert mover.jobs() == [] and (await first.finished.wait()) and not first.reasons.any()
    mover.lane.disconnect()


async def test_a_mover_that_dies_costs_what_it_was_sent_and_its_successor_gets_the_rest() -> None:
    mover = Mover()
    move = mover.submit(10)
    mover.jobs()
    await mover.die()
    assert move.reasons.tolist() == [Reason.WORKER_LOST] * 7 + [PENDING] * 3
    mover.connect()
    (last,) = mover.jobs()
    assert positions([last]) == [[7, 8, 9]] and not move.copied
    mover.copied(last)
    await until(move, "copied")
    assert not move.done
    mover.done(last)
    await until(move, "done")
    assert move.reasons.tolist() == [Reason.WORKER_LOST] * 7 + [0] * 3
    mover.lane.disconnect()


async def test_an_evict_that_a_restore_of_another_lane_held_back_is_sent_when_that_one_is_over() -> None:
    arbiter = arbiter_of()
    host, gpu = Mover(arbiter), Mover(arbiter)
    restore = gpu.submit(1, INTERACTIVE)
    evict = host.submit(1, BACKGROUND)
    assert host.jobs() == []
    gpu.done(gpu.jobs()[0])
    await until(restore, "done")
    (job,) = host.jobs()
    assert job.move == evict.number
    host.lane.disconnect()
    gpu.lane.disconnect()


async def test_an_evict_that_a_restore_of_another_lane_held_back_is_sent_when_its_mover_dies() -> None:
    arbiter = arbiter_of()
    host, gpu = Mover(arbiter), Mover(arbiter)
    gpu.submit(1, INTERACTIVE)
    host.submit(1, BACKGROUND)
    assert host.jobs() == []
    await gpu.die()
    assert len(host.jobs()) == 1
    host.lane.disconnect()
    gpu.lane.disconnect()


async def test_what_a_request_held_up_goes_when_that_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "monotonic_ns", lambda: SECOND_NS)
    # Evicts have written what they may for a day.
    arbiter = arbiter_of(TokenBucket(bytes_per_period=BLOCK_BYTES, period_ns=DAY_NS, burst_bytes=BLOCK_BYTES))
    host, gpu = Mover(arbiter), Mover(arbiter)
    gpu.submit(1)
    preemption = gpu.submit(1)
    host.submit(1, PREFETCH)
    assert len(gpu.jobs()) == 1 and host.jobs() == []
    gpu.lane.abandon(preemption, Reason.CANCELLED)
    assert len(host.jobs()) == 1
    host.lane.disconnect()
    gpu.lane.disconnect()


async def test_a_restore_of_a_mover_that_is_away_holds_back_no_evict_of_another_lane() -> None:
    arbiter = arbiter_of()
    host, gpu = Mover(arbiter), Mover(arbiter)
    await gpu.die()
    gpu.submit(1, INTERACTIVE)
    host.submit(1, BACKGROUND)
    assert len(host.jobs()) == 1
    host.lane.disconnect()
    gpu.lane.disconnect()


async def test_a_lane_that_waits_for_its_limit_sends_when_it_may_though_nothing_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10 * SECOND_NS
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now_ns)
    mover = Mover(arbiter_of(TokenBucket(bytes_per_period=50 * BLOCK_BYTES, period_ns=SECOND_NS, burst_bytes=BLOCK_BYTES)))
    mover.submit(1, BACKGROUND)
    second = mover.submit(1, BACKGROUND)
    assert len(mover.jobs()) == 1
    restore = mover.submit(1, INTERACTIVE)
    assert [job.move for job in mover.jobs()] == [restore.number], "restores have no limit"
    mover.lane.abandon(restore, Reason.CANCELLED)
    now_ns += 2 * SECOND_NS
    mover.lane._queue.finish(2)
    assert [job.move for job in await mover.next_jobs()] == [second.number]
    mover.lane.disconnect()


def test_a_part_that_is_over_before_the_others_are_queued_does_not_make_a_move_copied() -> None:
    move = Move(number=1, count=4)
    move.filling()
    move.fail(np.array([0], dtype=np.uint32), int(Reason.NO_TIER))
    move.sent(6, 1)
    move.on_copied(6, 1)
    assert not move.copied
    move.sent(7, 2)
    move.filled()
    move.on_copied(7, 1)
    assert not move.copied
    move.on_copied(7, 1)
    assert move.copied

"""What waits for what, by a volume in virtual time: restores beside evicts, small restores beside long ones, preemptions beside restores; and a queue that is
first come, first served, for contrast: what it passes proves nothing."""

import random

import pytest

from bench.support.fifo_queue import FifoQueue
from offloadd.scheduler.arbiter import Arbiter
from offloadd.scheduler.fair_queue import Ticket
from offloadd.scheduler.job_class import ARENA_PRECEDENCE, BACKGROUND, INTERACTIVE, PREEMPT, SPILL, VOLUME_PRECEDENCE, JobClass
from offloadd.scheduler.lane_queue import LaneQueue, Windows
from offloadd.scheduler.rate import SECOND_NS, TokenBucket
from tests.scheduler.queues import Queue, Volume

MIB = 1 << 20
#: As by default.
SLICE, EVICT_JOB, RESTORES = 8 * MIB, 32 * MIB, 64 * MIB
RATE = 1_000_000_000
SLICE_NS = SLICE * 1_000_000_000 // RATE
BLOCK = 640 << 10

_WINDOWS = Windows.of(restore_bytes_in_flight=RESTORES, evict_bytes_in_flight=EVICT_JOB, evict_job_bytes=EVICT_JOB, slice_bytes=SLICE, blocks_max=10_000)


def volume_queue(arbiter: Arbiter | None = None) -> LaneQueue:
    return LaneQueue(arbiter or Arbiter(VOLUME_PRECEDENCE, slice_bytes=SLICE, bytes_in_flight=2 * EVICT_JOB), _WINDOWS)


def arena_queue() -> LaneQueue:
    windows = Windows.of(restore_bytes_in_flight=RESTORES, evict_bytes_in_flight=RESTORES, evict_job_bytes=EVICT_JOB, slice_bytes=SLICE, blocks_max=10_000)
    return LaneQueue(Arbiter(ARENA_PRECEDENCE, slice_bytes=SLICE, bytes_in_flight=RESTORES), windows)


def fifo_queue() -> FifoQueue:
    """The control."""
    return FifoQueue(_WINDOWS)


def p99_of_restores(queue: Queue, *, evicts: bool, count: int = 10_000) -> tuple[float, int]:
    """The 99th percentile of restores of 8 blocks that come at random and take a third of the volume, in ns, and how many were starved."""
    volume = Volume(RATE, [queue])
    randomness = random.Random(4)
    numbers = iter(range(1_000_000, 100_000_000))
    came: dict[int, int] = {}
    when = 0
    for number in range(count):
        when += int(randomness.expovariate(1 / 15e6))
        came[number] = when

        def restore(number: int = number) -> None:
            volume.submit(Ticket(number, INTERACTIVE, 8, BLOCK, deadline_ns=volume.now_ns + 30_000_000_000))

        volume.at(when, restore)
    last = when

    def evict(job_class: JobClass) -> None:
        volume.submit(Ticket(next(numbers), job_class, 100, BLOCK))

    def again(ticket: int) -> None:
        if ticket >= 1_000_000 and volume.now_ns < last:
            evict(BACKGROUND if ticket % 2 else SPILL)

    if evicts:
        volume.on_done = again
        for _ in range(16):
            evict(BACKGROUND)
            evict(SPILL)
    volume.run(lambda: volume.now_ns > last + 40_000_000_000)
    times = sorted(volume.done_ns[number] - came[number] for number in range(count) if number in volume.done_ns)
    return times[len(times) * 99 // 100], count - len(times)


def test_incident_21_a_restore_never_waits_behind_evicts_by_more_than_one_slice() -> None:
    idle_ns, _ = p99_of_restores(volume_queue(), evicts=False)
    beside_ns, starved = p99_of_restores(volume_queue(), evicts=True)
    assert starved == 0
    assert beside_ns <= 2 * idle_ns + SLICE_NS


def test_the_control_lets_restores_wait_far_longer() -> None:
    idle_ns, _ = p99_of_restores(fifo_queue(), evicts=False)
    beside_ns, _ = p99_of_restores(fifo_queue(), evicts=True, count=1000)
    assert beside_ns > 10 * (2 * idle_ns + SLICE_NS)


def small_restores_beside_a_long_one(queue: Queue, instances: list[int]) -> tuple[list[int], Volume]:
    """Bytes sent before the first job of each of ten restores of 1 MiB that come while a 4 GiB one has just begun."""
    volume = Volume(RATE, [queue])
    volume.submit(Ticket(0, INTERACTIVE, 4096, MIB, instance=1))
    for number, instance in enumerate(instances, 1):
        volume.submit(Ticket(number, INTERACTIVE, 1, MIB, instance=instance))
    volume.run()
    before = []
    for number in range(1, 1 + len(instances)):
        position = [ticket for ticket, _ in volume.sent].index(number)
        before.append(sum(size for _, size in volume.sent[:position]))
    return before, volume


@pytest.mark.parametrize("instances", [list(range(2, 12)), [2] * 10, [1] * 10], ids=["of ten engines", "of another engine", "of the same engine"])
def test_incident_21_a_long_restore_starves_no_small_ones(instances: list[int]) -> None:
    before, volume = small_restores_beside_a_long_one(volume_queue(), instances)
    # What was sent ahead when they came, and a job of the long one between them.
    assert max(before) <= RESTORES + RESTORES // 2 + 10 * MIB
    assert set(volume.done_ns) == set(range(11)), "and the long one ends"


def test_the_control_sends_all_of_the_long_one_first() -> None:
    before, _ = small_restores_beside_a_long_one(fifo_queue(), list(range(2, 12)))
    assert min(before) == 4096 * MIB


def test_first_blocks_of_a_long_restore_come_with_a_short_job() -> None:
    queue = volume_queue()
    queue.submit(Ticket(1, INTERACTIVE, 4096, MIB))
    first, second, *_ = queue.take(0).portions
    assert first.block_count * MIB == SLICE and second.block_count * MIB > 3 * SLICE


@pytest.mark.parametrize("small", [False, True])
def test_incident_21_steady_small_restores_of_one_engine_leave_its_long_one_a_third(small: bool) -> None:
    """Those that come find first blocks early, and yet what began before them ends."""
    volume = Volume(RATE, [volume_queue()])
    volume.submit(Ticket(0, INTERACTIVE, 1024, MIB))
    numbers = iter(range(1, 1_000_000))

    def again(ticket: int) -> None:
        if ticket and small:
            volume.submit(Ticket(next(numbers), INTERACTIVE, 1, MIB))

    volume.on_done = again
    for _ in range(100 if small else 0):
        volume.submit(Ticket(next(numbers), INTERACTIVE, 1, MIB))
    volume.run(lambda: 0 in volume.done_ns)
    alone_ns = 1024 * MIB * 1_000_000_000 // RATE
    assert volume.done_ns[0] <= alone_ns * (3.3 if small else 1.01)


def copied_ns(queue: Queue, *, restores: bool) -> int:
    """When 320 MiB of a preemption have been copied into the arena."""
    volume = Volume(RATE, [queue])
    numbers = iter(range(1, 1_000_000))

    def again(ticket: int) -> None:
        if ticket:
            volume.submit(Ticket(next(numbers), INTERACTIVE, 100, BLOCK))

    volume.on_done = again
    for _ in range(16 if restores else 0):
        volume.submit(Ticket(next(numbers), INTERACTIVE, 100, BLOCK))
    volume.submit(Ticket(0, PREEMPT, 512, BLOCK))
    volume.run(lambda: 0 in volume.done_ns)
    return volume.done_ns[0]


def test_a_preemption_into_the_arena_beside_steady_restores_takes_at_most_half_longer() -> None:
    assert copied_ns(arena_queue(), restores=True) <= 1.5 * copied_ns(arena_queue(), restores=False)
    # The order of volumes would not do, nor does none.
    assert copied_ns(volume_queue(), restores=True) > 3 * copied_ns(volume_queue(), restores=False)
    assert copied_ns(fifo_queue(), restores=True) > 3 * copied_ns(fifo_queue(), restores=False)


def shares(queue: Queue, *classes: tuple[JobClass, int]) -> dict[JobClass, float]:
    """Of 4 GB, while every class always has work of (its class, bytes a request)."""
    volume = Volume(RATE, [queue])
    numbers = iter(range(1, 1_000_000))
    of: dict[int, tuple[JobClass, int]] = {}

    def submit(what: tuple[JobClass, int]) -> None:
        number = next(numbers)
        of[number] = what
        volume.submit(Ticket(number, what[0], max(1, what[1] // BLOCK), min(BLOCK, what[1])))

    volume.on_done = lambda ticket: submit(of[ticket])
    for what in classes:
        for _ in range(-(-RESTORES // what[1]) + 4):
            submit(what)
    volume.run(lambda: volume.now_ns > 4_000_000_000)
    total = sum(size for _, size in volume.sent)
    return {what[0]: sum(size for ticket, size in volume.sent if of[ticket][0] == what[0]) / total for what in classes}


@pytest.mark.parametrize("restore_bytes", [BLOCK, 320 * MIB])
def test_steady_restores_leave_evicts_their_share_of_bytes_however_long_requests_are(restore_bytes: int) -> None:
    found = shares(volume_queue(), (INTERACTIVE, restore_bytes), (BACKGROUND, 64 * MIB))
    assert found[BACKGROUND] == pytest.approx(1 / 9, abs=0.02)


def test_steady_restores_and_evicts_leave_spills_theirs() -> None:
    found = shares(volume_queue(), (INTERACTIVE, 4 * MIB), (BACKGROUND, 64 * MIB), (SPILL, 64 * MIB))
    # All that is written shares one slot beside restores, and its turn comes when what was sent ahead of it is over.
    assert found[BACKGROUND] + found[SPILL] == pytest.approx(1 / 9, abs=0.02) and abs(found[BACKGROUND] - found[SPILL]) < 0.02


def test_preemptions_leave_restores_from_the_arena_a_fifth() -> None:
    found = shares(arena_queue(), (INTERACTIVE, 4 * MIB), (PREEMPT, 320 * MIB))
    assert found[INTERACTIVE] == pytest.approx(1 / 5, abs=0.03)


@pytest.mark.parametrize("restores", [False, True])
def test_evicts_write_what_their_limit_allows_and_restores_have_none(restores: bool) -> None:
    limit = 100_000_000
    rate = TokenBucket(bytes_per_period=limit, period_ns=SECOND_NS, burst_bytes=SLICE)
    queue = volume_queue(Arbiter(VOLUME_PRECEDENCE, slice_bytes=SLICE, bytes_in_flight=2 * EVICT_JOB, evict_rate=rate))
    volume = Volume(RATE, [queue])
    for number in range(4 if restores else 0):
        volume.submit(Ticket(10 + number, INTERACTIVE, 800, BLOCK))
    for number, job_class in enumerate((PREEMPT, BACKGROUND, SPILL)):
        volume.submit(Ticket(number, job_class, 400, BLOCK))
    volume.run()
    evicted = 3 * 400 * BLOCK
    # The last job may be written in advance of its tokens.
    assert (evicted - EVICT_JOB - SLICE) / limit <= max(volume.done_ns.values()) / 1e9 <= evicted / limit + 0.2, "though nothing but time wakes them"
    assert all(volume.done_ns[10 + number] < 4 * 800 * BLOCK * 1.25 * SECOND_NS / RATE for number in range(4 if restores else 0))

"""The order of work on a lane, and between the lanes of one volume."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from offloadd.scheduler.arbiter import QUIET_NS, STALLED_NS
from offloadd.scheduler.fair_queue import Ticket
from offloadd.scheduler.job_class import ARENA_PRECEDENCE, BACKGROUND, INTERACTIVE, PREEMPT, PREFETCH, SPILL, VOLUME_PRECEDENCE, JobClass, Precedence
from offloadd.scheduler.lane_queue import PARKED_JOBS_MAX, Depth, LaneQueue
from tests.scheduler.queues import BLOCK, arbiter_of, queue_of, sent, submit


def is_idle(queue: LaneQueue) -> bool:
    """No byte is counted as in flight, and no ticket as waiting, by the lane or by its arbiter."""
    arbiter = queue._arbiter
    return not any((*queue._in_flight, *queue._running, *queue._parked, *arbiter._in_flight, *arbiter._waiting, queue.waiting_count))


def test_restores_overtake_waiting_evicts() -> None:
    queue = queue_of(evict=BLOCK)
    submit(queue, BACKGROUND, 1, 2, 3)
    assert sent(queue.take(0)) == [1]
    submit(queue, INTERACTIVE, 10, 11)
    assert sent(queue.take(0)) == [10, 11]
    queue.finish(1)
    assert sent(queue.take(0)) == [], "no evict starts while restores run"
    queue.finish(2)
    assert sent(queue.take(0)) == []
    queue.finish(3)
    assert sent(queue.take(0)) == [2]


def test_the_depth_of_a_queue_is_what_waits_and_what_is_in_flight() -> None:
    queue = queue_of(restore=2 * BLOCK)
    submit(queue, INTERACTIVE, 1, count=5)
    submit(queue, PREEMPT, 2, 3, count=2)
    assert queue.depths() == [Depth(1, 5 * BLOCK), Depth(), Depth(2, 4 * BLOCK), Depth(), Depth()]
    assert sent(queue.take(0)) == [1, 1]
    assert queue.depths()[INTERACTIVE] == Depth(1, 3 * BLOCK, 2, 2 * BLOCK)
    queue.park(1)
    assert queue.depths()[INTERACTIVE] == Depth(1, 3 * BLOCK, 2, BLOCK), "what waits for its engine is a job, and takes no room"
    queue.finish(1)
    queue.finish(2)
    queue.drop(1)
    assert queue.depths()[INTERACTIVE] == Depth()


@pytest.mark.parametrize(
    ("precedence", "order"),
    [(VOLUME_PRECEDENCE, [INTERACTIVE, PREEMPT, PREFETCH, BACKGROUND, SPILL]), (ARENA_PRECEDENCE, [PREEMPT, INTERACTIVE, PREFETCH, BACKGROUND, SPILL])],
)
def test_classes_go_in_their_order(precedence: Precedence, order: list[JobClass]) -> None:
    queue = queue_of(arbiter_of(precedence), restore=BLOCK, evict=BLOCK)
    for number, job_class in enumerate(JobClass):
        submit(queue, job_class, number)
    taken: list[int] = []
    running = list(queue.take(0).portions)
    while running:
        portion = running.pop(0)
        taken.append(portion.ticket)
        queue.finish(portion.job)
        running += queue.take(0).portions
    assert taken == [int(one) for one in order]


@pytest.mark.parametrize(("full", "other"), [(PREFETCH, BACKGROUND), (PREFETCH, SPILL), (BACKGROUND, PREFETCH), (SPILL, PREFETCH), (SPILL, PREEMPT)])
def test_restores_that_nobody_waits_for_have_a_window_beside_that_of_evicts(full: JobClass, other: JobClass) -> None:
    queue = queue_of(evict=BLOCK)
    submit(queue, full, 1)
    assert sent(queue.take(0)) == [1]
    submit(queue, other, 2, 3)
    assert sent(queue.take(0)) == [2]


def test_what_nobody_waits_for_leaves_preemptions_their_slots() -> None:
    queue = queue_of(evict=2 * BLOCK)
    submit(queue, BACKGROUND, 1)
    submit(queue, SPILL, 2, 3)
    assert sent(queue.take(0)) == [1, 2], "both in one window"
    submit(queue, PREEMPT, 4, 5, 6)
    assert sent(queue.take(0)) == [4, 5]


def test_while_a_restore_is_about_one_slice_of_evicts_is_in_flight() -> None:
    queue = queue_of(arbiter_of(slice_bytes=BLOCK), evict=100, evict_job=4 * BLOCK)
    submit(queue, BACKGROUND, 1, count=8)
    (portion,) = queue.take(0).portions
    assert portion.block_count == 4, "a long one while none is"
    submit(queue, INTERACTIVE, 2)
    (restore,) = queue.take(0).portions
    for job in (portion.job, restore.job):
        queue.finish(job)
    (portion,) = queue.take(QUIET_NS).portions
    assert (portion.first, portion.block_count) == (4, 1), "the next restore may come at once"
    submit(queue, PREEMPT, 3)
    assert sent(queue.take(QUIET_NS)) == [], "they share the slice"
    queue.finish(portion.job)
    assert sent(queue.take(QUIET_NS)) == [3]
    queue.finish(4)
    (portion,) = queue.take(QUIET_NS + 1).portions
    assert (portion.first, portion.block_count) == (5, 3), "long ones again"


def test_two_slices_of_evicts_never_go_between_two_restores() -> None:
    """Evicts and spills may both be due to their shares."""
    queue = queue_of(restore=BLOCK, evict=100)
    submit(queue, INTERACTIVE, *range(200))
    submit(queue, BACKGROUND, *range(1000, 1100))
    submit(queue, SPILL, *range(2000, 2100))
    submit(queue, PREEMPT, *range(3000, 3100))
    submit(queue, PREFETCH, *range(4000, 4100))
    order: list[int] = []
    running = list(queue.take(0).portions)
    while queue._arbiter._waiting[INTERACTIVE]:
        portion = running.pop(0)
        order.append(portion.ticket)
        queue.finish(portion.job)
        running += queue.take(0).portions
    yielding = "".join("r" if ticket < 1000 else "y" for ticket in order)
    assert yielding.count("y") > 20 and "yy" not in yielding


def test_after_a_long_time_of_restores_evicts_do_not_come_between_all_of_the_next_ones() -> None:
    queue = queue_of(restore=BLOCK)
    submit(queue, BACKGROUND, *range(1000, 1100))
    (slow, *_) = queue.take(0).portions
    submit(queue, INTERACTIVE, *range(900))
    passed: list[int] = []
    for _ in range(800):
        (portion,) = [one for one in queue.take(0).portions if one.ticket < 1000] or [None]
        assert portion is not None
        queue.finish(portion.job)
    for job in list(queue._running):
        queue.finish(job)
    while len(passed) < 40:
        for portion in queue.take(0).portions:
            passed.append(portion.ticket)
            queue.finish(portion.job)
    assert slow.ticket == 1000 and 3 <= sum(ticket >= 1000 for ticket in passed) <= 8


def test_a_job_larger_than_the_window_runs_alone() -> None:
    for job_class in JobClass:
        queue = queue_of(restore=100, evict=100)
        submit(queue, job_class, 1)
        submit(queue, job_class, 2, block_bytes=500)
        submit(queue, job_class, 3)
        assert sent(queue.take(0)) == [1]
        queue.finish(1)
        assert sent(queue.take(0)) == [2]
        queue.finish(2)
        assert sent(queue.take(0)) == [3]


def test_what_was_dropped_is_sent_no_further() -> None:
    queue = queue_of(evict=2 * BLOCK)
    submit(queue, BACKGROUND, 1, count=1)
    submit(queue, BACKGROUND, 2, count=3)
    submit(queue, BACKGROUND, 3, 4)
    assert sent(queue.take(0)) == [1, 2]
    for number in (2, 3, 99):
        queue.drop(number)
    assert queue.waiting_count == 1
    queue.finish(1)
    assert sent(queue.take(0)) == [4], "what was sent is in flight until it is over"
    queue.finish(2)
    queue.finish(3)
    assert is_idle(queue)


def test_many_that_are_dropped_while_nothing_is_sent_leave_no_trace() -> None:
    queue = queue_of()
    for number in range(1000):
        submit(queue, INTERACTIVE, number, deadline_ns=number + 1)
        queue.drop(number)
    assert len(queue._queues[INTERACTIVE]._ring[0].fresh) < 100


def test_what_has_expired_is_told_and_not_sent() -> None:
    queue = queue_of(restore=BLOCK)
    submit(queue, INTERACTIVE, 1, deadline_ns=100, count=3)
    submit(queue, INTERACTIVE, 2, deadline_ns=100)
    submit(queue, INTERACTIVE, 3, deadline_ns=200)
    assert sent(queue.take(99)) == [1]
    queue.finish(1)
    plan = queue.take(100)
    assert sent(plan) == [3] and sorted(plan.expired) == [1, 2]
    queue.finish(2)
    assert is_idle(queue)


def test_a_lane_that_is_gone_leaves_no_bytes_in_flight() -> None:
    queue = queue_of(restore=20, evict=10)
    submit(queue, INTERACTIVE, 1, 2, 3)
    queue.take(0)
    submit(queue, BACKGROUND, 4)
    queue.reset()
    assert is_idle(queue)
    queue.finish(1)
    submit(queue, BACKGROUND, 5)
    assert sent(queue.take(0)) == [5], "a late word of a lost job takes nothing away"
    submit(queue, INTERACTIVE, 6, 7)
    assert sent(queue.take(0)) == [6, 7]


def test_jobs_that_wait_for_their_engine_hold_up_no_others() -> None:
    queue = queue_of(restore=20, evict=20)
    submit(queue, BACKGROUND, *range(1, 9))
    assert sent(queue.take(0)) == [1, 2]
    queue.park(1)
    queue.park(2)
    assert sent(queue.take(0)) == [3, 4]
    # It begins whether or not there is room; nothing else is sent until there is.
    queue.unpark(1)
    queue.finish(3)
    assert sent(queue.take(0)) == []
    queue.finish(4)
    assert sent(queue.take(0)) == [5]
    queue.finish(2)
    queue.finish(1)
    assert sent(queue.take(0)) == [6]


def test_a_restore_that_waits_for_its_engine_keeps_no_evict_waiting() -> None:
    queue = queue_of()
    submit(queue, INTERACTIVE, 1)
    assert sent(queue.take(0)) == [1]
    submit(queue, BACKGROUND, 2)
    assert sent(queue.take(0)) == []
    queue.park(1)
    assert sent(queue.take(0)) == [2]


def test_no_more_jobs_wait_beside_the_window_than_may() -> None:
    queue = queue_of(evict=10)
    submit(queue, BACKGROUND, *range(1, PARKED_JOBS_MAX + 3))
    for job in range(1, PARKED_JOBS_MAX + 1):
        assert sent(queue.take(0)) == [job]
        queue.park(job)
        queue.park(job)
    last = PARKED_JOBS_MAX + 1
    assert sent(queue.take(0)) == [last]
    queue.park(last)
    assert sent(queue.take(0)) == [], "it is one too many, and takes its room"
    queue.finish(last)
    assert sent(queue.take(0)) == [last + 1]


def test_words_of_jobs_that_are_over_change_nothing() -> None:
    queue = queue_of(evict=10)
    submit(queue, BACKGROUND, 1, 2, 3)
    assert sent(queue.take(0)) == [1]
    queue.park(1)
    assert sent(queue.take(0)) == [2]
    queue.reset()
    for word in (queue.park, queue.unpark, queue.finish):
        word(1)
    assert is_idle(queue)


# -- several lanes of one volume -----------------------------------------------------------------------------------------------------------


def two_lanes() -> tuple[LaneQueue, LaneQueue, list[str]]:
    arbiter = arbiter_of()
    host, gpu = queue_of(arbiter), queue_of(arbiter)
    woken: list[str] = []
    host.wake, gpu.wake = (lambda: woken.append("host")), (lambda: woken.append("gpu"))
    return host, gpu, woken


def test_a_restore_of_one_lane_holds_back_the_spills_of_another_on_its_volume() -> None:
    host, gpu, woken = two_lanes()
    submit(gpu, INTERACTIVE, 1)
    submit(host, SPILL, 1, 2, 3)
    assert sent(host.take(0)) == []
    assert sent(gpu.take(0)) == [1] and sent(host.take(0)) == []
    gpu.finish(1)
    for wake in gpu.others():
        wake()
    assert woken == ["host"] and sent(host.take(0)) == [1], "one slice, since restores are about"
    other = queue_of()
    submit(other, SPILL, 1)
    assert sent(other.take(0)) == [1], "another volume's"


def test_spills_of_one_lane_leave_the_preemptions_of_another_their_room() -> None:
    host, gpu, _ = two_lanes()
    submit(host, SPILL, *range(1, 9))
    assert len(sent(host.take(0))) == 4, "the volume's window"
    submit(gpu, BACKGROUND, 1)
    submit(gpu, PREEMPT, 2, 3)
    assert sent(gpu.take(0)) == [2, 3]


def test_lanes_of_one_volume_write_in_turn_beside_restores() -> None:
    host, gpu, woken = two_lanes()
    submit(gpu, INTERACTIVE, 1)
    gpu.take(0)
    gpu.finish(1)
    submit(host, SPILL, *range(1, 9))
    submit(gpu, SPILL, *range(11, 19))
    order = sent(host.take(0))
    assert sent(gpu.take(0)) == []
    job = 0
    while len(order) < 6:
        job += 1
        for queue, finished in ((host, job), (gpu, job + 1)):
            # Whoever was held up first, then the lane itself: as the front does.
            before = len(order)
            queue.finish(finished)
            other = gpu if queue is host else host
            order += sent(other.take(0)) if queue.others() else []
            order += sent(queue.take(0))
            assert len(order) == before + 1
    assert order == [1, 11, 2, 12, 3, 13, 4][: len(order)] and not woken


def test_what_waits_for_a_mover_that_is_away_holds_up_no_other_lane() -> None:
    host, gpu, _ = two_lanes()
    gpu.serve(False)
    submit(gpu, INTERACTIVE, 1, 2)
    submit(host, SPILL, 1)
    assert sent(host.take(0)) == [1]
    host.finish(1)
    gpu.drop(2)
    gpu.serve(True)
    submit(host, SPILL, 2)
    assert sent(host.take(0)) == [] and sent(gpu.take(0)) == [1]
    gpu.serve(False)
    gpu.reset()
    assert is_idle(gpu) is False and sent(host.take(0)) == [2], "of the other lane's"


@pytest.mark.parametrize("job_class", [INTERACTIVE, SPILL])
def test_a_lane_that_stands_still_holds_up_no_other_for_longer_than_a_few_seconds(job_class: JobClass) -> None:
    host, gpu, _ = two_lanes()
    submit(gpu, job_class, *range(1, 41))
    stuck = gpu.take(0)
    assert len(stuck.portions) == (10 if job_class == INTERACTIVE else 4), "its window"
    submit(host, SPILL, 1, 2)
    plan = host.take(1)
    assert sent(plan) == [] and plan.wake_ns == STALLED_NS, "nothing else would wake it"
    # What waits behind it holds up nobody either.
    assert sent(host.take(STALLED_NS - 1)) == [] and sent(host.take(STALLED_NS))[0] == 1
    submit(gpu, INTERACTIVE, 50)
    host.finish(1)
    submit(host, SPILL, 3)
    assert sent(host.take(STALLED_NS + 2 * QUIET_NS))[-1] == 3, "long after the last restore"
    for portion in stuck.portions:
        gpu.finish(portion.job)
    # It moves again, and counts again.
    submit(host, SPILL, 4)
    assert sent(host.take(STALLED_NS + 2 * QUIET_NS)) == []


def test_a_job_that_waited_for_its_engine_stands_still_only_from_then_on() -> None:
    host, gpu, _ = two_lanes()
    submit(gpu, INTERACTIVE, 1)
    gpu.take(0)
    gpu.park(1)
    assert sent(host.take(2 * STALLED_NS)) == []
    gpu.unpark(1)
    submit(host, SPILL, 1)
    assert sent(host.take(3 * STALLED_NS - 1)) == [] and sent(host.take(3 * STALLED_NS)) == [1]


# -- against a model -----------------------------------------------------------------------------------------------------------------------


class LaneQueueBesideModel(RuleBasedStateMachine):
    """Every block is sent once, in order within its ticket, within the windows; and something is sent whenever anything can be."""

    @initialize(restore=st.integers(1, 50), evict=st.integers(1, 50), arena=st.booleans(), slice_bytes=st.integers(1, 30))
    def start(self, restore: int, evict: int, arena: bool, slice_bytes: int) -> None:
        self.windows = {job_class: evict for job_class in JobClass} | {INTERACTIVE: restore}
        arbiter = arbiter_of(ARENA_PRECEDENCE if arena else VOLUME_PRECEDENCE, slice_bytes=slice_bytes, bytes_in_flight=2 * evict)
        self.queue = queue_of(arbiter, restore=restore, evict=evict, restore_job=30, evict_job=30)
        self.waiting: dict[int, tuple[Ticket, int]] = {}
        self.running: dict[int, tuple[JobClass, int]] = {}
        self.sent_ns: dict[int, int] = {}
        self.stalled: set[int] = set()
        self.parked: set[int] = set()
        self.number = 0
        self.now_ns = 0

    @rule(
        job_class=st.sampled_from(JobClass),
        block_bytes=st.integers(1, 40),
        count=st.integers(1, 9),
        instance=st.integers(0, 3),
        lifetime_ns=st.sampled_from([0, 0, 50, 10 * QUIET_NS]),
    )
    def submit(self, job_class: JobClass, block_bytes: int, count: int, instance: int, lifetime_ns: int) -> None:
        self.number += 1
        deadline_ns = self.now_ns + lifetime_ns if lifetime_ns else 0
        self.waiting[self.number] = Ticket(self.number, job_class, count, block_bytes, instance, deadline_ns), 0
        self.queue.submit(Ticket(self.number, job_class, count, block_bytes, instance, deadline_ns))

    @rule(later_ns=st.sampled_from([0, 1, 60, 2 * QUIET_NS]))
    def wait(self, later_ns: int) -> None:
        self.now_ns += later_ns

    @rule()
    def take(self) -> None:
        plan = self.queue.take(self.now_ns)
        self.stalled |= {job for job in self.running if job not in self.parked and self.sent_ns[job] + STALLED_NS <= self.now_ns}
        for number in plan.expired:
            ticket, _ = self.waiting.pop(number)
            assert 0 < ticket.deadline_ns <= self.now_ns
        for portion in plan.portions:
            ticket, first = self.waiting.pop(portion.ticket)
            assert not ticket.deadline_ns or ticket.deadline_ns > self.now_ns
            assert portion.first == first and 1 <= portion.block_count <= ticket.block_count - first and portion.job not in self.running
            if first + portion.block_count < ticket.block_count:
                self.waiting[portion.ticket] = ticket, first + portion.block_count
            self.running[portion.job] = ticket.job_class, portion.block_count * ticket.block_bytes
            self.sent_ns[portion.job] = self.now_ns
        assert set(self.running) - self.parked or not self.waiting, "jobs wait for nothing"

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.running:
            job = data.draw(st.sampled_from(sorted(self.running)))
            del self.running[job]
            self.parked.discard(job)
            self.queue.finish(job)

    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        if self.running:
            job = data.draw(st.sampled_from(sorted(self.running)))
            self.parked.add(job)
            self.queue.park(job)

    @rule(data=st.data())
    def unpark(self, data: st.DataObject) -> None:
        if self.parked:
            job = data.draw(st.sampled_from(sorted(self.parked)))
            self.parked.discard(job)
            self.queue.unpark(job)
            # It may overfill the windows; what they allow is looked at again once it is over.
            del self.running[job]
            self.queue.finish(job)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, self.number + 1))
        self.queue.drop(number)
        self.waiting.pop(number, None)

    @rule(often=st.integers(0, 9))
    def reset(self, often: int) -> None:
        if not often:
            self.queue.reset()
            self.waiting.clear()
            self.running.clear()
            self.parked.clear()

    @rule(served=st.booleans())
    def serve(self, served: bool) -> None:
        self.queue.serve(served)
        self.queue.serve(True)

    @invariant()
    def bytes_in_flight_stay_in_their_windows(self) -> None:
        if not hasattr(self, "queue"):
            return
        of_class: dict[JobClass, list[int]] = defaultdict(list)
        for job, (job_class, size) in self.running.items():
            if job not in self.parked:
                of_class[job_class].append(size)
        of_class[BACKGROUND] += of_class.pop(SPILL, [])
        for job_class, sizes in of_class.items():
            assert len(sizes) <= 1 or sum(sizes) <= self.windows[job_class]

    @invariant()
    def the_arbiter_counts_what_there_is(self) -> None:
        if not hasattr(self, "queue"):
            return
        arbiter = self.queue._arbiter
        stalled = self.stalled & self.running.keys()
        waiting = Counter(ticket.job_class for ticket, _ in self.waiting.values() if not stalled)
        assert [waiting[job_class] for job_class in JobClass] == arbiter._waiting
        in_flight: Counter[JobClass] = Counter()
        for job, (job_class, size) in self.running.items():
            in_flight[job_class] += 0 if job in self.parked else size
        assert [in_flight[job_class] for job_class in JobClass] == self.queue._in_flight
        for job in stalled - self.parked:
            in_flight[self.running[job][0]] -= self.running[job][1]
        assert [in_flight[job_class] for job_class in JobClass] == arbiter._in_flight
        assert self.queue.waiting_count == len(self.waiting)


LaneQueueBesideModel.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestLaneQueueBesideModel = LaneQueueBesideModel.TestCase


@given(tickets=st.lists(st.tuples(st.sampled_from(JobClass), st.integers(1, 80), st.integers(1, 5), st.integers(0, 3)), max_size=60))
def test_every_block_is_sent_exactly_once(tickets: list[tuple[JobClass, int, int, int]]) -> None:
    queue = queue_of(restore=40, evict=20)
    for number, (job_class, block_bytes, count, instance) in enumerate(tickets):
        submit(queue, job_class, number, block_bytes=block_bytes, count=count, instance=instance)
    blocks: list[tuple[int, int]] = []
    while portions := queue.take(0).portions:
        for portion in portions:
            blocks += [(portion.ticket, block) for block in range(portion.first, portion.first + portion.block_count)]
            queue.finish(portion.job)
    assert sorted(blocks) == [(number, block) for number, (_, _, count, _) in enumerate(tickets) for block in range(count)]
    assert is_idle(queue)

"""The order of jobs on a lane."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from offloadd.scheduler.lane_queue import PARKED_JOBS_MAX, JobClass, LaneQueue, Ticket

RESTORE, EVICT, BACKGROUND = JobClass.RESTORE, JobClass.EVICT, JobClass.BACKGROUND


def queue_of(*, restore: int = 100, evict: int = 10, share: int = 4) -> LaneQueue:
    return LaneQueue(restore_bytes_in_flight=restore, evict_bytes_in_flight=evict, evict_share=share)


def submit(queue: LaneQueue, job_class: JobClass, *jobs: int, io_bytes: int = 10) -> None:
    for job in jobs:
        queue.submit(Ticket(job, job_class, io_bytes))


def test_restores_overtake_waiting_evicts() -> None:
    queue = queue_of()
    submit(queue, EVICT, 1, 2, 3)
    assert queue.take() == [1]
    submit(queue, RESTORE, 10, 11)
    assert queue.take() == [10, 11]
    queue.finish(1)
    assert queue.take() == [], "no evict starts while restores run"
    queue.finish(10)
    assert queue.take() == []
    queue.finish(11)
    assert queue.take() == [2]


def test_while_restores_run_one_evict_starts_for_each_share_of_restores() -> None:
    queue = queue_of(restore=20, share=4)
    submit(queue, RESTORE, *range(100))
    submit(queue, EVICT, *range(1000, 1100))
    order: list[int] = []
    running: list[int] = []
    while len(order) < 50:
        taken = queue.take()
        order += taken
        running += taken
        queue.finish(running.pop(0))
    assert [job >= 1000 for job in order[:50]] == [False, False, False, False, True] * 10


def test_steady_restores_do_not_starve_evicts() -> None:
    queue = queue_of(restore=20, share=8)
    submit(queue, EVICT, 0)
    for job in range(1, 100):
        submit(queue, RESTORE, job)
        taken = queue.take()
        if 0 in taken:
            assert job <= 10
            return
        if job > 1:
            queue.finish(job - 1)
    raise AssertionError("the evict never ran")


def test_steady_evicts_do_not_starve_background_jobs() -> None:
    queue = queue_of(evict=10, share=4)
    submit(queue, BACKGROUND, 0)
    for job in range(1, 100):
        submit(queue, EVICT, job)
    order = []
    while len(order) < 10:
        (job,) = queue.take()
        order.append(job)
        queue.finish(job)
    assert order == [1, 2, 3, 4, 0, 5, 6, 7, 8, 9]


def test_evicts_go_before_background_jobs() -> None:
    queue = queue_of(evict=30)
    submit(queue, BACKGROUND, 1, 2)
    submit(queue, EVICT, 3, 4)
    assert queue.take() == [3, 4, 1], "all in one window"


def test_a_job_larger_than_the_window_runs_alone() -> None:
    for job_class in JobClass:
        queue = queue_of(restore=100, evict=100)
        submit(queue, job_class, 1)
        submit(queue, job_class, 2, io_bytes=500)
        submit(queue, job_class, 3)
        assert queue.take() == [1]
        queue.finish(1)
        assert queue.take() == [2]
        queue.finish(2)
        assert queue.take() == [3]


def test_a_dropped_job_is_never_sent() -> None:
    queue = queue_of(evict=20)
    submit(queue, EVICT, 1, 2, 3, 4)
    assert queue.take() == [1, 2]
    queue.drop({1, 3})
    assert queue.waiting_count == 1
    queue.finish(1)
    queue.finish(2)
    assert queue.take() == [4], "what was sent is in flight until it is over"
    queue.finish(3)
    queue.finish(4)
    assert not any(queue._bytes_in_flight.values()) and not queue._in_flight


def test_a_lane_that_is_gone_leaves_no_bytes_in_flight() -> None:
    queue = queue_of(restore=20, evict=10)
    submit(queue, RESTORE, 1, 2, 3)
    queue.take()
    submit(queue, EVICT, 4)
    assert sorted(queue.reset()) == [1, 2, 3, 4]
    assert not any(queue._bytes_in_flight.values()) and queue.waiting_count == 0
    queue.finish(1)
    submit(queue, EVICT, 5)
    assert queue.take() == [5], "a late word of a lost job takes nothing away"
    submit(queue, RESTORE, 6, 7)
    assert queue.take() == [6, 7]


def test_jobs_that_wait_for_their_engine_hold_up_no_others() -> None:
    queue = queue_of(restore=20, evict=20)
    submit(queue, EVICT, *range(1, 9))
    assert queue.take() == [1, 2]
    queue.park(1)
    queue.park(2)
    assert queue.take() == [3, 4]
    # It begins whether or not there is room; nothing else is sent until there is.
    queue.unpark(1)
    queue.finish(3)
    assert queue.take() == []
    queue.finish(4)
    assert queue.take() == [5]
    queue.finish(2)
    queue.finish(1)
    assert queue.take() == [6]


def test_a_restore_that_waits_for_its_engine_keeps_no_evict_waiting() -> None:
    queue = queue_of()
    submit(queue, RESTORE, 1)
    assert queue.take() == [1]
    submit(queue, EVICT, 2)
    assert queue.take() == []
    queue.park(1)
    assert queue.take() == [2]


def test_no_more_jobs_wait_beside_the_window_than_may() -> None:
    queue = queue_of(evict=10)
    submit(queue, EVICT, *range(PARKED_JOBS_MAX + 2))
    for job in range(PARKED_JOBS_MAX):
        assert queue.take() == [job]
        queue.park(job)
        queue.park(job)
    assert queue.take() == [PARKED_JOBS_MAX]
    queue.park(PARKED_JOBS_MAX)
    assert queue.take() == [], "it is one too many, and takes its room"
    queue.finish(PARKED_JOBS_MAX)
    assert queue.take() == [PARKED_JOBS_MAX + 1]


def test_words_of_jobs_that_are_over_change_nothing() -> None:
    queue = queue_of(evict=10)
    submit(queue, EVICT, 1, 2, 3)
    assert queue.take() == [1]
    queue.park(1)
    assert queue.take() == [2]
    assert sorted(queue.reset()) == [1, 2, 3]
    for word in (queue.park, queue.unpark, queue.finish):
        word(1)
    assert not any(queue._bytes_in_flight.values()) and not queue._parked


class LaneQueueBesideModel(RuleBasedStateMachine):
    @initialize(restore=st.integers(1, 50), evict=st.integers(1, 50), share=st.integers(1, 4))
    def start(self, restore: int, evict: int, share: int) -> None:
        self.windows = {RESTORE: restore, EVICT: evict}
        self.queue = queue_of(restore=restore, evict=evict, share=share)
        self.waiting: dict[int, Ticket] = {}
        self.running: dict[int, Ticket] = {}
        self.parked: set[int] = set()
        self.sent: Counter[int] = Counter()
        self.number = 0

    @rule(job_class=st.sampled_from(JobClass), io_bytes=st.integers(1, 80))
    def submit(self, job_class: JobClass, io_bytes: int) -> None:
        self.number += 1
        self.waiting[self.number] = Ticket(self.number, job_class, io_bytes)
        self.queue.submit(self.waiting[self.number])

    @rule()
    def take(self) -> None:
        for job in self.queue.take():
            ticket = self.waiting.pop(job)
            assert not any(other.job_class == ticket.job_class and other.job < job for other in self.waiting.values()), "not in order within its class"
            self.running[job] = ticket
            self.sent[job] += 1
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
    def drop(self, data: st.DataObject) -> None:
        jobs = set(data.draw(st.lists(st.integers(1, self.number + 1), max_size=3)))
        self.queue.drop(jobs)
        for job in jobs:
            self.waiting.pop(job, None)

    @rule(often=st.integers(0, 9))
    def reset(self, often: int) -> None:
        if not often:
            assert sorted(self.queue.reset()) == sorted([*self.waiting, *self.running])
            self.waiting.clear()
            self.running.clear()
            self.parked.clear()

    @invariant()
    def bytes_in_flight_stay_in_their_windows(self) -> None:
        for window, classes in ((RESTORE, (RESTORE,)), (EVICT, (EVICT, BACKGROUND))):
            running = [ticket for ticket in getattr(self, "running", {}).values() if ticket.job not in self.parked]
            mine = [ticket.io_bytes for ticket in running if ticket.job_class in classes]
            assert len(mine) <= 1 or sum(mine) <= self.windows[window]

    @invariant()
    def every_job_is_sent_at_most_once(self) -> None:
        assert all(count == 1 for count in getattr(self, "sent", {}).values())
        if hasattr(self, "queue"):
            assert self.queue.waiting_count == len(self.waiting)


LaneQueueBesideModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLaneQueueBesideModel = LaneQueueBesideModel.TestCase


@given(jobs=st.lists(st.tuples(st.sampled_from(JobClass), st.integers(1, 80)), max_size=60), share=st.integers(1, 4))
def test_every_job_is_sent_exactly_once(jobs: list[tuple[JobClass, int]], share: int) -> None:
    queue = queue_of(restore=40, evict=20, share=share)
    for number, (job_class, io_bytes) in enumerate(jobs):
        queue.submit(Ticket(number, job_class, io_bytes))
    sent: list[int] = []
    while taken := queue.take():
        sent += taken
        for job in taken:
            queue.finish(job)
    assert sorted(sent) == list(range(len(jobs)))

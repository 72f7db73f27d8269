"""Jobs that wait for their engine's event: what the front is told, in which order they begin, and what a look costs."""

import threading

import pytest

from offloadd.ipc.channel import Channel, socket_pair
from offloadd.model.enums import Reason
from offloadd.mover.device import EventNotOpenedError, HostDevice
from offloadd.mover.lane import Lane
from offloadd.mover.messages import Job, LaneAnswer, Operation, Parked, SliceDone, Unparked
from offloadd.mover.tools import Memories

from ..standin.controls import wait_until
from .mover_harness import ANSWER_TIMEOUT_S, make_records


class Region:
    """A region that jobs wait in and do not touch. `come`: events that have come. `may_look`: without it looks stand still."""

    payload_bytes = 4096

    def __init__(self):
        self.come = set()
        self.looks = []
        self.unopened = set()
        self.may_look = threading.Event()
        self.may_look.set()

    def has_come(self, after_event):
        assert self.may_look.wait(ANSWER_TIMEOUT_S)
        self.looks.append(after_event)
        if after_event in self.unopened:
            raise EventNotOpenedError("there is no such event")
        return after_event in self.come

    def close(self):
        pass


class Front:
    """The front's end of an arena's lane with one thread, in this process."""

    def __init__(self):
        self.region = Region()
        memories = Memories(HostDevice())
        memories.engine.add(1, self.region)
        self.engine = memories.engine
        ours, theirs = socket_pair()
        ours.settimeout(ANSWER_TIMEOUT_S)
        self.channel = Channel(ours, LaneAnswer)
        self.lane = Lane(1, theirs, memories, None, path="ddr", thread_count=1, staging_slot_bytes=0)
        self.lane.open()

    def send(self, *jobs, after=b"", move=1, **options):
        blocks = make_records([0], 4096).tobytes()
        for job in jobs:
            self.channel.send(Job(job=job, move=move, operation=Operation.NULL, slot_bytes=4096, blocks=blocks, after_event=after, **options))

    def answer(self):
        received = self.channel.receive()
        assert received is not None
        return received[0]

    def done(self, count):
        """The jobs that the next `count` results are of."""
        jobs = []
        while len(jobs) < count:
            answer = self.answer()
            if isinstance(answer, SliceDone):
                jobs.append(answer.job)
        return jobs

    def close(self):
        self.region.may_look.set()
        self.lane.stop()
        self.lane.join()
        self.channel.close()


@pytest.fixture
def front():
    front = Front()
    yield front
    front.close()


def test_a_job_that_waits_is_told_and_told_again_when_it_begins(front):
    front.send(1, after=b"a")
    assert front.answer() == Parked(job=1)
    front.send(2)
    assert front.done(1) == [2]
    front.region.come.add(b"a")
    assert front.answer() == Unparked(job=1)
    assert front.answer().job == 1


def test_a_job_whose_event_has_come_already_begins_without_a_word(front):
    front.region.come.add(b"a")
    front.send(1, after=b"a")
    answer = front.answer()
    assert isinstance(answer, SliceDone) and answer.job == 1


def test_jobs_of_one_request_cost_one_look_a_round(front):
    front.send(*range(1, 9), after=b"a")
    front.send(9, after=b"b", move=2)
    # The last job's own look is behind those of the others.
    told = {front.answer().job for _ in range(9)}
    assert told == set(range(1, 10))
    begin = len(front.region.looks)
    wait_until(lambda: len(front.region.looks) >= begin + 40, "looks")
    looks = front.region.looks[begin : begin + 40]
    assert looks.count(b"a") == looks.count(b"b") == 20
    front.region.come |= {b"a", b"b"}
    assert front.done(9)[:8] == list(range(1, 9)), "in the order in which they came"


def test_jobs_whose_engines_come_all_at_once_take_turns_with_those_in_the_socket(front):
    """Else a restore would wait for all of them, or they for a socket that is never empty."""
    front.send(*range(1, 7), after=b"a")
    assert {front.answer().job for _ in range(6)} == set(range(1, 7))
    front.region.may_look.clear()
    front.send(*range(11, 17))
    front.region.come.add(b"a")
    front.region.may_look.set()
    order = front.done(12)
    waited = [job < 10 for job in order]
    assert sorted(order) == [*range(1, 7), *range(11, 17)]
    # The first may be either, as the look that stood still may have ended before all was there.
    assert all(waited[index] != waited[index + 1] for index in range(2, 10)), order


def test_an_event_that_can_not_be_opened_fails_its_job_alone(front):
    front.region.unopened.add(b"a")
    front.send(1, after=b"a")
    front.send(2)
    assert [int.from_bytes(front.answer().results[4:8], "little") for _ in range(2)] == [Reason.EVENT_NOT_OPENED, 0]


def test_a_fence_and_a_deadline_end_the_wait(front):
    front.send(1, after=b"a", move=5)
    front.send(2, after=b"b", move=6)
    assert {front.answer() for _ in range(2)} == {Parked(job=1), Parked(job=2)}
    front.engine.fence(5)
    assert front.answer() == Unparked(job=1)
    assert int.from_bytes(front.answer().results[4:8], "little") == Reason.CANCELLED
    front.send(3, after=b"c", move=7, deadline_ns=1)
    assert int.from_bytes(front.answer().results[4:8], "little") == Reason.DEADLINE

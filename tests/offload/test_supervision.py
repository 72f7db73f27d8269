"""When a mover is taken to be wedged, and in which order it is replaced; under a clock that the test holds."""

import pytest

from offloadd.offload.supervision import Phase, Step, Supervision

SECOND = 1_000_000_000
WEDGED_S, CLOSING_S = 30, 1


class Watched:
    """A process that is looked at four times a second."""

    def __init__(self) -> None:
        self.now_ns = 77 * SECOND
        self.supervision = Supervision(wedged_ns=WEDGED_S * SECOND, closing_ns=CLOSING_S * SECOND)
        self.supervision.started(self.now_ns)
        self.steps: list[Step] = []

    def look(self, *, after_ns: int = SECOND // 4, stalled_ns: int = 0) -> Step:
        self.now_ns += after_ns
        step = self.supervision.look(self.now_ns, stalled_ns=stalled_ns)
        if step is not Step.NOTHING:
            self.steps.append(step)
        return step

    def until(self, step: Step) -> int:
        """Nanoseconds until this step is asked for."""
        begin_ns = self.now_ns
        while self.look() is not step:
            assert self.now_ns - begin_ns < 1000 * SECOND
        return self.now_ns - begin_ns


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_mover_that_answers_is_asked_once_a_second_and_never_replaced(watched: Watched) -> None:
    for _ in range(4000):
        if watched.look() is Step.PING:
            watched.supervision.answered()
    assert set(watched.steps) == {Step.PING} and 900 <= len(watched.steps) <= 1000


def test_a_silent_mover_closes_its_memory_first_is_then_superseded_and_only_then_killed(watched: Watched) -> None:
    watched.until(Step.PING)
    assert watched.until(Step.CLOSE) >= WEDGED_S * SECOND
    assert "not answered for 30 s" in watched.supervision.reason
    watched.supervision.closed()
    assert watched.look() is Step.SUPERSEDE
    for _ in range(1000):
        assert watched.look() is Step.NOTHING, "it is killed by whoever supersedes it"


def test_a_mover_that_does_not_close_its_memory_is_killed_and_not_superseded(watched: Watched) -> None:
    watched.until(Step.CLOSE)
    assert CLOSING_S * SECOND <= watched.until(Step.KILL) < 2 * CLOSING_S * SECOND
    watched.supervision.closed()
    for _ in range(1000):
        assert watched.look() is Step.NOTHING, "what has not said in time that its memory is closed is only replaced once it is lost"


def test_an_answer_after_it_was_told_to_close_its_memory_does_not_keep_it(watched: Watched) -> None:
    watched.until(Step.CLOSE)
    watched.supervision.answered()
    assert watched.supervision.phase is Phase.CLOSING
    assert watched.until(Step.KILL)


def test_a_mover_that_answers_but_whose_copies_stand_still_is_replaced(watched: Watched) -> None:
    stalled_ns = 0
    while (step := watched.look(stalled_ns=stalled_ns)) is not Step.CLOSE:
        stalled_ns += SECOND // 4
        assert stalled_ns <= (WEDGED_S + 1) * SECOND
        if step is Step.PING:
            watched.supervision.answered()
    assert "stood still" in watched.supervision.reason


def test_copies_that_move_now_and_then_are_no_reason(watched: Watched) -> None:
    for turn in range(4000):
        if watched.look(stalled_ns=turn % (4 * (WEDGED_S - 1)) * SECOND // 4) is Step.PING:
            watched.supervision.answered()
    assert set(watched.steps) == {Step.PING}


def test_a_machine_that_stood_still_has_seen_nobody_be_silent(watched: Watched) -> None:
    watched.until(Step.PING)
    # Everybody was stopped for an hour, and the front is the first to go on.
    assert watched.look(after_ns=3600 * SECOND, stalled_ns=3600 * SECOND) is Step.NOTHING
    watched.supervision.answered()
    assert watched.supervision.silent_ns == 0


def test_a_fresh_process_begins_anew(watched: Watched) -> None:
    watched.until(Step.KILL)
    watched.supervision.started(watched.now_ns)
    assert watched.supervision.phase is Phase.WELL and watched.supervision.reason == ""
    assert watched.until(Step.CLOSE) >= WEDGED_S * SECOND

"""When a volume gets no more jobs, and when it does again."""

from hypothesis import given
from hypothesis import strategies as st

from offloadd.scheduler.breaker import Breaker, BreakerState

PAUSE, PAUSE_MAX = 100, 400


def new(failures_max: int = 3) -> Breaker:
    return Breaker(failures_max=failures_max, pause_ns=PAUSE, pause_ns_max=PAUSE_MAX)


def opened(now_ns: int = 0) -> Breaker:
    breaker = new()
    breaker.trip(now_ns, "hangs")
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not_let_it() -> None:
    breaker = new()
    for _ in range(5):
        breaker.failed(0, "EIO")
        breaker.failed(0, "EIO")
        assert breaker.admits
        breaker.succeeded()
    for _ in range(3):
        breaker.failed(7, "EIO")
    assert (breaker.state, breaker.reason, breaker.admits, breaker.opened_count) == (BreakerState.OPEN, "EIO", False, 1)


def test_a_good_probe_opens_it_halfway_but_not_before_its_pause_is_over() -> None:
    breaker = opened(1000)
    breaker.probed(1000 + PAUSE - 1)
    assert breaker.state is BreakerState.OPEN
    breaker.probed(1000 + PAUSE)
    assert breaker.state is BreakerState.HALF_OPEN and breaker.admits and breaker.reason == "hangs"


def test_halfway_the_first_result_decides() -> None:
    good, bad = opened(), opened()
    for breaker in (good, bad):
        breaker.probed(PAUSE)
    good.succeeded()
    assert good.state is BreakerState.CLOSED and good.reason == ""
    bad.failed(PAUSE, "EIO again")
    assert (bad.state, bad.reason, bad.opened_count) == (BreakerState.OPEN, "EIO again", 2)


def test_results_of_jobs_sent_before_it_opened_do_not_turn_it() -> None:
    breaker = opened()
    breaker.succeeded()
    breaker.failed(1, "late")
    breaker.trip(1, "again")
    assert (breaker.state, breaker.reason, breaker.opened_count) == (BreakerState.OPEN, "hangs", 1)


def test_pauses_grow_while_it_opens_from_halfway_and_begin_anew_once_it_closed() -> None:
    breaker, now_ns = opened(), 0
    for pause in (PAUSE, 2 * PAUSE, PAUSE_MAX, PAUSE_MAX):
        breaker.probed(now_ns + pause - 1)
        assert breaker.state is BreakerState.OPEN, pause
        now_ns += pause
        breaker.probed(now_ns)
        assert breaker.state is BreakerState.HALF_OPEN, pause
        breaker.failed(now_ns, "EIO")
    breaker.probed(now_ns + PAUSE_MAX)
    breaker.succeeded()
    breaker.trip(0, "hangs")
    breaker.probed(PAUSE)
    assert breaker.state is BreakerState.HALF_OPEN


@given(st.lists(st.sampled_from(["good", "bad", "trip", "probe"]), max_size=60), st.integers(1, 4))
def test_whatever_happens_a_volume_that_answers_probes_and_jobs_is_served_again_within_its_longest_pause(events: list[str], failures_max: int) -> None:
    breaker = new(failures_max)
    now_ns = in_a_row = 0
    for event in events:
        now_ns += 60
        before = breaker.state
        if event == "good":
            breaker.succeeded()
        elif event == "bad":
            breaker.failed(now_ns, "EIO")
        elif event == "trip":
            breaker.trip(now_ns, "hangs")
        else:
            breaker.probed(now_ns)
        in_a_row = in_a_row + 1 if event == "bad" else 0 if event == "good" else in_a_row
        if before is BreakerState.CLOSED and not breaker.admits:
            assert event == "trip" or (event == "bad" and in_a_row >= failures_max), "it opened for nothing"
        assert breaker.admits or breaker.reason
    breaker.probed(now_ns + PAUSE_MAX)
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED

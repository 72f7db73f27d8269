"""A limit of bytes over time: the time is the test's."""

from hypothesis import given
from hypothesis import strategies as st

from offloadd.scheduler.rate import DAY_NS, SECOND_NS, TokenBucket, WriteBudget


def bucket(rate: int = 100, burst: int = 50) -> TokenBucket:
    return TokenBucket(bytes_per_period=rate, period_ns=SECOND_NS, burst_bytes=burst)


def test_a_burst_then_the_rate() -> None:
    limit = bucket()
    assert limit.left(0) == 50
    limit.take(50, 0)
    assert limit.left(0) == 0 and limit.ready_ns(0) == SECOND_NS // 100
    assert limit.left(SECOND_NS // 10) == 10
    assert limit.left(10 * SECOND_NS) == 50, "no more is saved up"


def test_what_is_taken_in_advance_is_waited_for() -> None:
    limit = bucket()
    limit.take(250, 0)
    assert limit.left(0) == -200
    ready_ns = limit.ready_ns(0)
    assert ready_ns == 201 * SECOND_NS // 100
    assert limit.left(ready_ns - 1) == 0 and limit.left(ready_ns) == 1


def test_what_was_not_used_is_given_back() -> None:
    limit = bucket()
    limit.take(30, 0)
    limit.give_back(20)
    assert limit.left(0) == 40
    limit.give_back(1000)
    assert limit.left(0) == 50


def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing() -> None:
    limit = bucket()
    limit.take(50, 10 * SECOND_NS)
    assert limit.left(5 * SECOND_NS) == 0
    assert limit.left(10 * SECOND_NS) == 0 and limit.left(10 * SECOND_NS + SECOND_NS // 10) == 10


@given(rate=st.integers(1, 10**10), burst=st.integers(1, 10**9), steps=st.lists(st.tuples(st.integers(0, 3 * SECOND_NS), st.integers(1, 10**9)), max_size=30))
def test_never_more_than_the_burst_and_the_rate_whatever_is_asked(rate: int, burst: int, steps: list[tuple[int, int]]) -> None:
    limit = bucket(rate, burst)
    now_ns = taken = 0
    for pause_ns, size in steps:
        now_ns += pause_ns
        ready_ns = limit.ready_ns(now_ns)
        if ready_ns > now_ns:
            assert limit.left(now_ns) <= 0
            assert limit.left(ready_ns) >= 1, "when it said so, there is a token"
            now_ns = ready_ns
        limit.take(size, now_ns)
        taken += size
        # The last one may have been taken in advance.
        assert taken - size < burst + now_ns * rate // SECOND_NS + 1


def test_a_days_budget_is_never_exceeded_by_more_than_what_is_saved_up_and_one_slot() -> None:
    slot = 1000
    budget = WriteBudget(240_000)
    written = sum(budget.take(7, slot, minute * 60 * SECOND_NS) for minute in range(24 * 60))
    assert written * slot >= 240_000 and written * slot <= 240_000 + 10_000 + slot
    assert budget.take(1000, slot, 10 * DAY_NS) == 10, "days without evicts save up an hour's worth"


def test_slots_that_were_granted_and_not_reserved_are_given_back() -> None:
    budget = WriteBudget(24_000)
    assert budget.take(5, 1000, 0) == 1 and budget.take(5, 1000, 0) == 0
    budget.give_back(1, 1000)
    assert budget.take(5, 1000, 0) == 1


def test_a_slot_longer_than_what_is_saved_up_is_written_and_paid_for_later() -> None:
    budget = WriteBudget(24_000)
    assert budget.take(2, 5000, 0) == 1
    assert budget.take(2, 5000, 4 * DAY_NS // 24) == 0
    assert budget.take(2, 5000, 6 * DAY_NS // 24) == 1

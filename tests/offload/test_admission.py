"""What is over a limit is refused at once, with value, limit and a pause that fits; pure, over a clock of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.errors import InvalidRequest, LimitExceeded
from offloadd.offload.admission import LIMIT_NAMES, RETRY_S_MAX, RETRY_S_MIN, Admission, AdmissionLimits, Load
from offloadd.units import GIB, MIB

LIMITS = AdmissionLimits(
    requests_per_session_max=3,
    requests_max=5,
    blocks_in_flight_per_session_max=30,
    blocks_in_flight_max=50,
    bytes_in_flight_per_session_max=300 * MIB,
    bytes_in_flight_max=500 * MIB,
)
ONE = Load(1, 10, 10 * MIB)


def refusal(admission: Admission, session: str, load: Load, now_s: float = 0.0) -> LimitExceeded:
    before = admission.in_flight
    with pytest.raises(LimitExceeded) as caught:
        admission.enter(session, load, now_s)
    assert admission.in_flight == before, "a refused request was counted"
    return caught.value


@pytest.mark.parametrize(
    ("held", "asked", "has", "limit"),
    [
        ([("a", Load(1))] * 3, Load(1), "session a has 3 requests in flight, and the request brings 1", LIMIT_NAMES[0]),
        ([("b", Load(1))] * 3 + [("c", Load(1))] * 2, Load(1), "all sessions together have 5 requests in flight, and the request brings 1", LIMIT_NAMES[1]),
        ([("a", Load(1, 25))], Load(1, 6), "session a has 25 blocks in flight, and the request brings 6", LIMIT_NAMES[2]),
        ([("b", Load(1, 30)), ("c", Load(1, 10))], Load(1, 11), "all sessions together have 40 blocks in flight, and the request brings 11", LIMIT_NAMES[3]),
        ([("a", Load(1, 1, 200 * MIB))], Load(1, 1, 101 * MIB), "session a has 209715200 bytes in flight, and the request brings 105906176", LIMIT_NAMES[4]),
        (
            [("b", Load(1, 1, 300 * MIB)), ("c", Load(1, 1, 100 * MIB))],
            Load(1, 1, 101 * MIB),
            "all sessions together have 419430400 bytes in flight, and the request brings 105906176",
            LIMIT_NAMES[5],
        ),
    ],
    ids=LIMIT_NAMES,
)
def test_each_limit_refuses_with_value_and_limit_and_an_end_makes_room(held: list[tuple[str, Load]], asked: Load, has: str, limit: str) -> None:
    admission = Admission(LIMITS)
    for session, load in held:
        admission.enter(session, load, 0.0)
    assert str(refusal(admission, "a", asked)) == f"{has}; {limit} is {getattr(LIMITS, limit)}; repeat after a pause"
    assert admission.refused == {limit: 1}
    session, load = held[0]
    admission.leave(session, load, 1.0)
    admission.enter("a", asked, 1.0)
    admission.check()


@pytest.mark.parametrize(("load", "limit"), [(Load(1, 31, 1), "blocks_in_flight_per_session_max"), (Load(1, 1, 301 * MIB), "bytes_in_flight_per_session_max")])
def test_a_request_that_no_pause_can_help_is_told_so(load: Load, limit: str) -> None:
    admission = Admission(LIMITS)
    admission.enter("a", ONE, 0.0)
    with pytest.raises(InvalidRequest, match=f"{limit} is .*: ask for less at a time") as caught:
        admission.enter("a", load, 0.0)
    assert caught.value.retry_after_s is None


def test_what_is_asked_before_a_request_is_made_changes_nothing() -> None:
    admission = Admission(LIMITS)
    for _ in range(10):
        admission.refuse("a", Load(1, 30, 300 * MIB), 0.0)
    assert admission.in_flight == Load() and not admission.refused


def test_the_pause_is_the_time_in_which_enough_ends_at_the_rate_of_late() -> None:
    admission = Admission(LIMITS)
    # 100 MiB end every tenth of a second: 1,000 MiB a second.
    for tenth in range(100):
        admission.enter("b", Load(1, 1, 100 * MIB), tenth / 10)
        admission.leave("b", Load(1, 1, 100 * MIB), tenth / 10 + 0.1)
    for session in ("b", "c"):
        admission.enter(session, Load(1, 1, 250 * MIB), 10.0)
    pause_s = refusal(admission, "d", Load(1, 1, 200 * MIB), 10.0).retry_after_s
    assert pause_s == pytest.approx(0.2, rel=0.2), "200 MiB too much, at 1,000 MiB a second"
    # A session whose limit is in the way gets its part of what ends: half of what is in flight is its own.
    pause_s = refusal(admission, "b", Load(1, 1, 100 * MIB), 10.0).retry_after_s
    assert pause_s == pytest.approx(2 * 0.05, rel=0.2), "50 MiB too much, at half of 1,000 MiB a second"


def test_the_pause_stays_within_bounds_whatever_was_measured() -> None:
    admission = Admission(LIMITS)
    for session in ("b", "c"):
        admission.enter(session, Load(1, 1, 250 * MIB), 0.0)
    assert refusal(admission, "d", Load(1, 1, 100 * MIB), 0.0).retry_after_s == LimitExceeded.retry_after_s, "nothing has ended yet"
    admission.leave("b", Load(1, 1, 250 * MIB), 0.001)
    admission.enter("b", Load(1, 1, 250 * MIB), 0.001)
    assert refusal(admission, "d", Load(1, 1, MIB), 0.001).retry_after_s == RETRY_S_MIN
    assert refusal(admission, "d", Load(1, 1, 300 * MIB), 1000.0).retry_after_s == RETRY_S_MAX, "nothing ends any more"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12), st.integers(0, 120), st.booleans()), max_size=60))
def test_what_is_in_flight_is_never_more_than_the_limits(steps: list[tuple[str, int, int, bool]]) -> None:
    admission = Admission(LIMITS)
    held: list[tuple[str, Load]] = []
    for number, (session, blocks, mebibytes, ends) in enumerate(steps):
        if ends and held:
            admission.leave(*held.pop(0), float(number))
            continue
        load = Load(1, blocks, mebibytes * MIB)
        try:
            admission.enter(session, load, float(number))
            held.append((session, load))
        except LimitExceeded as error:
            assert error.retry_after_s is not None and RETRY_S_MIN <= error.retry_after_s <= RETRY_S_MAX
        admission.check()
        assert admission.in_flight.requests <= 5 and admission.in_flight.blocks <= 50 and admission.in_flight.bytes <= 500 * MIB
        for one in "abc":
            mine = admission.of(one)
            assert mine.requests <= 3 and mine.blocks <= 30 and mine.bytes <= 300 * MIB


def test_the_default_limits_let_in_the_sequence_of_a_large_model() -> None:
    from offloadd.config import LimitsConfig

    limits = LimitsConfig()
    # 131,072 tokens of a model with 80 layers, 8 KV heads of 128 and 2 bytes: 320 KiB a token, 16 tokens a block.
    sequence = Load(1, 131_072 // 16, 131_072 * 320 * 1024)
    assert sequence.bytes == 40 * GIB and sequence.blocks <= limits.blocks_per_request_max
    admission = Admission(AdmissionLimits(**{name: getattr(limits, name) for name in LIMIT_NAMES}))
    admission.enter("a", sequence, 0.0)
    admission.enter("b", sequence, 0.0)

"""Keeps and leases: whose they are, and when they end."""

import numpy as np
import pytest

from offloadd.catalog import holds as holds_module
from offloadd.catalog.holds import RECOVERED, Holds

from .world import rows_array


@pytest.fixture
def counts() -> "np.ndarray[tuple[int], np.dtype[np.uint16]]":
    return np.zeros(100, dtype=np.uint16)


@pytest.fixture
def holds(counts: "np.ndarray[tuple[int], np.dtype[np.uint16]]") -> Holds:
    return Holds(counts)


def held(holds: Holds) -> list[int]:
    holds.check()
    return np.flatnonzero(holds._counts).tolist()


def test_a_later_expiry_extends_a_hold_and_an_earlier_one_does_not_shorten_it(holds: Holds) -> None:
    holds.hold(1, rows_array(5, 6), 10.0)
    holds.hold(1, rows_array(5), 20.0)
    holds.hold(1, rows_array(5), 3.0)
    assert holds.expire(10.0) == 1 and held(holds) == [5]
    assert holds.expire(19.9) == 0
    assert holds.expire(20.0) == 1 and held(holds) == []


def test_two_holders_of_a_row_and_the_release_of_one_keeps_the_others(holds: Holds) -> None:
    holds.hold(1, rows_array(5), 10.0)
    holds.hold(2, rows_array(5), 30.0)
    assert holds.release(1, rows_array(5)) == 1 and held(holds) == [5]
    assert holds.release(1, rows_array(5)) == 0 and held(holds) == [5]
    assert holds.expire(10.0) == 0 and held(holds) == [5], "the released hold's expiry is not the other's"
    assert holds.release_all(2) == 1 and held(holds) == []


def test_a_hold_that_was_released_and_taken_again_lives_its_own_time(holds: Holds) -> None:
    holds.hold(1, rows_array(5), 10.0)
    holds.release(1, rows_array(5))
    holds.hold(1, rows_array(5), 40.0)
    assert holds.expire(10.0) == 0 and held(holds) == [5]


def test_a_row_named_twice_is_held_once_and_expires_once(holds: Holds) -> None:
    holds.hold(1, rows_array(5, 5, 5), 10.0)
    assert holds.held_count == 1
    assert holds.expire(10.0) == 1 and held(holds) == []
    holds.hold(1, rows_array(7, 7), 10.0)
    assert holds.release(1, rows_array(7, 7)) == 1 and held(holds) == []


def test_recovered_holds_are_claimed_by_whoever_names_them(holds: Holds) -> None:
    holds.hold(RECOVERED, rows_array(5, 6), 10.0)
    holds.claim(1, rows_array(4, 5), 50.0)
    assert held(holds) == [5, 6], "only what was recovered passes over"
    assert holds.expire(10.0) == 1 and held(holds) == [5]
    holds.claim(2, rows_array(5), 90.0)
    assert holds.release(2, rows_array(5)) == 0, "an instance's hold is not another's to claim"


def test_holds_end_with_their_row(holds: Holds) -> None:
    for holder in range(4):
        holds.hold(holder, rows_array(5, 6), 10.0 + holder)
    holds.forget(rows_array(5, 9))
    assert held(holds) == [6] and holds.held_count == 4
    holds.hold(7, rows_array(5), 99.0)
    assert holds.expire(20.0) == 4 and held(holds) == [5], "old expiries do not end a new block's hold"


def test_many_holds_that_end_at_once_end_in_portions(holds: Holds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds_module, "EXPIRY_ROWS", 10)
    for first in range(1, 91, 5):
        holds.hold(1, np.arange(first, first + 5, dtype=np.uint32), 10.0)
    assert not holds.due(9.9)
    ended = []
    while holds.due(10.0):
        ended.append(holds.expire(10.0))
        holds.check()
    assert ended == [10] * 9 and held(holds) == []


def test_leases_that_are_renewed_for_ever_do_not_grow(holds: Holds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds_module, "STALE_ROWS_MAX", 20)
    for second in range(1000):
        holds.hold(1, rows_array(*range(10)), 100.0 + second)
        assert sum(rows.shape[0] for *_, rows in holds._expiries) <= 2 * 10 + 20
    assert held(holds) == list(range(10))
    assert holds.expire(1098.9) == 0
    assert holds.expire(1099.0) == 10 and held(holds) == []


def test_a_rebuilt_expiry_ends_no_hold_early_and_each_within_a_second(holds: Holds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds_module, "STALE_ROWS_MAX", 0)
    for _ in range(3):
        for row in range(50):
            holds.hold(1, rows_array(row), 10.0 + row * 0.1)
    for tenth in range(0, 60):
        holds.expire(10.0 + tenth * 0.1)
        alive = set(held(holds))
        assert {row for row in range(50) if row * 0.1 > tenth * 0.1 + 1e-9} <= alive
        assert not {row for row in alive if row * 0.1 + 1.0 < tenth * 0.1}

"""Blocks that no request moved are never counted as moved by a benchmark."""

import pytest

from bench.support.outcomes import not_moved
from offloadd.client import EvictOutcome, EvictResult, EvictStatus, Reason, RestoreOutcome, RestoreResult, RestoreStatus, StageTimes, Tier


def evicted(*statuses: EvictStatus) -> EvictResult:
    return EvictResult(tuple(EvictOutcome(status, Reason.NONE, Tier.VOLUME) for status in statuses), (), StageTimes())


@pytest.mark.parametrize("status", [status for status in EvictStatus if status is not EvictStatus.STORED])
def test_only_a_block_that_this_evict_stored_was_moved(status: EvictStatus) -> None:
    assert not_moved(evicted(EvictStatus.STORED, EvictStatus.STORED)) == ""
    assert not_moved(evicted(EvictStatus.STORED, status, status)) == f"2 of 3 blocks were not stored: {status.name}, NONE"
    assert (not_moved(evicted(status), or_there=True) == "") is (status is EvictStatus.DUPLICATE)


@pytest.mark.parametrize("status", [status for status in RestoreStatus if status is not RestoreStatus.RESTORED])
def test_only_a_block_whose_destination_is_good_was_restored(status: RestoreStatus) -> None:
    bad = RestoreOutcome(status, Reason.WRONG_PATH, Tier.ANY)
    assert not_moved(RestoreResult((bad,), (), StageTimes())) == f"1 of 1 blocks were not restored: {status.name}, WRONG_PATH"
    assert not_moved(RestoreResult((RestoreOutcome(RestoreStatus.RESTORED, Reason.NONE, Tier.ANY),), (), StageTimes())) == ""

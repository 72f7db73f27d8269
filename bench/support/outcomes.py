"""What answers of the daemon say of their blocks, for benchmarks: none of them counts a block that was not moved."""

from offloadd.client import EvictResult, EvictStatus, RestoreResult


def not_moved(answer: EvictResult | RestoreResult, *, or_there: bool = False) -> str:
    """How many blocks were not stored by this evict, or not restored, and why the first was not; empty if all were.

    A duplicate moved no byte: it is good enough only for who wants blocks to be there (`or_there`).
    """
    if isinstance(answer, EvictResult):
        good = (EvictStatus.STORED, EvictStatus.DUPLICATE) if or_there else (EvictStatus.STORED,)
        bad, verb = [(one.status.name, one.reason.name) for one in answer.outcomes if one.status not in good], "stored"
    else:
        bad, verb = [(one.status.name, one.reason.name) for one in answer.outcomes if not one.restored], "restored"
    return f"{len(bad)} of {len(answer.outcomes)} blocks were not {verb}: {', '.join(bad[0])}" if bad else ""

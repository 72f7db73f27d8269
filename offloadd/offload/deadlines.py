"""Deadlines of calls: on the monotonic clock, and none is waited beyond."""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from offloadd import clock
from offloadd.errors import DeadlineExpired

T = TypeVar("T")


def refuse_expired(deadline_s: float) -> None:
    """Raise `DeadlineExpired` for work whose deadline has passed: it is not started."""
    late_s = clock.monotonic_s() - deadline_s
    if late_s >= 0:
        raise DeadlineExpired(f"the deadline passed {late_s * 1000:.0f} ms before the request was started")


async def result_by(deadline_s: float, future: "asyncio.Future[T]", late: str) -> T:
    """The result of work that goes on whether or not it is waited for. Raises `DeadlineExpired`, with `late`, if it is not there at the deadline."""
    done, _ = await asyncio.wait({future}, timeout=max(0.0, deadline_s - clock.monotonic_s()))
    if not done:
        raise DeadlineExpired(late)
    return future.result()


async def first_of(events: Sequence[asyncio.Event], timeout_s: float | None) -> bool:
    """Wait until one event is set; False if none was in time."""
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for waiter in waiters:
            waiter.cancel()

"""How many requests, blocks and bytes are let in at once, by session and in all.

What is over a limit is refused at once: there is no queue before this door. `refuse` asks before a request costs anything; `enter` counts it.
"""

import math
from collections import Counter
from dataclasses import dataclass

from offloadd.errors import InvalidRequest, LimitExceeded

#: What ended longer ago than this says little about how soon there is room.
RATE_WINDOW_S = 2.0
#: Bounds of the hint when to repeat. Sooner is a busy loop; later would leave room unused that came unexpectedly.
RETRY_S_MIN = 0.02
RETRY_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The limits, by their names in the configuration. Bytes are payload bytes that requests in flight name, moved yet or not."""

    requests_per_session_max: int
    requests_max: int
    blocks_in_flight_per_session_max: int
    blocks_in_flight_max: int
    bytes_in_flight_per_session_max: int
    bytes_in_flight_max: int


@dataclass(frozen=True, slots=True)
class Load:
    """What one request brings, or several have brought."""

    requests: int = 0
    blocks: int = 0
    bytes: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(self.requests + other.requests, self.blocks + other.blocks, self.bytes + other.bytes)

    def __sub__(self, other: "Load") -> "Load":
        return Load(self.requests - other.requests, self.blocks - other.blocks, self.bytes - other.bytes)


#: What is counted, and the limits of a session and of all together.
_LIMITS = (
    ("requests", "requests_per_session_max", "requests_max"),
    ("blocks", "blocks_in_flight_per_session_max", "blocks_in_flight_max"),
    ("bytes", "bytes_in_flight_per_session_max", "bytes_in_flight_max"),
)
LIMIT_NAMES = tuple(name for _, *names in _LIMITS for name in names)


class Admission:
    """Counts what is in flight. Times are seconds of the caller's monotonic clock."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.in_flight = Load()
        #: Refusals by the limit that was in the way.
        self.refused: Counter[str] = Counter()
        self._by_session: dict[str, Load] = {}
        self._ended = {what: _Rate() for what, *_ in _LIMITS}

    def enter(self, session: str, load: Load, now_s: float) -> None:
        """Let a request in, or raise as `refuse`."""
        self.refuse(session, load, now_s)
        self.in_flight += load
        self._by_session[session] = self.of(session) + load

    def refuse(self, session: str, load: Load, now_s: float) -> None:
        """Raise unless there is room: `LimitExceeded`, with the pause after which there may well be, or `InvalidRequest` where there never will be."""
        mine = self.of(session)
        for what, of_session, of_all in _LIMITS:
            # The narrower limit first: it is what the caller can do something about.
            for limit, whose, held in ((of_session, f"session {session} has", mine), (of_all, "all sessions together have", self.in_flight)):
                most, before, more = getattr(self.limits, limit), getattr(held, what), getattr(load, what)
                if before + more <= most:
                    continue
                self.refused[limit] += 1
                if more > most:
                    raise InvalidRequest(f"the request names {more} {what}; {limit} is {most}: ask for less at a time")
                error = LimitExceeded(f"{whose} {before} {what} in flight, and the request brings {more}; {limit} is {most}; repeat after a pause")
                # Of what ends, the share of these is as large as of what is in flight.
                times = getattr(self.in_flight, what) / before
                error.retry_after_s = self._ended[what].time_for(times * (before + more - most), now_s)
                raise error

    def leave(self, session: str, load: Load, now_s: float) -> None:
        """A request that was let in was answered."""
        self.in_flight -= load
        left = self._by_session[session] - load
        if left.requests:
            self._by_session[session] = left
        else:
            del self._by_session[session]
        for what, rate in self._ended.items():
            rate.add(getattr(load, what), now_s)

    def of(self, session: str) -> Load:
        """What the session has in flight."""
        return self._by_session.get(session, Load())

    def check(self) -> None:
        """Assert that the sums are right."""
        total = Load()
        for load in self._by_session.values():
            assert load.requests > 0 and load.blocks >= 0 and load.bytes >= 0
            total += load
        assert total == self.in_flight


class _Rate:
    """How much a second has ended lately."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._first_s = math.inf
        self._last_s = 0.0

    def add(self, amount: int, now_s: float) -> None:
        self._sum = self._left(now_s) + amount
        self._first_s, self._last_s = min(self._first_s, now_s), now_s

    def time_for(self, amount: float, now_s: float) -> float:
        """Seconds in which so much more will have ended if it goes on as lately."""
        if self._first_s == math.inf:
            # Nothing has ended yet; some requests of tens of milliseconds will have.
            return LimitExceeded.retry_after_s or RETRY_S_MIN
        # As long as less than a window was seen the sum lacks what would have come before.
        seen = 1 - math.exp(-max(now_s - self._first_s, RETRY_S_MIN) / RATE_WINDOW_S)
        rate = self._left(now_s) / (RATE_WINDOW_S * seen)
        return min(RETRY_S_MAX, max(RETRY_S_MIN, amount / rate if rate else RETRY_S_MAX))

    def _left(self, now_s: float) -> float:
        return self._sum * math.exp(-(now_s - self._last_s) / RATE_WINDOW_S)

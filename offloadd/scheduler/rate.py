"""A limit of bytes over time, as a bucket of tokens; the time is an argument."""

SECOND_NS = 1_000_000_000
DAY_NS = 86_400 * SECOND_NS
#: Of a day's budget what may be saved up: some hours without evicts must not let a burst of as many follow, and a restart gives no more than this.
_BUDGET_BURSTS = 24


class TokenBucket:
    """`burst_bytes` at once, and `bytes_per_period` in every `period_ns` in the long run. Full at its first use. Time that goes back counts as none."""

    def __init__(self, *, bytes_per_period: int, period_ns: int, burst_bytes: int) -> None:
        self._rate = bytes_per_period
        self._period_ns = period_ns
        self._burst_bytes = burst_bytes
        self._tokens = burst_bytes
        #: Tokens up to this time are in `_tokens`; the rest of the last one is not lost.
        self._at_ns = -1

    def _fill(self, now_ns: int) -> None:
        if self._at_ns < 0:
            self._at_ns = now_ns
        grown = max(0, now_ns - self._at_ns) * self._rate // self._period_ns
        if grown and self._tokens + grown >= self._burst_bytes:
            self._tokens, self._at_ns = self._burst_bytes, now_ns
        elif grown:
            self._tokens += grown
            # Rounded up: never a token too many.
            self._at_ns += -(-grown * self._period_ns // self._rate)

    def left(self, now_ns: int) -> int:
        """Bytes that may be taken now; below 0 what was taken in advance."""
        self._fill(now_ns)
        return self._tokens

    def take(self, size_bytes: int, now_ns: int) -> None:
        """Take so many, in advance if need be: whoever may do so asks `left` or `ready_ns` first."""
        self._fill(now_ns)
        self._tokens -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """What was taken and not used."""
        self._tokens = min(self._burst_bytes, self._tokens + size_bytes)

    def ready_ns(self, now_ns: int) -> int:
        """When there is a token: now, or later."""
        left = self.left(now_ns)
        return now_ns if left > 0 else max(now_ns + 1, self._at_ns + -(-(1 - left) * self._period_ns // self._rate))


class WriteBudget:
    """Bytes that a volume may write a day, in slots. After a start there is 1/24 of them: what was written before it is not known."""

    def __init__(self, bytes_per_day: int) -> None:
        self._tokens = TokenBucket(bytes_per_period=bytes_per_day, period_ns=DAY_NS, burst_bytes=-(-bytes_per_day // _BUDGET_BURSTS))

    def take(self, count: int, slot_bytes: int, now_ns: int) -> int:
        """Of `count` slots how many may be written; they count as written. The last one may take in advance what comes later."""
        granted = min(count, -(-max(0, self._tokens.left(now_ns)) // slot_bytes))
        self._tokens.take(granted * slot_bytes, now_ns)
        return granted

    def give_back(self, count: int, slot_bytes: int) -> None:
        """So many were not written after all."""
        self._tokens.give_back(count * slot_bytes)

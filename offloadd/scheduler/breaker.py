"""Whether a volume gets jobs of one direction, from what became of those before: a circuit breaker over a clock that its caller holds.

closed ──failures in a row, or trip──▶ open ──a good probe, `pause_ns` after it opened──▶ half-open
  ▲                                     ▲                                                   │  │
  │                                     └────────────────a failure, or trip─────────────────┘  │
  └─────────────────────────────────────────────a success─────────────────────────────────────┘

The pause doubles whenever it opens from half-open, and begins anew once it has closed.
"""

from enum import Enum


class BreakerState(Enum):
    """CLOSED: jobs go. OPEN: none does. HALF_OPEN: they do, and the first result decides."""

    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


class Breaker:
    """One breaker. Results of jobs that were sent before it opened may come at any time, and do not turn it while it is open."""

    def __init__(self, *, failures_max: int, pause_ns: int, pause_ns_max: int) -> None:
        self._failures_max = failures_max
        self._pause_ns_first = pause_ns
        self._pause_ns_max = pause_ns_max
        self._pause_ns = pause_ns
        self._failures = 0
        self._opened_ns = 0
        self.state = BreakerState.CLOSED
        #: Why it opened; empty while it is closed.
        self.reason = ""
        #: How often it has.
        self.opened_count = 0

    def __str__(self) -> str:
        return f"{self.state.value}: {self.reason}" if self.reason else self.state.value

    @property
    def admits(self) -> bool:
        """Whether new jobs may be sent."""
        return self.state is not BreakerState.OPEN

    def succeeded(self) -> None:
        """A job ended well."""
        self._failures = 0
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.CLOSED
            self.reason = ""
            self._pause_ns = self._pause_ns_first

    def failed(self, now_ns: int, why: str) -> None:
        """A job failed by the volume's fault."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or self._failures >= self._failures_max:
            self.trip(now_ns, why)

    def trip(self, now_ns: int, why: str) -> None:
        """It is known that jobs would not end well."""
        if self.state is BreakerState.OPEN:
            return
        if self.state is BreakerState.HALF_OPEN:
            self._pause_ns = min(2 * self._pause_ns, self._pause_ns_max)
        self.state = BreakerState.OPEN
        self.reason = why
        self.opened_count += 1
        self._opened_ns = now_ns

    def probed(self, now_ns: int) -> None:
        """The volume answered a probe, and nothing that was sent to it is late."""
        if self.state is BreakerState.OPEN and now_ns - self._opened_ns >= self._pause_ns:
            self.state = BreakerState.HALF_OPEN
            self._failures = 0

"""When a mover is taken to be wedged, and what is done with it then: a state machine over a clock that its caller holds.

well ──asked──▶ asked ──silent for `wedged_ns`, or its lane to the arena stands still as long──▶ closing ──it says so──▶ closed: superseded, killed last
  ▲───answers────┘                                                                                  └──not in `closing_ns`──▶ killed; superseded once it is lost

Closing comes first, since a mover that says that it has closed its mappings proves that no byte of engine memory is touched later; one that was killed only
does once nothing of it can run. A volume that hangs is no reason: it stands still in its own lane, and the control thread answers.
"""

from enum import Enum

#: Between two questions.
PING_PERIOD_NS = 1_000_000_000
#: What counts of the time between two looks: a front that was stopped, or a machine that was, has not seen anybody be silent.
LOOK_NS_MAX = 1_000_000_000


class Step(Enum):
    """What is to be done now."""

    NOTHING = "nothing"
    PING = "ping"
    CLOSE = "close"
    SUPERSEDE = "supersede"
    KILL = "kill"


class Phase(Enum):
    """Where a process stands."""

    WELL = "well"
    ASKED = "asked"
    CLOSING = "closing"
    CLOSED = "closed"
    KILLED = "killed"


class Supervision:
    """Of one process after the other; `started` begins anew."""

    def __init__(self, *, wedged_ns: int, closing_ns: int) -> None:
        """`wedged_ns`: how long it may be silent, or stand still. `closing_ns`: how long it may take to close its mappings."""
        self._wedged_ns = wedged_ns
        self._closing_ns = closing_ns
        self.phase = Phase.WELL
        #: Why it is being replaced; empty while it is not.
        self.reason = ""
        self._looked_ns = 0
        #: In this phase, and how long its copies have stood still, as far as it was watched.
        self._spent_ns = 0
        self._stood_ns = 0

    def started(self, now_ns: int) -> None:
        """A fresh process is there."""
        self._enter(Phase.WELL)
        self.reason = ""
        self._looked_ns = now_ns
        self._stood_ns = 0

    def answered(self) -> None:
        """It has answered the question. Too late once it was told to close its mappings: it has no region any more."""
        if self.phase is Phase.ASKED:
            self._enter(Phase.WELL)

    def closed(self) -> None:
        """It has closed its mappings."""
        if self.phase is Phase.CLOSING:
            self._enter(Phase.CLOSED)

    @property
    def silent_ns(self) -> int:
        """How long a question has not been answered."""
        return self._spent_ns if self.phase is Phase.ASKED else 0

    def look(self, now_ns: int, *, stalled_ns: int = 0) -> Step:
        """The next step. `stalled_ns`: how long its lane to the arena has stood still, with work in it that waits for nobody."""
        watched_ns = min(max(0, now_ns - self._looked_ns), LOOK_NS_MAX)
        self._looked_ns = now_ns
        self._spent_ns += watched_ns
        self._stood_ns = min(stalled_ns, self._stood_ns + watched_ns)
        match self.phase:
            case Phase.WELL | Phase.ASKED if self._stood_ns >= self._wedged_ns:
                return self._close(f"its copies have stood still for {stalled_ns / 1e9:.0f} s")
            case Phase.WELL if self._spent_ns >= PING_PERIOD_NS:
                self._enter(Phase.ASKED)
                return Step.PING
            case Phase.ASKED if self._spent_ns >= self._wedged_ns:
                return self._close(f"it has not answered for {self._spent_ns / 1e9:.0f} s")
            case Phase.CLOSED:
                self._enter(Phase.KILLED)
                return Step.SUPERSEDE
            case Phase.CLOSING if self._spent_ns >= self._closing_ns:
                self._enter(Phase.KILLED)
                return Step.KILL
        return Step.NOTHING

    def _close(self, why: str) -> Step:
        self.reason = why
        self._enter(Phase.CLOSING)
        return Step.CLOSE

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._spent_ns = 0

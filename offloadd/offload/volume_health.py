"""Whether one volume gets reads and writes: a breaker for each, and what turns them.

What counts against the volume: writes that fail one after the other; a lane that stands still although its mover answers; a probe that fails or is not answered
in time. Reads that fail, requests that its keeper does not answer, and the lane of a GPU that stands still only raise the suspicion that makes a probe: they
may be the fault of a few bad sectors, or of something between.
"""

from collections.abc import Callable
from dataclasses import dataclass

from offloadd import clock
from offloadd.scheduler.breaker import Breaker, BreakerState


@dataclass(frozen=True, slots=True)
class HealthOptions:
    """What the configuration says of it; seconds and counts."""

    #: How long I/Os may be in flight without one of them ending.
    late_s: float = 5.0
    #: Failed writes in a row.
    failures_max: int = 8
    probe_interval_s: float = 1.0
    #: How long a probe may take.
    probe_wait_s: float = 2.0
    #: Of slots whose I/O was left behind by movers that are lost: with more of them the volume is not tried again.
    quarantined_bytes_max: int = 256 << 20


#: Most of the pauses before a volume is tried again. With a probe's interval and time it bounds how long one that is well again is not used.
PAUSE_MAX_S = 4.0


class VolumeHealth:
    """Event-loop owned. `on_turn()` is called whenever a breaker has changed its state."""

    def __init__(self, options: HealthOptions, on_turn: Callable[[], None]) -> None:
        self.options = options
        pause_ns = int(options.probe_interval_s * 1e9)
        pause_ns_max = max(pause_ns, int(PAUSE_MAX_S * 1e9))
        self.reads, self.writes = (Breaker(failures_max=options.failures_max, pause_ns=pause_ns, pause_ns_max=pause_ns_max) for _ in range(2))
        #: A probe is to tell whether the volume is well.
        self.suspected = False
        #: Something that was sent is late, or too much is in quarantine: a probe that went well does not count.
        self.stalled = False
        self._on_turn = on_turn
        self._told = self._states()

    def on_io(self, writes: bool, good: bool) -> None:
        """A slice was read or written, or was not."""
        if not writes:
            self.suspected |= not good
            return
        if good:
            self.writes.succeeded()
        else:
            self.writes.failed(clock.monotonic_ns(), "writes failed, one after the other")
        self._tell()

    def suspect(self) -> None:
        """Something may be wrong with the volume: have it probed."""
        self.suspected = True

    def stand_still(self, stalled_s: float) -> None:
        """Nothing that is in flight moves."""
        self._trip(f"I/O has been in flight for {stalled_s:.1f} s and none ended")

    def overfull(self, slot_bytes: int) -> None:
        """So much is in quarantine that nothing more is sent to the volume until some of it is over."""
        self._trip(f"slots of {slot_bytes} bytes wait for I/O of movers that are lost; quarantined_bytes_max is {self.options.quarantined_bytes_max}")

    def probed(self, failure: str) -> None:
        """A probe went well (`failure` empty), or why not."""
        self.suspected = False
        if failure:
            self._trip(failure)
        elif not self.stalled:
            now_ns = clock.monotonic_ns()
            self.reads.probed(now_ns)
            self.writes.probed(now_ns)
            # The probe is a read; of writes only the next one tells.
            self.reads.succeeded()
            self._tell()

    @property
    def wants_probe(self) -> bool:
        """Whether a probe would tell anything."""
        return self.suspected or not (self.reads.admits and self.writes.admits)

    def _trip(self, why: str) -> None:
        now_ns = clock.monotonic_ns()
        self.reads.trip(now_ns, why)
        self.writes.trip(now_ns, why)
        self._tell()

    def _states(self) -> tuple[BreakerState, BreakerState]:
        return self.reads.state, self.writes.state

    def _tell(self) -> None:
        states = self._states()
        if states != self._told:
            self._told = states
            self._on_turn()

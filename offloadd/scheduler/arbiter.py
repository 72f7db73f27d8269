"""Which class may send next, over all lanes of one volume: a restore on any of them holds the evicts of all of them back.

Restores start at once. Everything below them starts while none of them waits or runs, save a minimum share, counted in bytes; and while restores are about, one
slice of it at a time, so that a restore waits for one slice at most. The arena's lanes have an arbiter each: they share no device.

A lane that stands still (its mover hangs, or its way to the volume) holds up no other for longer than STALLED_NS.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offloadd.scheduler.job_class import BACKGROUND, EVICTS, INTERACTIVE, PREEMPT, SPILL, JobClass, Precedence
from offloadd.scheduler.rate import TokenBucket

#: Restores are about for so long after the last one: the next one finds one slice of evicts in its way, and not the whole window.
QUIET_NS = 1_000_000_000
#: A job that has been in flight for so long stands still; a slice takes milliseconds.
STALLED_NS = 5_000_000_000


@dataclass(eq=False, slots=True)
class Running:
    """A job that was sent. `on_stalled` is called once when it stands still. `counted`: its bytes are in flight; the arbiter's."""

    job_class: JobClass
    size_bytes: int
    on_stalled: Callable[[], None]
    counted: bool = False
    stalled: bool = False
    over: bool = False


class Arbiter:
    """`slice_bytes`: what may be in flight of evicts (and as much of prefetches) while restores are about; else `bytes_in_flight`. `evict_rate` limits what is
    written.

    Its lanes tell what waits (`enter`, `leave`) and what is in flight (`start` to `finish`), and ask `allows` before they send.
    """

    def __init__(self, precedence: Precedence, *, slice_bytes: int, bytes_in_flight: int, evict_rate: TokenBucket | None = None) -> None:
        self._order = precedence.order
        self._shares = precedence.shares
        self._above = [precedence.above(one) for one in JobClass]
        self._below = [precedence.below(one) for one in JobClass]
        #: These yield to restores that run, too, and are slices beside them.
        self._yields = [INTERACTIVE in above for above in self._above]
        self._slice_bytes = slice_bytes
        self._bytes_in_flight = bytes_in_flight
        self._evict_rate = evict_rate
        #: By class: tickets that wait, bytes in flight, and bytes that it may send by its share, though others go before it.
        self._waiting = [0] * len(JobClass)
        self._in_flight = [0] * len(JobClass)
        self._owed = [0] * len(JobClass)
        #: Saved up at most: after a long time of restores evicts would else come between all of the next ones.
        self._owed_bytes_max = 2 * slice_bytes
        #: By class: which start was its last.
        self._started = [0] * len(JobClass)
        self._starts = 0
        #: Something below restores was sent by its share, and no restore since: two in a row would be two slices to wait for.
        self._gave_way = False
        self._restored_ns = -QUIET_NS - 1
        self._blocked: dict[Callable[[], None], None] = {}
        #: What was sent, and when; what is over leaves it from the front.
        self._sent: deque[tuple[int, Running]] = deque()
        self._now_ns = 0

    # -- what lanes tell -------------------------------------------------------------------------------------------------------------

    def enter(self, job_class: JobClass) -> None:
        """One more ticket waits."""
        self._waiting[job_class] += 1

    def leave(self, job_class: JobClass) -> None:
        """One does not wait any more."""
        self._waiting[job_class] -= 1
        assert self._waiting[job_class] >= 0, "more tickets left than came"
        if not self._waiting[job_class]:
            # Nothing is saved up, and what it took in advance stands.
            self._owed[job_class] = min(0, self._owed[job_class])

    def start(self, running: Running, now_ns: int) -> None:
        """A job is sent, which `allows` has allowed."""
        job_class, size_bytes = running.job_class, running.size_bytes
        if self._is_held(job_class):
            self._owed[job_class] -= size_bytes
            self._gave_way |= self._yields[job_class]
        else:
            self._owed[job_class] = 0
        if job_class == INTERACTIVE:
            self._gave_way = False
        for other in self._below[job_class]:
            if self._waiting[other]:
                self._owed[other] = min(self._owed[other] + size_bytes // self._shares[other], self._owed_bytes_max)
        if job_class in EVICTS and self._evict_rate is not None:
            self._evict_rate.take(size_bytes, now_ns)
        self._starts += 1
        self._started[job_class] = self._starts
        self._now_ns = now_ns
        self.resume(running)

    def pause(self, running: Running) -> None:
        """It is not in flight for a time: it waits for its engine."""
        if running.counted:
            running.counted = False
            self._in_flight[running.job_class] -= running.size_bytes

    def resume(self, running: Running) -> None:
        """It is in flight again, whether or not there is room."""
        if not running.stalled:
            running.counted = True
            self._in_flight[running.job_class] += running.size_bytes
            self._sent.append((self._now_ns, running))

    def finish(self, running: Running) -> None:
        """It is over."""
        self.pause(running)
        running.over = True

    # -- what lanes ask --------------------------------------------------------------------------------------------------------------

    def look(self, now_ns: int) -> None:
        """The time has come to this; before each round of `allows`."""
        self._now_ns = now_ns
        sent = self._sent
        while sent and (sent[0][1].over or sent[0][0] + STALLED_NS <= now_ns):
            _, running = sent.popleft()
            if running.counted:
                self.pause(running)
                running.stalled = True
                running.on_stalled()
        if self._waiting[INTERACTIVE] or self._in_flight[INTERACTIVE]:
            self._restored_ns = now_ns

    def turns(self) -> Iterable[JobClass]:
        """The classes in the order in which they are to be tried: those that their share owes most, then by precedence."""
        if max(self._owed) <= 0:
            return self._order
        due = [job_class for job_class in self._order if self._owed[job_class] > 0]
        # Not the one that comes first in the order: where all that is written shares a slot, that one would take every turn.
        due.sort(key=lambda job_class: (-self._owed[job_class], self._started[job_class]))
        return (*due, *self._order)

    def is_quiet(self, now_ns: int) -> bool:
        """Whether no restore is about."""
        return now_ns - self._restored_ns > QUIET_NS

    def portion_bytes(self, job_class: JobClass, longest_bytes: int, now_ns: int) -> int:
        """How long a portion of this class may be now."""
        return longest_bytes if not self._yields[job_class] or self.is_quiet(now_ns) else min(longest_bytes, self._slice_bytes)

    def allows(self, job_class: JobClass, size_bytes: int, now_ns: int) -> bool:
        """Whether the class may send so many bytes now."""
        if self._is_held(job_class) and not self._is_due(job_class, size_bytes):
            return False
        if job_class == INTERACTIVE:
            return True
        return self._fits(job_class, size_bytes, now_ns) and self._rate_ns(job_class, now_ns) <= now_ns

    def wake_ns(self, job_class: JobClass, now_ns: int) -> int:
        """When to ask again for a class that was refused, though nothing happens until then; 0 if only an event can help."""
        rate_ns = self._rate_ns(job_class, now_ns)
        if rate_ns > now_ns:
            return rate_ns
        return self._sent[0][0] + STALLED_NS if self._sent else 0

    def _rate_ns(self, job_class: JobClass, now_ns: int) -> int:
        """When the limit of what is written lets this class send: now, or later."""
        return self._evict_rate.ready_ns(now_ns) if job_class in EVICTS and self._evict_rate is not None else now_ns

    def _is_held(self, job_class: JobClass) -> bool:
        """Whether something goes before it."""
        for one in self._above[job_class]:
            if self._waiting[one]:
                return True
        return self._yields[job_class] and self._in_flight[INTERACTIVE] > 0

    def _is_due(self, job_class: JobClass, size_bytes: int) -> bool:
        """Whether it may go by its share all the same."""
        if self._gave_way and self._yields[job_class] and self._waiting[INTERACTIVE]:
            return False
        return self._owed[job_class] >= min(size_bytes, self._owed_bytes_max)

    def _fits(self, job_class: JobClass, size_bytes: int, now_ns: int) -> bool:
        in_flight, window = self._in_flight, self._bytes_in_flight
        beside_restores = self._yields[job_class] and not self.is_quiet(now_ns)
        if beside_restores:
            window = self._slice_bytes
        mine = in_flight[job_class]
        # Preemptions have room of their own, what else is written shares it, and beside restores all do.
        if job_class in EVICTS and (beside_restores or job_class != PREEMPT):
            mine = in_flight[PREEMPT] + in_flight[BACKGROUND] + in_flight[SPILL]
        # What is longer than the window runs alone rather than never.
        return mine == 0 or mine + size_bytes <= window

    # -- lanes that were refused -----------------------------------------------------------------------------------------------------

    def block(self, wake: Callable[[], None]) -> None:
        """A lane has something that is not allowed now: `wake` it when another one has had an event."""
        self._blocked.setdefault(wake)

    def unblock(self, wake: Callable[[], None]) -> None:
        """It has not."""
        self._blocked.pop(wake, None)

    def others(self, wake: Callable[[], None]) -> list[Callable[[], None]]:
        """The lanes that wait, but for one; those that have waited longest first."""
        return [one for one in self._blocked if one != wake] if self._blocked else []

"""The order of work on one lane: what is sent next, and how much of it at a time.

A lane runs what it was sent in order, so what it has not been sent is what can still be overtaken. Requests wait whole, and are cut into jobs when they are
sent: restores in long ones, ahead of what runs, up to a window of bytes that keeps the lane's threads busy; evicts in long ones while no restore is about, else
in single slices. Which class may send is the arbiter's to say, whose request of that class the fair queue's.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from offloadd.scheduler.arbiter import Arbiter, Running
from offloadd.scheduler.fair_queue import Cut, FairQueue, Ticket
from offloadd.scheduler.job_class import BACKGROUND, EVICTS, INTERACTIVE, SPILL, JobClass

#: Jobs of one lane that may wait in the mover beside its window. Each takes 128 bytes a block there. Were they fewer than a session's requests (64 by default)
#: have jobs, one engine that does not come would fill the window with the rest of them.
PARKED_JOBS_MAX = 512


class Portion(NamedTuple):
    """The next `block_count` blocks of a ticket from `first` on, as the lane's job number `job`."""

    job: int
    ticket: int
    first: int
    block_count: int


class Depth(NamedTuple):
    """Of one class: tickets of which something waits, and its bytes; jobs in flight, and their bytes. Those that wait for their engines count as jobs only."""

    tickets: int = 0
    waiting_bytes: int = 0
    jobs: int = 0
    in_flight_bytes: int = 0

    def plus(self, other: "Depth") -> "Depth":
        """Of two lanes."""
        return Depth(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(slots=True)
class Plan:
    """What to send now, in this order; tickets whose deadline has passed, which are sent no further; when to ask again though nothing happens (0: need not)."""

    portions: list[Portion] = field(default_factory=list)
    expired: list[int] = field(default_factory=list)
    wake_ns: int = 0


@dataclass(frozen=True, slots=True)
class Windows:
    """Of one lane, in bytes: what is in flight at most, and how long one job is. `first_bytes`: the first job of a restore that takes several: its first blocks
    come early. `quantum_bytes`: what an engine instance may send in its turn. `blocks_max`: blocks of one job."""

    restore_bytes_in_flight: int
    evict_bytes_in_flight: int
    restore_job_bytes: int
    evict_job_bytes: int
    first_bytes: int
    quantum_bytes: int
    blocks_max: int

    @classmethod
    def of(cls, *, restore_bytes_in_flight: int, evict_bytes_in_flight: int, evict_job_bytes: int, slice_bytes: int, blocks_max: int) -> "Windows":
        """Two restore jobs fill their window. A turn is as long as the longest job, so that it always suffices for one, and a first job as a slice."""
        return cls(
            restore_bytes_in_flight=restore_bytes_in_flight,
            evict_bytes_in_flight=evict_bytes_in_flight,
            restore_job_bytes=restore_bytes_in_flight // 2,
            evict_job_bytes=evict_job_bytes,
            first_bytes=slice_bytes,
            quantum_bytes=max(restore_bytes_in_flight // 2, evict_job_bytes),
            blocks_max=blocks_max,
        )


class LaneQueue:
    """Decides what the lane is sent next.

    A job that was sent and waits there for its engine (`park`) takes no room until it begins (`unpark`): an engine that does not come must not hold up jobs of
    another. At most PARKED_JOBS_MAX do so.
    """

    def __init__(self, arbiter: Arbiter, windows: Windows) -> None:
        self._arbiter = arbiter
        self._windows = windows
        self._queues = [FairQueue(windows.quantum_bytes, begin_early=job_class not in EVICTS) for job_class in JobClass]
        self._restore_cut = Cut(windows.restore_job_bytes, windows.first_bytes, windows.blocks_max)
        #: By the length of a portion.
        self._cuts: dict[int, Cut] = {}
        self._classes: dict[int, JobClass] = {}
        self._running: dict[int, Running] = {}
        #: Those of `_running` that wait for their engines: their bytes are not counted.
        self._parked: set[int] = set()
        self._in_flight = [0] * len(JobClass)
        self._jobs = 0
        self._served = True
        #: Jobs that stand still.
        self._stalled_count = 0
        #: What waits here holds back other lanes.
        self._counts = True
        #: Called when a lane of the same volume may have made room for this one's work.
        self.wake: Callable[[], None] = lambda: None

    # -- what waits ------------------------------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Blocks want to go. Numbers are unique on the lane."""
        self._queues[ticket.job_class].add(ticket)
        self._classes[ticket.number] = ticket.job_class
        if self._counts:
            self._arbiter.enter(ticket.job_class)

    def drop(self, number: int) -> None:
        """What was not sent of this ticket will not be (expired or cancelled). Unknown ones are ignored."""
        job_class = self._classes.pop(number, None)
        if job_class is not None:
            self._queues[job_class].drop(number)
            if self._counts:
                self._arbiter.leave(job_class)

    def serve(self, served: bool) -> None:
        """Whether a mover takes what is sent. What waits for one that is away holds up nobody else."""
        self._served = served
        self._recount()
        if not served:
            self._arbiter.unblock(self.wake)

    def _stall(self) -> None:
        """A job stands still. What waits behind it holds up nobody else."""
        self._stalled_count += 1
        self._recount()

    def _recount(self) -> None:
        counts = self._served and not self._stalled_count
        if counts != self._counts:
            self._counts = counts
            for job_class in self._classes.values():
                if counts:
                    self._arbiter.enter(job_class)
                else:
                    self._arbiter.leave(job_class)

    @property
    def waiting_count(self) -> int:
        """Tickets that have not been sent whole."""
        return len(self._classes)

    def depths(self) -> list[Depth]:
        """By class as they are numbered. Costs a look at every ticket and every job: for who looks once a second."""
        jobs = Counter(running.job_class for running in self._running.values())
        return [
            Depth(
                len(queue.live),
                sum((ticket.block_count - ticket.taken) * ticket.block_bytes for ticket in queue.live.values()),
                jobs[job_class],
                self._in_flight[job_class],
            )
            for job_class, queue in zip(JobClass, self._queues, strict=True)
        ]

    # -- what runs -------------------------------------------------------------------------------------------------------------------

    def finish(self, job: int) -> None:
        """A job that was sent is over. Unknown jobs (a lane that was reset) are ignored."""
        running = self._running.pop(job, None)
        if running is None:
            return
        self._arbiter.finish(running)
        if job in self._parked:
            self._parked.remove(job)
        else:
            self._in_flight[running.job_class] -= running.size_bytes
        if running.stalled:
            self._stalled_count -= 1
            self._recount()

    def park(self, job: int) -> None:
        """A job that was sent waits for its engine. Unknown jobs are ignored."""
        running = self._running.get(job)
        if running is not None and job not in self._parked and len(self._parked) < PARKED_JOBS_MAX:
            self._parked.add(job)
            self._in_flight[running.job_class] -= running.size_bytes
            self._arbiter.pause(running)

    def unpark(self, job: int) -> None:
        """It does not wait any more, whether or not there is room: nothing else is sent until there is. Jobs that are not parked are ignored."""
        if job in self._parked:
            self._parked.remove(job)
            running = self._running[job]
            self._in_flight[running.job_class] += running.size_bytes
            self._arbiter.resume(running)

    def reset(self) -> None:
        """The lane is gone: forget everything."""
        for job in list(self._running):
            self.finish(job)
        for number in list(self._classes):
            self.drop(number)
        self._arbiter.unblock(self.wake)

    # -- what goes -------------------------------------------------------------------------------------------------------------------

    def others(self) -> list[Callable[[], None]]:
        """The `wake` of lanes of the same volume that something of this one's may have held up."""
        return self._arbiter.others(self.wake)

    def take(self, now_ns: int) -> Plan:
        """What to send now."""
        plan = Plan()
        arbiter = self._arbiter
        arbiter.look(now_ns)
        if not self._classes:
            arbiter.unblock(self.wake)
            return plan
        refused = False
        sent = True
        while sent:
            sent = refused = False
            plan.wake_ns = 0
            for job_class in arbiter.turns():
                queue = self._queues[job_class]
                if not queue.live:
                    continue
                cut = self._cut(job_class, now_ns)
                ticket = self._head(queue, cut, now_ns, plan)
                if ticket is None:
                    continue
                count = cut.count(ticket)
                if not self._fits(job_class, count * ticket.block_bytes):
                    continue
                if arbiter.allows(job_class, count * ticket.block_bytes, now_ns):
                    plan.portions.append(self._send(queue, ticket, count, now_ns))
                    sent = True
                    break
                refused = True
                if later_ns := arbiter.wake_ns(job_class, now_ns):
                    plan.wake_ns = min(plan.wake_ns or later_ns, later_ns)
        if refused:
            arbiter.block(self.wake)
        else:
            arbiter.unblock(self.wake)
        return plan

    def _head(self, queue: FairQueue, cut: Cut, now_ns: int, plan: Plan) -> Ticket | None:
        """Whose turn it is, of those that have not expired."""
        while (ticket := queue.head(cut)) is not None and 0 < ticket.deadline_ns <= now_ns:
            self.drop(ticket.number)
            plan.expired.append(ticket.number)
        return ticket

    def _send(self, queue: FairQueue, ticket: Ticket, count: int, now_ns: int) -> Portion:
        self._jobs += 1
        first = ticket.taken
        queue.take(ticket, count)
        running = self._running[self._jobs] = Running(ticket.job_class, count * ticket.block_bytes, self._stall)
        self._in_flight[running.job_class] += running.size_bytes
        self._arbiter.start(running, now_ns)
        if ticket.taken == ticket.block_count:
            del self._classes[ticket.number]
            if self._counts:
                self._arbiter.leave(ticket.job_class)
        return Portion(self._jobs, ticket.number, first, count)

    def _cut(self, job_class: JobClass, now_ns: int) -> Cut:
        if job_class == INTERACTIVE:
            return self._restore_cut
        portion_bytes = self._arbiter.portion_bytes(job_class, self._windows.evict_job_bytes, now_ns)
        return self._cuts.get(portion_bytes) or self._cuts.setdefault(portion_bytes, Cut(portion_bytes, 0, self._windows.blocks_max))

    def _fits(self, job_class: JobClass, size_bytes: int) -> bool:
        """Whether the lane has room. Restores that nobody waits for have a window like that of evicts, and take nothing of theirs."""
        in_flight, window = self._in_flight[job_class], self._windows.evict_bytes_in_flight
        if job_class == INTERACTIVE:
            window = self._windows.restore_bytes_in_flight
        elif job_class in (BACKGROUND, SPILL):
            in_flight = self._in_flight[BACKGROUND] + self._in_flight[SPILL]
        # A job longer than the window runs alone rather than never.
        return in_flight == 0 or in_flight + size_bytes <= window

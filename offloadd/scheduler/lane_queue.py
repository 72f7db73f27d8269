"""The order of jobs on one lane: restores first, then evicts, then the rest; each of these keeps a minimum share beside the one before it.

A lane runs what it was sent in order, so what it has not been sent is what can still be overtaken. Restores are sent ahead up to a window of bytes that keeps
the lane's threads busy; evicts only as many slices as threads, so that a restore that arrives waits for one slice at most.
"""

from collections import deque
from dataclasses import dataclass
from enum import IntEnum

#: Jobs of one lane that may wait in the mover beside its window. Each takes 128 bytes a block there. Were they fewer than a session's requests (64 by default)
#: have jobs, one engine that does not come would fill the window with the rest of them.
PARKED_JOBS_MAX = 512


class JobClass(IntEnum):
    """Classes of a lane's jobs, in falling order of precedence."""

    RESTORE = 0
    EVICT = 1
    #: Spills and prefetches: nobody waits for them.
    BACKGROUND = 2


@dataclass(frozen=True, slots=True)
class Ticket:
    """One job in the queue. `io_bytes` is what it will read or write."""

    job: int
    job_class: JobClass
    io_bytes: int


class LaneQueue:
    """Decides which job the lane gets next.

    A job that was sent and waits there for its engine (`park`) takes no room in its window until it begins (`unpark`): an engine that does not come must not
    hold up another's jobs. At most PARKED_JOBS_MAX do so.

    `restore_bytes_in_flight`: the window of restores sent ahead. `evict_bytes_in_flight`: the window of everything else. While restores wait or run,
    one evict job is sent for every `evict_share` restore jobs, so that steady restores do not starve evicts for ever; and for every `evict_share` evict jobs
    one background job, since a spill that waits keeps arena slots pinned.
    """

    def __init__(self, *, restore_bytes_in_flight: int, evict_bytes_in_flight: int, evict_share: int) -> None:
        self._windows = {
            JobClass.RESTORE: restore_bytes_in_flight,
            JobClass.EVICT: evict_bytes_in_flight,
            JobClass.BACKGROUND: evict_bytes_in_flight,
        }
        self._evict_share = evict_share
        self._queues: dict[JobClass, deque[Ticket]] = {job_class: deque() for job_class in JobClass}
        self._in_flight: dict[int, Ticket] = {}
        #: Those of `_in_flight` that wait for their engines: their bytes are not counted.
        self._parked: set[int] = set()
        self._bytes_in_flight = dict.fromkeys(JobClass, 0)
        self._restores_since_evict = 0
        self._evicts_since_background = 0

    def submit(self, ticket: Ticket) -> None:
        """A job wants to run."""
        self._queues[ticket.job_class].append(ticket)

    def finish(self, job: int) -> None:
        """A job that was sent is over. Unknown jobs (a lane that was reset) are ignored."""
        self.unpark(job)
        ticket = self._in_flight.pop(job, None)
        if ticket is not None:
            self._bytes_in_flight[ticket.job_class] -= ticket.io_bytes

    def park(self, job: int) -> None:
        """A job that was sent waits for its engine. Unknown jobs are ignored."""
        ticket = self._in_flight.get(job)
        if ticket is not None and job not in self._parked and len(self._parked) < PARKED_JOBS_MAX:
            self._parked.add(job)
            self._bytes_in_flight[ticket.job_class] -= ticket.io_bytes

    def unpark(self, job: int) -> None:
        """It does not wait any more, whether or not there is room: nothing else is sent until there is. Jobs that are not parked are ignored."""
        if job in self._parked:
            self._parked.remove(job)
            ticket = self._in_flight[job]
            self._bytes_in_flight[ticket.job_class] += ticket.io_bytes

    def take(self) -> list[int]:
        """The jobs to send now, in this order."""
        ready = []
        while (ticket := self._next()) is not None:
            self._queues[ticket.job_class].popleft()
            self._in_flight[ticket.job] = ticket
            self._bytes_in_flight[ticket.job_class] += ticket.io_bytes
            self._count(ticket.job_class)
            ready.append(ticket.job)
        return ready

    def _count(self, job_class: JobClass) -> None:
        if job_class == JobClass.RESTORE:
            self._restores_since_evict += 1
            return
        self._restores_since_evict = 0
        self._evicts_since_background = self._evicts_since_background + 1 if job_class == JobClass.EVICT else 0

    def _others(self) -> deque[Ticket]:
        evicts, background = self._queues[JobClass.EVICT], self._queues[JobClass.BACKGROUND]
        return background if background and (not evicts or self._evicts_since_background >= self._evict_share) else evicts

    def _next(self) -> Ticket | None:
        restores = self._queues[JobClass.RESTORE]
        others = self._others()
        restores_busy = bool(restores) or self._bytes_in_flight[JobClass.RESTORE] > 0
        if others and self._fits(others[0]) and (not restores_busy or self._restores_since_evict >= self._evict_share):
            return others[0]
        if restores and self._fits(restores[0]):
            return restores[0]
        return None

    def _fits(self, ticket: Ticket) -> bool:
        in_flight = self._bytes_in_flight[ticket.job_class]
        if ticket.job_class != JobClass.RESTORE:
            in_flight = self._bytes_in_flight[JobClass.EVICT] + self._bytes_in_flight[JobClass.BACKGROUND]
        # A job longer than the window runs alone rather than never.
        return in_flight == 0 or in_flight + ticket.io_bytes <= self._windows[ticket.job_class]

    def drop(self, jobs: set[int]) -> None:
        """These jobs will not run (expired or cancelled before they were sent)."""
        for job_class, queue in self._queues.items():
            self._queues[job_class] = deque(ticket for ticket in queue if ticket.job not in jobs)

    def reset(self) -> list[int]:
        """The lane is gone: forget everything; returns the jobs that were sent or waited."""
        lost = [*self._in_flight, *(ticket.job for queue in self._queues.values() for ticket in queue)]
        self._in_flight.clear()
        self._parked.clear()
        for job_class, queue in self._queues.items():
            queue.clear()
            self._bytes_in_flight[job_class] = 0
        return lost

    @property
    def waiting_count(self) -> int:
        """Jobs that have not been sent."""
        return sum(len(queue) for queue in self._queues.values())

"""The control: a lane's queue with jobs as long and windows as wide as the scheduler's, and no order but that of arrival."""

import itertools

from offloadd.scheduler.arbiter import Arbiter
from offloadd.scheduler.fair_queue import Ticket
from offloadd.scheduler.lane_queue import LaneQueue, Plan, Portion, Windows

#: Jobs of both orders live side by side on a lane while it changes from one to the other; the scheduler's are numbered from one on.
FIRST_JOB = 1 << 40


class FifoQueue:
    """First come, first served. Whatever its class, a request waits until all before it have been sent."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        #: In the order of arrival.
        self._waiting: dict[int, Ticket] = {}
        self._running: dict[int, int] = {}
        self._jobs = itertools.count(FIRST_JOB)

    @property
    def waiting_count(self) -> int:
        """Tickets that have not been sent whole."""
        return len(self._waiting)

    def submit(self, ticket: Ticket) -> None:
        """Blocks want to go."""
        self._waiting[ticket.number] = ticket

    def drop(self, number: int) -> None:
        """What was not sent of this ticket will not be. Unknown ones are ignored."""
        self._waiting.pop(number, None)

    def finish(self, job: int) -> None:
        """A job that was sent is over. Unknown ones are ignored."""
        self._running.pop(job, None)

    def reset(self) -> None:
        """The lane is gone: forget everything."""
        self._waiting.clear()
        self._running.clear()

    def take(self, now_ns: int) -> Plan:
        """What to send now."""
        plan = Plan()
        while self._waiting:
            ticket = next(iter(self._waiting.values()))
            if 0 < ticket.deadline_ns <= now_ns:
                del self._waiting[ticket.number]
                plan.expired.append(ticket.number)
                continue
            most = max(1, min(self._windows.blocks_max, self._windows.evict_job_bytes // ticket.block_bytes))
            count = min(ticket.block_count - ticket.taken, most)
            size_bytes = count * ticket.block_bytes
            if self._running and sum(self._running.values()) + size_bytes > self._windows.restore_bytes_in_flight:
                break
            job = next(self._jobs)
            self._running[job] = size_bytes
            plan.portions.append(Portion(job, ticket.number, ticket.taken, count))
            ticket.taken += count
            if ticket.taken == ticket.block_count:
                del self._waiting[ticket.number]
        return plan


class SwitchedQueue(LaneQueue):
    """The scheduler's order, or while `fifo` is set that of arrival, for what is submitted from then on: so that both are measured in turn, in one daemon."""

    #: Of all lanes of the process.
    fifo = False

    def __init__(self, arbiter: Arbiter, windows: Windows) -> None:
        super().__init__(arbiter, windows)
        self._arrivals = FifoQueue(windows)

    def submit(self, ticket: Ticket) -> None:
        """Blocks want to go."""
        if SwitchedQueue.fifo:
            self._arrivals.submit(ticket)
        else:
            super().submit(ticket)

    def drop(self, number: int) -> None:
        """What was not sent of this ticket will not be."""
        self._arrivals.drop(number)
        super().drop(number)

    def finish(self, job: int) -> None:
        """A job that was sent is over."""
        self._arrivals.finish(job)
        super().finish(job)

    def reset(self) -> None:
        """The lane is gone."""
        self._arrivals.reset()
        super().reset()

    @property
    def waiting_count(self) -> int:
        """Tickets that have not been sent whole."""
        return super().waiting_count + self._arrivals.waiting_count

    def take(self, now_ns: int) -> Plan:
        """What to send now."""
        plan = super().take(now_ns)
        more = self._arrivals.take(now_ns)
        plan.portions += more.portions
        plan.expired += more.expired
        return plan

"""Queues of small sizes, and a lane that runs them in virtual time."""

import heapq
import itertools
from collections.abc import Callable
from typing import Protocol

from offloadd.scheduler.arbiter import Arbiter
from offloadd.scheduler.fair_queue import Ticket
from offloadd.scheduler.job_class import VOLUME_PRECEDENCE, JobClass, Precedence
from offloadd.scheduler.lane_queue import LaneQueue, Plan, Windows

BLOCK = 10


def arbiter_of(precedence: Precedence = VOLUME_PRECEDENCE, *, slice_bytes: int = BLOCK, bytes_in_flight: int = 4 * BLOCK, **rest: object) -> Arbiter:
    return Arbiter(precedence, slice_bytes=slice_bytes, bytes_in_flight=bytes_in_flight, **rest)  # type: ignore[arg-type]


def queue_of(arbiter: Arbiter | None = None, *, restore: int = 100, evict: int = 40, restore_job: int = BLOCK, evict_job: int = BLOCK) -> LaneQueue:
    windows = Windows(
        restore_bytes_in_flight=restore,
        evict_bytes_in_flight=evict,
        restore_job_bytes=restore_job,
        evict_job_bytes=evict_job,
        first_bytes=BLOCK,
        quantum_bytes=BLOCK,
        blocks_max=1000,
    )
    return LaneQueue(arbiter or arbiter_of(), windows)


def submit(queue: LaneQueue, job_class: JobClass, *numbers: int, count: int = 1, block_bytes: int = BLOCK, instance: int = 0, deadline_ns: int = 0) -> None:
    for number in numbers:
        queue.submit(Ticket(number, job_class, count, block_bytes, instance, deadline_ns))


def sent(plan: Plan) -> list[int]:
    """Tickets, by portion."""
    return [portion.ticket for portion in plan.portions]


class Queue(Protocol):
    """What a volume in virtual time drives."""

    def submit(self, ticket: Ticket) -> None: ...
    def take(self, now_ns: int) -> Plan: ...
    def finish(self, job: int) -> None: ...


class Volume:
    """A device that moves `bytes_per_s`, one job after the other in the order in which they were sent, in virtual time.

    `at` schedules a call; `run` goes on until nothing is left to do. `done_ns`: when a ticket's last block was moved; `first_ns`: its first job.
    """

    def __init__(self, bytes_per_s: int, queues: list[Queue]) -> None:
        self.now_ns = 0
        self.queues = queues
        self.sent: list[tuple[int, int]] = []
        self.first_ns: dict[int, int] = {}
        self.done_ns: dict[int, int] = {}
        self._bytes_per_s = bytes_per_s
        self._calls: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wakes: set[int] = set()
        self._free_ns = 0
        self._tickets: dict[int, Ticket] = {}
        self._left: dict[int, int] = {}
        self.on_done: Callable[[int], None] = lambda ticket: None

    def at(self, when_ns: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (when_ns, next(self._order), call))

    def submit(self, ticket: Ticket, queue: Queue | None = None) -> None:
        self._tickets[ticket.number] = ticket
        self._left[ticket.number] = ticket.block_count
        (queue or self.queues[0]).submit(ticket)
        self.pump()

    def pump(self) -> None:
        for queue in self.queues:
            plan = queue.take(self.now_ns)
            for portion in plan.portions:
                size = portion.block_count * self._tickets[portion.ticket].block_bytes
                self.sent.append((portion.ticket, size))
                self._free_ns = max(self._free_ns, self.now_ns) + size * 1_000_000_000 // self._bytes_per_s
                self.at(self._free_ns, lambda queue=queue, portion=portion: self._finish(queue, portion.job, portion.ticket, portion.block_count))  # type: ignore[misc]
            if plan.wake_ns and plan.wake_ns not in self._wakes:
                self._wakes.add(plan.wake_ns)
                self.at(plan.wake_ns, self.pump)

    def _finish(self, queue: Queue, job: int, ticket: int, count: int) -> None:
        queue.finish(job)
        self.first_ns.setdefault(ticket, self.now_ns)
        self._left[ticket] -= count
        if not self._left[ticket]:
            del self._tickets[ticket]
            self.done_ns[ticket] = self.now_ns
            self.on_done(ticket)
        self.pump()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self._calls and not until():
            self.now_ns, _, call = heapq.heappop(self._calls)
            call()

"""Work of one class on one lane: engine instances in turn by bytes, and within an instance the earliest deadline first.

    add ─▶ instance's requests that have not begun (by deadline) ──first portion──▶ those that have (by deadline) ──last portion──▶ out

Between instances: deficit round robin. Within one, a request that has not begun goes before those that have, so that first blocks of each come early, whatever
a long one still has to move; those that have begun keep a third of the instance's bytes meanwhile.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from offloadd.scheduler.job_class import JobClass

#: For so many bytes of requests that begin one portion of a request that has begun: two portions of the default length.
BEGIN_BYTES = 64 << 20
#: Dead tickets are cleared away when they outnumber the others by so many.
DEAD_MAX = 64
_NEVER = 1 << 63


@dataclass(eq=False, slots=True)
class Ticket:
    """Blocks of one request on one lane: `block_count` of `block_bytes` each, as they are read or written.

    `instance`: whose turn they take. `deadline_ns`: 0 for none. `taken`: blocks that were sent; the queue's.
    """

    number: int
    job_class: JobClass
    block_count: int
    block_bytes: int
    instance: int = 0
    deadline_ns: int = 0
    taken: int = 0
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """How long portions are: at most `portion_bytes` and `blocks_max` blocks; `first_bytes` (0: likewise) for the first of a request that takes several."""

    portion_bytes: int
    first_bytes: int
    blocks_max: int

    def count(self, ticket: Ticket) -> int:
        """Blocks of the ticket's next portion. Evenly: the mover cuts each job over its threads, so that a short last one would be cut into splinters."""
        left = ticket.block_count - ticket.taken
        if left * ticket.block_bytes <= self.portion_bytes and left <= self.blocks_max:
            return left
        most = max(1, min(self.blocks_max, self.portion_bytes // ticket.block_bytes))
        if self.first_bytes and not ticket.taken:
            return max(1, min(most, self.first_bytes // ticket.block_bytes))
        return -(-left // -(-left // most))


_Heap = list[tuple[int, int, Ticket]]


@dataclass(eq=False, slots=True)
class _Flow:
    """The tickets of one instance, as (deadline, order of arrival, ticket)."""

    instance: int
    #: Bytes that it may still send in this round.
    deficit: int = 0
    #: Moved of requests that began while others, which had, wait.
    begun_bytes: int = 0
    fresh: _Heap = field(default_factory=list)
    begun: _Heap = field(default_factory=list)

    def heap(self) -> _Heap:
        """Where its next ticket is: on top, and alive, unless the flow is empty."""
        for heap in (self.fresh, self.begun):
            while heap and heap[0][2].dropped:
                heapq.heappop(heap)
        return self.fresh if self.fresh and not (self.begun and self.begun_bytes >= BEGIN_BYTES) else self.begun


class FairQueue:
    """`quantum_bytes`: what an instance may send in its turn. Adding and taking cost the logarithm of an instance's tickets.

    `begin_early`: requests that have not begun go before those that have. Of evicts nothing is to be had before all of a request is copied.
    """

    def __init__(self, quantum_bytes: int, *, begin_early: bool) -> None:
        self._quantum_bytes = quantum_bytes
        self._begin_early = begin_early
        #: Tickets with blocks that were not taken, by number.
        self.live: dict[int, Ticket] = {}
        self._flows: dict[int, _Flow] = {}
        #: Flows with tickets; the first has the turn.
        self._ring: deque[_Flow] = deque()
        self._arrivals = 0
        self._dead_count = 0

    def add(self, ticket: Ticket) -> None:
        """A ticket waits."""
        self.live[ticket.number] = ticket
        flow = self._flows.get(ticket.instance)
        if flow is None:
            flow = self._flows[ticket.instance] = _Flow(ticket.instance, deficit=0 if self._ring else self._quantum_bytes)
            self._ring.append(flow)
        self._arrivals += 1
        heapq.heappush(flow.fresh, (ticket.deadline_ns or _NEVER, self._arrivals, ticket))

    def head(self, cut: Cut) -> Ticket | None:
        """The ticket whose turn it is."""
        ring = self._ring
        while ring:
            flow = ring[0]
            heap = flow.heap()
            if not heap:
                ring.popleft()
                del self._flows[flow.instance]
                if ring:
                    ring[0].deficit += self._quantum_bytes
                continue
            ticket = heap[0][2]
            if len(ring) == 1 or flow.deficit >= cut.count(ticket) * ticket.block_bytes:
                return ticket
            ring.rotate(-1)
            ring[0].deficit += self._quantum_bytes
        return None

    def take(self, ticket: Ticket, count: int) -> None:
        """So many blocks of the head are sent."""
        flow = self._ring[0]
        heap = flow.heap()
        assert heap and heap[0][2] is ticket, "only the head may be taken"
        size_bytes = count * ticket.block_bytes
        # Alone it owes nobody, and saves nothing up.
        flow.deficit = flow.deficit - size_bytes if len(self._ring) > 1 else 0
        begun = heap is flow.begun
        flow.begun_bytes = 0 if begun or not flow.begun else flow.begun_bytes + size_bytes
        ticket.taken += count
        if ticket.taken == ticket.block_count:
            heapq.heappop(heap)
            del self.live[ticket.number]
        elif self._begin_early and not begun:
            heapq.heappush(flow.begun, heapq.heappop(heap))

    def drop(self, number: int) -> None:
        """A ticket that waits will not be sent any further."""
        self.live.pop(number).dropped = True
        self._dead_count += 1
        if self._dead_count > len(self.live) + DEAD_MAX:
            self._clear_away()

    def _clear_away(self) -> None:
        """Nothing else does while the lane sends nothing."""
        self._dead_count = 0
        for flow in self._ring:
            for heap in (flow.fresh, flow.begun):
                heap[:] = [entry for entry in heap if not entry[2].dropped]
                heapq.heapify(heap)

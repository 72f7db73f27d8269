"""Whose turn it is: engine instances by bytes, requests by their deadlines."""

from offloadd.scheduler.fair_queue import BEGIN_BYTES, Cut, FairQueue, Ticket
from offloadd.scheduler.job_class import INTERACTIVE

MIB = 1 << 20
CUT = Cut(portion_bytes=32 * MIB, first_bytes=8 * MIB, blocks_max=1000)


def ticket(number: int, *, count: int = 1, mib: int = 1, instance: int = 0, deadline_ns: int = 0) -> Ticket:
    return Ticket(number, INTERACTIVE, count, mib * MIB, instance, deadline_ns)


def queue_of(*tickets: Ticket, quantum_bytes: int = 32 * MIB, begin_early: bool = True) -> FairQueue:
    queue = FairQueue(quantum_bytes, begin_early=begin_early)
    for one in tickets:
        queue.add(one)
    return queue


def next_of(queue: FairQueue, cut: Cut = CUT) -> tuple[int, int] | None:
    """(ticket, MiB) of the next portion."""
    one = queue.head(cut)
    if one is None:
        return None
    count = cut.count(one)
    queue.take(one, count)
    return one.number, count * one.block_bytes // MIB


def drained(queue: FairQueue, cut: Cut = CUT) -> list[tuple[int, int]]:
    found = []
    while (one := next_of(queue, cut)) is not None:
        found.append(one)
    return found


def test_a_request_of_several_portions_begins_with_a_short_one_and_has_no_splinters() -> None:
    assert drained(queue_of(ticket(1, count=100))) == [(1, 8), (1, 31), (1, 31), (1, 30)]
    assert drained(queue_of(ticket(1, count=32))) == [(1, 32)]
    assert drained(queue_of(ticket(1, count=100)), Cut(32 * MIB, 0, 1000)) == [(1, 25)] * 4
    assert drained(queue_of(ticket(1, count=2, mib=50))) == [(1, 50), (1, 50)], "a block longer than a portion goes alone"
    assert [count for _, count in drained(queue_of(ticket(1, count=10)), Cut(32 * MIB, 0, 4))] == [4, 3, 3]


def test_the_earliest_deadline_goes_first_within_an_instance() -> None:
    queue = queue_of(ticket(1, deadline_ns=30), ticket(2, deadline_ns=10), ticket(3), ticket(4, deadline_ns=10), ticket(5, deadline_ns=20))
    assert [number for number, _ in drained(queue)] == [2, 4, 5, 1, 3]
    begun = queue_of(ticket(1, count=100, deadline_ns=20), ticket(2, count=100, deadline_ns=10))
    assert [number for number, _ in drained(begun)] == [2, 1, 2, 2, 2, 1, 1, 1], "first blocks of both, then by deadline"
    evicts = queue_of(ticket(1, count=100, deadline_ns=20), ticket(2, count=100, deadline_ns=10), begin_early=False)
    assert [number for number, _ in drained(evicts)] == [2] * 4 + [1] * 4, "nothing is to be had of an evict before all of it is copied"


def test_what_has_begun_keeps_a_share_beside_what_begins() -> None:
    queue = queue_of(ticket(1, count=1000))
    assert next_of(queue) == (1, 8)
    for number in range(2, 200):
        queue.add(ticket(number))
    order = [next_of(queue) for _ in range(150)]
    portions = [at for at, one in enumerate(order) if one is not None and one[0] == 1]
    assert portions == [BEGIN_BYTES // MIB, 2 * (BEGIN_BYTES // MIB) + 1]


def test_instances_take_turns_by_bytes_however_many_requests_they_have() -> None:
    busy = [ticket(number, count=32, instance=1) for number in range(1, 100)]
    queue = queue_of(*busy, *(ticket(number, instance=2) for number in range(200, 400)))
    moved = {1: 0, 2: 0}
    for _ in range(60):
        one = next_of(queue)
        assert one is not None
        moved[1 if one[0] < 200 else 2] += one[1]
    assert abs(moved[1] - moved[2]) <= 32, moved


def test_an_instance_that_comes_goes_after_one_turn_of_each_other() -> None:
    queue = queue_of(*(ticket(number, count=1000, instance=number) for number in range(1, 6)))
    for _ in range(20):
        next_of(queue)
    queue.add(ticket(9, instance=9))
    order = [next_of(queue) for _ in range(11)]
    # The one whose turn it was, the four others, and no second one of any.
    assert 9 in [one[0] for one in order if one is not None][:7]


def test_an_instance_alone_owes_nothing_for_what_it_sent() -> None:
    queue = queue_of(*(ticket(number, count=32, instance=1) for number in range(1, 100)))
    for _ in range(50):
        next_of(queue)
    queue.add(ticket(200, count=32, instance=2))
    queue.add(ticket(201, count=32, instance=2))
    order = [one[0] for one in (next_of(queue) for _ in range(4)) if one is not None]
    assert [number >= 200 for number in order] == [True, False, True, False]


def test_blocks_longer_than_a_turn_go_after_several() -> None:
    queue = queue_of(ticket(1, count=3, mib=40, instance=1), *(ticket(number, count=1, mib=8, instance=2) for number in range(2, 20)), quantum_bytes=8 * MIB)
    moved = {1: 0, 2: 0}
    for _ in range(12):
        one = next_of(queue)
        assert one is not None
        moved[1 if one[0] == 1 else 2] += one[1]
    assert abs(moved[1] - moved[2]) <= 48, moved


def test_what_was_dropped_has_no_turn() -> None:
    queue = queue_of(ticket(1, instance=1), ticket(2, instance=2), ticket(3, instance=3, count=100))
    assert next_of(queue) == (1, 1)
    queue.drop(2)
    assert next_of(queue) == (3, 8)
    queue.drop(3)
    assert next_of(queue) is None and not queue.live and not queue._ring and not queue._flows

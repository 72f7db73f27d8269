"""A lane whose mover was replaced: what was sent to the old one is its until its end of the socket has ended, and that is no end of its successor."""

import asyncio
from collections.abc import Callable

from offloadd.ipc.channel import socket_pair
from offloadd.model.enums import Path, Reason, Tier
from offloadd.offload.lanes import Lane, Quarantine
from offloadd.offload.moves import PENDING, Move
from tests.offload.queues import queue_of
from tests.offload.test_lanes import BLOCK_BYTES, Mover, until


async def test_the_end_of_an_old_mover_does_not_disconnect_its_successor() -> None:
    lane = Lane(number=1, name="/volume", tier=Tier.VOLUME, path=Path.BOUNCE, queue=queue_of())
    ours, old = socket_pair()
    lane.connect(ours)
    ours, new = socket_pair()
    lane.connect(ours)
    old.close()
    # One turn of the loop reads what there is, the end of the old socket, too.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert lane.connected
    new.close()
    lane.disconnect()


class Replaced(Mover):
    """A mover that was sent two jobs of a move of ten blocks, and then replaced; `old` is its end of the lane."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Move] = []
        self.lane._on_left = lambda volume, moves: self.told.extend(moves)
        self.move = self.submit(10)
        self.sent = self.jobs()
        assert len(self.sent) == 2
        self.old = self.channel
        self.connect()

    async def turn_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.move.wake.clear()
                await self.move.wake.wait()


async def test_what_was_left_behind_has_no_result_until_the_old_mover_is_gone() -> None:
    mover = Replaced()
    assert mover.told == [mover.move] and mover.lane.moves == [mover.move]
    # The window is the successor's alone: it is sent the rest, and a whole move beside it.
    (rest,) = mover.jobs()
    mover.done(rest)
    other = mover.submit(4)
    (job,) = await mover.next_jobs()
    mover.done(job)
    await until(other, "done")
    assert mover.move.reasons.tolist() == [PENDING] * 7 + [0] * 3 and not mover.move.copied
    assert mover.lane.quarantine(0) == mover.lane.left_behind == Quarantine(jobs=2, slots=7, slot_bytes=7 * BLOCK_BYTES)
    mover.old.close()
    await until(mover.move, "done")
    assert mover.move.reasons.tolist() == [int(Reason.WORKER_LOST)] * 7 + [0] * 3 and mover.move.copied
    assert mover.lane.left_behind == Quarantine() and mover.lane.connected and mover.lane.moves == []
    mover.lane.disconnect()


async def test_results_of_an_old_mover_that_was_not_killed_yet_count() -> None:
    mover = Replaced()
    new, mover.channel = mover.channel, mover.old
    mover.copied(mover.sent[0])
    mover.done(mover.sent[0])
    await mover.turn_until(lambda: mover.move.pending_count == 6)
    mover.old.close()
    await mover.turn_until(lambda: mover.move.pending_count == 3)
    assert mover.move.reasons.tolist() == [0] * 4 + [int(Reason.WORKER_LOST)] * 3 + [PENDING] * 3
    mover.channel = new
    mover.lane.disconnect()


async def test_a_lane_that_is_given_up_keeps_what_was_left_behind() -> None:
    mover = Replaced()
    mover.lane.disconnect()
    assert mover.move.pending_count == 7
    mover.old.close()
    await until(mover.move, "done")


async def test_a_mover_without_work_leaves_nothing_behind() -> None:
    mover = Mover()
    old = mover.channel
    mover.connect()
    assert mover.lane.left_behind == Quarantine()
    # Its threads end.
    old.sock.setblocking(True)
    old.sock.settimeout(60)
    assert old.receive() is None
    mover.lane.disconnect()

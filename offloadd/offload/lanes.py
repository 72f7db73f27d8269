"""The front's end of a lane: blocks wait in its queue, go to the mover in jobs, and come back as results of their moves."""

import asyncio
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from offloadd import clock
from offloadd.ipc.channel import AsyncChannel
from offloadd.model.enums import Path, Reason, Tier, Way
from offloadd.model.slots import RESULT_DTYPE
from offloadd.mover.messages import Copied, Job, LaneAnswer, Operation, Parked, SliceDone, Unparked
from offloadd.offload.moves import Move, WayName
from offloadd.offload.traffic import Run, Traffic
from offloadd.scheduler.fair_queue import Ticket
from offloadd.scheduler.job_class import JobClass
from offloadd.scheduler.lane_queue import Depth, LaneQueue, Portion

_EVICTS = (Operation.EVICT, Operation.ARENA_EVICT)
_WRITES = (*_EVICTS, Operation.SPILL)
#: Bytes a second of the longest block in flight that are waited for before a lane counts as stalled: a block of 3 GiB is one slice.
SLOWEST_BYTES_PER_S = 32 << 20


@dataclass(eq=False, slots=True)
class _Part:
    """Blocks of one move that go by this lane. `order`: their job without its blocks; its number is the ticket's. `taken`: how many were sent."""

    move: Move
    order: Job
    blocks: npt.NDArray[Any]
    writes: bool
    taken: int = 0


@dataclass(eq=False, slots=True)
class _Sent:
    """A job in the mover. `left` blocks have no result yet, of `uncopied` the sources are not free."""

    part: _Part
    blocks: npt.NDArray[Any]
    left: int
    uncopied: int


def _way_name(tier: Tier, path: Path, way: Way) -> WayName:
    if path == Path.GDS and way is Way.PLAIN:
        way = Way.UNPROVEN
    return tier, path if way is Way.PLAIN or way.is_gds else Path.BOUNCE, way


class Lane:
    """One tier instance in one mover. What was submitted while the mover is away waits for it; jobs that were sent to a mover that died fail with WORKER_LOST.

    `tier` and `path` are what its operations report. `traffic` hears when it has work, for `device` and `volume` (-1: the arena). `on_io(writes, good)` hears
    of each slice whose I/O says something of the volume. `io_bytes` (read, written; at a volume with headers and padding) is added to.
    """

    def __init__(
        self,
        *,
        number: int,
        name: str,
        tier: Tier,
        path: Path,
        queue: LaneQueue,
        device: str = "",
        volume: int = -1,
        traffic: Traffic | None = None,
        on_io: Callable[[bool, bool], None] = lambda writes, good: None,
        io_bytes: list[int] | None = None,
    ) -> None:
        self.number = number
        self.name = name
        self.tier = tier
        self.path = path
        #: What is told of bytes that went each way: whatever was not proven to go past the host was bounced.
        self._ways = {int(way): _way_name(tier, path, way) for way in Way}
        self._device = device
        self._volume = volume
        self._traffic = traffic or Traffic()
        self._io_bytes = [0, 0] if io_bytes is None else io_bytes
        #: What it does at present; None while it is idle.
        self._run: Run | None = None
        self._queue = queue
        self._queue.wake = self._send_next
        self._queue.serve(False)
        #: Those with blocks that were not sent, by ticket and by move.
        self._parts: dict[int, _Part] = {}
        self._parts_of: dict[int, list[_Part]] = {}
        self._sent: dict[int, _Sent] = {}
        self._on_io = on_io
        #: By direction (True: writes): whether no job is sent.
        self._refused = {False: False, True: False}
        self._refuses_some = False
        #: Those of `_sent` that do not wait for their engine.
        self._running: dict[int, _Sent] = {}
        #: When one of them last began after a pause, or gave a result.
        self._progress_ns = 0
        #: Runs out when the queue is to be asked again though nothing happens.
        self._timer: asyncio.TimerHandle | None = None
        self._channel: AsyncChannel[LaneAnswer] | None = None

    def connect(self, sock: socket.socket) -> None:
        """A mover serves this lane through `sock` from now on; what waited is sent."""

        def lost() -> None:
            self._channel = None
            self._queue.serve(False)
            for job, sent in list(self._sent.items()):
                self._lose(job, sent)
            # It holds up no other any more.
            self.pump()

        if self._channel is not None:
            # The end of a mover that has gone may be told here after its successor's start.
            self._channel.close()
        self._channel = AsyncChannel(sock, LaneAnswer, on_message=self._on_answer, on_close=lost, takes_fds=False)
        self._queue.serve(True)
        self.pump()

    def disconnect(self) -> None:
        """Give the lane up."""
        if self._channel is not None:
            self._channel.close()
        for job, sent in list(self._sent.items()):
            self._lose(job, sent)
        for part in list(self._parts.values()):
            self._give_up(part, Reason.WORKER_LOST)
        self._queue.reset()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def connected(self) -> bool:
        """Whether a mover serves the lane."""
        return self._channel is not None

    def submit(self, move: Move, order: Job, blocks: npt.NDArray[Any], job_class: JobClass, *, instance: int = 0) -> None:
        """Queue blocks (BLOCK_DTYPE, `position` in the move) and send what may be sent.

        `order`: their job without blocks; its number is unique on the lane. `instance`: the ordinal of the engine instance whose turn they take; 0: nobody's.
        """
        now_ns = clock.monotonic_ns()
        if self._run is None:
            self._run = Run(self._device, self._volume, self.path, move.number, order.operation, order.durable, now_ns)
            self._traffic.begin(self._run)
        self._run.add(move.number, order, blocks.shape[0], now_ns)
        part = _Part(move, order, blocks, order.operation in _WRITES)
        self._parts[order.job] = part
        self._parts_of.setdefault(move.number, []).append(part)
        if order.operation in _EVICTS:
            move.sent(order.job, blocks.shape[0])
        self._queue.submit(Ticket(order.job, job_class, blocks.shape[0], order.slot_bytes, instance, order.deadline_ns))
        self.pump()

    def pump(self) -> None:
        """Send what may be sent, first on lanes of the same volume that this one has held up."""
        if self._refuses_some:
            self._take_back([part for part in self._parts.values() if self._refused[part.writes]], Reason.VOLUME_DOWN)
        for wake in self._queue.others():
            wake()
        self._send_next()

    def _send_next(self) -> None:
        if self._channel is None:
            return
        now_ns = clock.monotonic_ns()
        plan = self._queue.take(now_ns)
        for portion in plan.portions:
            self._channel.send(self._job(portion))
        if plan.wake_ns:
            self._wake_at(plan.wake_ns, now_ns)
        for ticket in plan.expired:
            self._give_up(self._parts[ticket], Reason.DEADLINE)

    def _job(self, portion: Portion) -> Job:
        part = self._parts[portion.ticket]
        part.taken = portion.first + portion.block_count
        blocks = part.blocks[portion.first : part.taken]
        if part.taken == part.blocks.shape[0]:
            self._leave(part)
        uncopied = portion.block_count if part.order.operation in _EVICTS else 0
        sent = self._sent[portion.job] = _Sent(part, blocks, portion.block_count, uncopied)
        self._begin(portion.job, sent)
        return msgspec.structs.replace(part.order, job=portion.job, blocks=blocks.tobytes())

    def _wake_at(self, wake_ns: int, now_ns: int) -> None:
        loop = asyncio.get_running_loop()
        when_s = loop.time() + max(0, wake_ns - now_ns) / 1e9
        if self._timer is not None:
            # One that runs out sooner asks again for itself.
            if self._timer.when() <= when_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when_s, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self.pump()

    def _begin(self, job: int, sent: _Sent) -> None:
        if not self._running:
            self._progress_ns = clock.monotonic_ns()
        self._running[job] = sent

    # -- whether the volume behind it works --------------------------------------------------------------------------------------------

    def refuse(self, *, reads: bool, writes: bool) -> None:
        """From now on nothing is sent in these directions, and what waits fails with VOLUME_DOWN; jobs that were sent end as they end."""
        self._refused = {False: reads, True: writes}
        self._refuses_some = reads or writes
        self.pump()

    def refuses(self, *, writes: bool) -> bool:
        """Whether what goes in this direction fails at once."""
        return self._refused[writes]

    def stalled_ns(self, now_ns: int) -> int:
        """How long no slice has ended although some are in flight, less what the longest block in flight may take; 0 if none are, or it moves."""
        if not self._running:
            return 0
        slot_bytes = max(sent.part.order.slot_bytes for sent in self._running.values())
        return max(0, now_ns - self._progress_ns - slot_bytes * 1_000_000_000 // SLOWEST_BYTES_PER_S)

    def late_count(self, now_ns: int) -> int:
        """Jobs that were sent and are past their deadlines: nobody waits for them, and their slots are theirs until they end."""
        return sum(0 < sent.part.order.deadline_ns <= now_ns for sent in self._running.values())

    @property
    def depths(self) -> list[Depth]:
        """What waits and what is in flight, by class as they are numbered."""
        return self._queue.depths()

    @property
    def running_count(self) -> int:
        """Jobs that were sent and do not wait for their engine."""
        return len(self._running)

    @property
    def moves(self) -> list[Move]:
        """The moves that have jobs here which run."""
        return list({sent.part.move.number: sent.part.move for sent in self._running.values()}.values())

    def abandon(self, move: Move, reason: Reason) -> None:
        """Blocks of this move that were not sent yet will not be, and get this reason."""
        mine = list(self._parts_of.get(move.number, ()))
        self._take_back(mine, reason)
        if mine:
            # What they held up may go, on this lane and on others.
            self.pump()

    def _take_back(self, parts: Iterable[_Part], reason: Reason) -> None:
        for part in parts:
            self._queue.drop(part.order.job)
            self._give_up(part, reason)

    def _on_answer(self, answer: LaneAnswer, fds: list[int]) -> None:
        sent = self._sent.get(answer.job)
        if sent is None:
            return
        move = sent.part.move
        if isinstance(answer, Copied):
            sent.uncopied -= answer.count
            move.on_copied(sent.part.order.job, answer.count)
            return
        if isinstance(answer, Parked):
            self._queue.park(answer.job)
            self._running.pop(answer.job, None)
            self.pump()
            return
        if isinstance(answer, Unparked):
            self._queue.unpark(answer.job)
            self._begin(answer.job, sent)
            return
        assert isinstance(answer, SliceDone)
        assert self._run is not None
        self._progress_ns = clock.monotonic_ns()
        self._run.slice(answer, self._progress_ns)
        # The arena has no I/O: what counts there is the payload.
        self._io_bytes[sent.part.writes] += answer.io_bytes or answer.payload_bytes
        self._judge(sent.part, answer)
        count = len(answer.results) // RESULT_DTYPE.itemsize
        sent.left -= count
        if sent.left:
            move.on_slice(answer, self._ways[answer.way], count)
            return
        self._forget(answer.job)
        if sent.uncopied:
            # Not every kind of job tells its copies before its results, and what failed tells none.
            move.on_copied(sent.part.order.job, sent.uncopied)
        move.on_slice(answer, self._ways[answer.way], count)
        self.pump()

    def _judge(self, part: _Part, done: SliceDone) -> None:
        # Nearly always some block is good, and then its bytes say so; looking at the results takes µs.
        if done.payload_bytes:
            # A good read tells nothing that is asked for.
            if part.writes:
                self._on_io(True, True)
        elif (np.frombuffer(done.results, dtype=RESULT_DTYPE)["reason"] == Reason.IO_ERROR).any():
            self._on_io(part.writes, False)

    def _lose(self, job: int, sent: _Sent) -> None:
        """The mover has gone with it."""
        self._forget(job)
        self._fail(sent.part, sent.blocks, sent.uncopied, Reason.WORKER_LOST)

    def _give_up(self, part: _Part, reason: Reason) -> None:
        """Blocks that were not sent, and have left the queue."""
        unsent = part.blocks[part.taken :]
        self._leave(part)
        self._end_run()
        self._fail(part, unsent, unsent.shape[0] if part.order.operation in _EVICTS else 0, reason)

    def _fail(self, part: _Part, blocks: npt.NDArray[Any], uncopied: int, reason: Reason) -> None:
        if uncopied:
            part.move.on_copied(part.order.job, uncopied)
        part.move.fail(blocks["position"], int(reason))

    def _leave(self, part: _Part) -> None:
        """Nothing of it waits any more."""
        del self._parts[part.order.job]
        mine = self._parts_of[part.move.number]
        mine.remove(part)
        if not mine:
            del self._parts_of[part.move.number]

    def _forget(self, job: int) -> None:
        """The job is over."""
        del self._sent[job]
        self._running.pop(job, None)
        self._queue.finish(job)
        self._end_run()

    def _end_run(self) -> None:
        if not self._sent and not self._parts and self._run is not None:
            # Before the move hears of its last result: whoever waits for that may ask what the run was.
            run, self._run = self._run, None
            self._traffic.end(run, clock.monotonic_ns())

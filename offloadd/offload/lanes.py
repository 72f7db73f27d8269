"""The front's end of a lane: jobs wait in its queue, go to the mover, and come back as results of their moves."""

import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offloadd import clock
from offloadd.ipc.channel import AsyncChannel
from offloadd.model.enums import Path, Reason, Tier, Way
from offloadd.model.slots import BLOCK_DTYPE, RESULT_DTYPE
from offloadd.mover.messages import Copied, Job, LaneAnswer, Operation, Parked, SliceDone, Unparked
from offloadd.offload.moves import Move, WayName
from offloadd.offload.traffic import Run, Traffic
from offloadd.scheduler.lane_queue import JobClass, LaneQueue, Ticket

_WRITES = frozenset({int(Operation.EVICT), int(Operation.SPILL), int(Operation.ARENA_EVICT)})
#: Bytes a second of the longest block in flight that are waited for before a lane counts as stalled: a block of 3 GiB is one slice.
SLOWEST_BYTES_PER_S = 32 << 20


@dataclass(slots=True)
class _Pending:
    job: Job
    move: Move
    positions: npt.NDArray[np.uint32]
    left: int
    sent: bool = False

    @property
    def writes(self) -> bool:
        return self.job.operation in _WRITES


def _way_name(tier: Tier, path: Path, way: Way) -> WayName:
    if path == Path.GDS and way is Way.PLAIN:
        way = Way.UNPROVEN
    return tier, path if way is Way.PLAIN or way.is_gds else Path.BOUNCE, way


class Lane:
    """One tier instance in one mover. Jobs submitted while the mover is away wait for it; jobs that were sent to a mover that died fail with WORKER_LOST.

    `tier` and `path` are what its operations report. `write_bytes_max` bounds one job of evicts or spills, `read_bytes_max` one of restores. `traffic` hears
    when it has work, for `device` and `volume` (-1: the arena). `on_io(writes, good)` hears of each slice whose I/O says something of the volume.
    """

    def __init__(
        self,
        *,
        number: int,
        name: str,
        tier: Tier,
        path: Path,
        queue: LaneQueue,
        read_bytes_max: int,
        write_bytes_max: int,
        device: str = "",
        volume: int = -1,
        traffic: Traffic | None = None,
        on_io: Callable[[bool, bool], None] = lambda writes, good: None,
    ) -> None:
        self.number = number
        self.name = name
        self.tier = tier
        self.path = path
        self.read_bytes_max = read_bytes_max
        self.write_bytes_max = write_bytes_max
        #: What is told of bytes that went each way: whatever was not proven to go past the host was bounced.
        self._ways = {int(way): _way_name(tier, path, way) for way in Way}
        self._device = device
        self._volume = volume
        self._traffic = traffic or Traffic()
        #: What it does at present; None while it is idle.
        self._run: Run | None = None
        self._queue = queue
        self._jobs: dict[int, _Pending] = {}
        #: The same by move: a volume that hangs lets many requests stop at once, and each looks for its own.
        self._jobs_of: dict[int, dict[int, _Pending]] = {}
        self._channel: AsyncChannel[LaneAnswer] | None = None
        self._on_io = on_io
        #: By direction (True: writes): whether no job is sent.
        self._refused = {False: False, True: False}
        #: Those that were sent and do not wait for their engine.
        self._running: dict[int, _Pending] = {}
        #: When one of them last began after a pause, or gave a result.
        self._progress_ns = 0

    def connect(self, sock: socket.socket) -> None:
        """A mover serves this lane through `sock` from now on; what waited is sent."""

        def lost() -> None:
            self._channel = None
            self._fail_sent()

        if self._channel is not None:
            # The end of a mover that has gone may be told here after its successor's start.
            self._channel.close()
        self._channel = AsyncChannel(sock, LaneAnswer, on_message=self._on_answer, on_close=lost, takes_fds=False)
        self._pump()

    def disconnect(self) -> None:
        """Give the lane up."""
        if self._channel is not None:
            self._channel.close()
        for pending in list(self._jobs.values()):
            self._finish(pending, Reason.WORKER_LOST)
        self._queue.reset()

    @property
    def connected(self) -> bool:
        """Whether a mover serves the lane."""
        return self._channel is not None

    @property
    def job_count(self) -> int:
        """Jobs that wait or run."""
        return len(self._jobs)

    def submit(self, move: Move, job: Job, job_class: JobClass) -> None:
        """Queue one job of a move; its blocks' `position` are positions in the move."""
        self.enqueue(move, job, job_class)
        self._pump()

    def enqueue(self, move: Move, job: Job, job_class: JobClass) -> None:
        """Queue without sending: for several jobs in a row, then `pump`."""
        blocks = np.frombuffer(job.blocks, dtype=BLOCK_DTYPE)
        now_ns = clock.monotonic_ns()
        if self._run is None:
            self._run = Run(self._device, self._volume, self.path, move.number, job.operation, job.durable, now_ns)
            self._traffic.begin(self._run)
        self._run.add(move.number, job, blocks.shape[0], now_ns)
        pending = _Pending(job=job, move=move, positions=blocks["position"], left=blocks.shape[0])
        self._jobs[job.job] = self._jobs_of.setdefault(move.number, {})[job.job] = pending
        if job.operation in (Operation.EVICT, Operation.ARENA_EVICT):
            move.sent(job.job, blocks.shape[0])
        self._queue.submit(Ticket(job.job, job_class, blocks.shape[0] * job.slot_bytes))

    def pump(self) -> None:
        """Send what may be sent."""
        self._pump()

    def _pump(self) -> None:
        if any(self._refused.values()):
            self._take_back([pending for pending in self._jobs.values() if not pending.sent and self._refused[pending.writes]], Reason.VOLUME_DOWN)
        if self._channel is None:
            return
        for number in self._queue.take():
            pending = self._jobs[number]
            pending.sent = True
            self._begin(pending)
            self._channel.send(pending.job)

    def _begin(self, pending: _Pending) -> None:
        if not self._running:
            self._progress_ns = clock.monotonic_ns()
        self._running[pending.job.job] = pending

    # -- whether the volume behind it works --------------------------------------------------------------------------------------------

    def refuse(self, *, reads: bool, writes: bool) -> None:
        """From now on jobs of these directions are not sent, and those that wait fail with VOLUME_DOWN; those that were sent end as they end."""
        self._refused = {False: reads, True: writes}
        self._pump()

    def refuses(self, *, writes: bool) -> bool:
        """Whether jobs of this direction fail at once."""
        return self._refused[writes]

    def stalled_ns(self, now_ns: int) -> int:
        """How long no slice has ended although some are in flight, less what the longest block in flight may take; 0 if none are, or it moves."""
        if not self._running:
            return 0
        slot_bytes = max(pending.job.slot_bytes for pending in self._running.values())
        return max(0, now_ns - self._progress_ns - slot_bytes * 1_000_000_000 // SLOWEST_BYTES_PER_S)

    def late_count(self, now_ns: int) -> int:
        """Jobs that were sent and are past their deadlines: nobody waits for them, and their slots are theirs until they end."""
        return sum(0 < pending.job.deadline_ns <= now_ns for pending in self._running.values())

    @property
    def running_count(self) -> int:
        """Jobs that were sent and do not wait for their engine."""
        return len(self._running)

    @property
    def moves(self) -> list[Move]:
        """The moves that have jobs here which run."""
        return list({pending.move.number: pending.move for pending in self._running.values()}.values())

    def abandon(self, move: Move, reason: Reason) -> None:
        """Jobs of this move that were not sent yet will not be; their blocks get this reason."""
        self._take_back([pending for pending in self._jobs_of.get(move.number, {}).values() if not pending.sent], reason)

    def _take_back(self, mine: list[_Pending], reason: Reason) -> None:
        if not mine:
            return
        self._queue.drop({pending.job.job for pending in mine})
        for pending in mine:
            self._finish(pending, reason)

    def _on_answer(self, answer: LaneAnswer, fds: list[int]) -> None:
        pending = self._jobs.get(answer.job)
        if pending is None:
            return
        if isinstance(answer, Copied):
            pending.move.on_copied(answer.job, answer.count)
            return
        if isinstance(answer, Parked):
            self._queue.park(answer.job)
            self._running.pop(answer.job, None)
            self._pump()
            return
        if isinstance(answer, Unparked):
            self._queue.unpark(answer.job)
            self._begin(pending)
            return
        assert isinstance(answer, SliceDone)
        assert self._run is not None
        self._progress_ns = clock.monotonic_ns()
        self._run.slice(answer, self._progress_ns)
        self._judge(pending, answer)
        count = len(answer.results) // RESULT_DTYPE.itemsize
        pending.left -= count
        if pending.left:
            pending.move.on_slice(answer, self._ways[answer.way], count)
            return
        self._forget(answer.job)
        pending.move.on_job_over(answer.job)
        pending.move.on_slice(answer, self._ways[answer.way], count)
        self._pump()

    def _judge(self, pending: _Pending, done: SliceDone) -> None:
        # Nearly always some block is good, and then its bytes say so; looking at the results takes µs.
        if done.payload_bytes:
            self._on_io(pending.writes, True)
        elif (np.frombuffer(done.results, dtype=RESULT_DTYPE)["reason"] == Reason.IO_ERROR).any():
            self._on_io(pending.writes, False)

    def _fail_sent(self) -> None:
        for pending in [pending for pending in self._jobs.values() if pending.sent]:
            self._finish(pending, Reason.WORKER_LOST)

    def _finish(self, pending: _Pending, reason: Reason) -> None:
        self._forget(pending.job.job)
        pending.move.fail(pending.job.job, pending.positions, int(reason))

    def _forget(self, job: int) -> None:
        """The job is over."""
        pending = self._jobs.pop(job)
        of_move = self._jobs_of[pending.move.number]
        del of_move[job]
        if not of_move:
            del self._jobs_of[pending.move.number]
        self._running.pop(job, None)
        self._queue.finish(job)
        if not self._jobs and self._run is not None:
            # Before the move hears of its last result: whoever waits for that may ask what the run was.
            run, self._run = self._run, None
            self._traffic.end(run, clock.monotonic_ns())

"""Which lanes have work, and what each achieves from idle to idle while nothing else moves on its device and its volume.

Only such a run says something of a way: beside other work it would tell of the load, and a way that is loaded would look slow next to one that nobody takes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from offloadd.model.enums import Path, Way
from offloadd.mover.messages import Job, Operation, SliceDone

#: Work without a result for so long is no load: its volume hangs, and the others shall be measured all the same. A slice takes milliseconds.
STALLED_NS = 5_000_000_000


@dataclass(slots=True)
class Run:
    """A lane's work from idle to idle. `volume` -1: the arena.

    `alone`: one operation of one move, and nothing beside it on device and volume. `io_bytes_wanted`: what it moves if all goes well.
    """

    device: str
    volume: int
    path: Path
    move: int
    operation: int
    durable: bool
    started_ns: int
    #: Of its latest job or result.
    moved_ns: int = 0
    alone: bool = True
    bounced: bool = False
    io_bytes_wanted: int = 0
    io_bytes: int = 0
    payload_bytes: int = 0
    #: The shortest time from submission to a slice's start: the engine's event, and the hand-over, are no part of the way.
    queue_ns: int = -1
    ended_ns: int = 0

    def __post_init__(self) -> None:
        self.moved_ns = self.started_ns

    def add(self, move: int, job: Job, block_count: int, now_ns: int) -> None:
        """One more job."""
        self.moved_ns = now_ns
        self.io_bytes_wanted += block_count * job.slot_bytes
        if (move, job.operation) != (self.move, self.operation):
            self.alone = False

    def slice(self, done: SliceDone, now_ns: int) -> None:
        """A slice of it is over."""
        self.moved_ns = now_ns
        self.io_bytes += done.io_bytes
        self.payload_bytes += done.payload_bytes
        # What failed before its I/O went no way at all.
        self.bounced |= self.path == Path.GDS and done.io_bytes > 0 and not Way(done.way).is_gds
        if self.queue_ns < 0 or done.queue_ns < self.queue_ns:
            self.queue_ns = done.queue_ns

    @property
    def seconds(self) -> float:
        """From the start of its first slice to the result of its last."""
        return max(0, self.ended_ns - self.started_ns - max(0, self.queue_ns)) / 1e9

    @property
    def counts(self) -> bool:
        """Whether it tells how fast the way is: alone, all of its bytes moved, and all by this path. Of evicts only durable ones, which write to the end."""
        whole = self.io_bytes == self.io_bytes_wanted and self.payload_bytes > 0
        return self.alone and whole and not self.bounced and (self.operation == Operation.RESTORE or (self.operation == Operation.EVICT and self.durable))


class Traffic:
    """The lanes with work. Owned by the event-loop thread; `on_run` hears each run that is over."""

    def __init__(self, on_run: Callable[[Run], None] = lambda _: None) -> None:
        self._on_run = on_run
        self._active: list[Run] = []
        #: Set whenever a run is over; whoever waits clears it first.
        self.ended = asyncio.Event()

    def begin(self, run: Run) -> None:
        """A lane that was idle has work."""
        for other in self._beside(run.device, run.volume):
            other.alone = False
            run.alone &= run.started_ns - other.moved_ns > STALLED_NS
        self._active.append(run)

    def end(self, run: Run, now_ns: int) -> None:
        """It is idle again."""
        # By identity: two runs may be equal.
        self._active = [other for other in self._active if other is not run]
        run.ended_ns = now_ns
        self._on_run(run)
        self.ended.set()

    def idle(self, device: str, volume: int, now_ns: int) -> bool:
        """Whether nothing moves on this device and nothing on this volume."""
        return all(now_ns - run.moved_ns > STALLED_NS for run in self._beside(device, volume))

    def _beside(self, device: str, volume: int) -> list[Run]:
        return [run for run in self._active if run.device == device or run.volume == volume]

"""One move of blocks on its way: what each block's result is so far, when its sources are free, and where the time went."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.model.enums import Path, Tier
from offloadd.model.slots import RESULT_DTYPE
from offloadd.mover.messages import SliceDone

#: In `Move.reasons`: no result yet.
PENDING = 0xFFFFFFFF


@dataclass(slots=True)
class StageClock:
    """Nanoseconds by stage. `queue_ns` is the longest wait of a slice; the others add up what all threads spent."""

    queue_ns: int = 0
    copy_ns: int = 0
    checksum_ns: int = 0
    io_ns: int = 0
    total_ns: int = 0

    def add(self, other: "StageClock | SliceDone") -> None:
        """Count one more slice, or another move of the same request."""
        self.queue_ns = max(self.queue_ns, other.queue_ns)
        self.copy_ns += other.copy_ns
        self.checksum_ns += other.checksum_ns
        self.io_ns += other.io_ns


@dataclass(slots=True)
class PathUse:
    """Bytes that really went one way."""

    tier: Tier
    path: Path
    block_count: int = 0
    payload_bytes: int = 0
    io_bytes: int = 0


@dataclass(slots=True)
class Move:
    """Blocks numbered 0..count-1 in flight on one or more lanes. Owned by the event-loop thread.

    `copied` becomes true when no source will be read any more; `done` when every block has a result, also when movers die. `wake` is set at every
    change; whoever waits clears it first.
    """

    number: int
    count: int
    reasons: npt.NDArray[np.uint32] = field(init=False)
    checksums: npt.NDArray[np.uint32] = field(init=False)
    clock: StageClock = field(default_factory=StageClock)
    uses: dict[tuple[Tier, Path], PathUse] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    copied: bool = False
    #: Set when it can't be proven that engine memory is not touched any more.
    quarantined: bool = False
    pending_count: int = field(init=False)
    _uncopied: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reasons = np.full(self.count, PENDING, dtype=np.uint32)
        self.checksums = np.zeros(self.count, dtype=np.uint32)
        self.pending_count = self.count
        if self.count == 0:
            self.copied = True
            self.finished.set()

    def sent(self, job: int, count: int) -> None:
        """A job with this many blocks belongs to the move."""
        self._uncopied[job] = count

    def on_copied(self, job: int, count: int) -> None:
        """The sources of `count` more blocks of a job are free."""
        left = self._uncopied.get(job, 0) - count
        if left > 0:
            self._uncopied[job] = left
        else:
            self._uncopied.pop(job, None)
        if not self._uncopied:
            self.copied = True
            self.wake.set()

    def on_slice(self, done: SliceDone, results: npt.NDArray[Any], tier: Tier, path: Path) -> None:
        """Results of one slice."""
        positions = results["position"]
        self.reasons[positions] = results["reason"]
        self.checksums[positions] = results["checksum"]
        self.clock.add(done)
        moved = int((results["reason"] == 0).sum())
        if moved:
            use = self.uses.setdefault((tier, path), PathUse(tier, path))
            use.block_count += moved
            use.payload_bytes += done.payload_bytes
            use.io_bytes += done.io_bytes
        self._settle(results.shape[0])

    def fail(self, job: int, positions: npt.NDArray[np.uint32], reason: int) -> None:
        """Blocks of a job that will never get a result of their own."""
        open_positions = positions[self.reasons[positions] == PENDING]
        self.reasons[open_positions] = reason
        self._uncopied.pop(job, None)
        if not self._uncopied:
            self.copied = True
        self._settle(open_positions.shape[0])

    def _settle(self, count: int) -> None:
        self.pending_count -= count
        assert self.pending_count >= 0, "a block got two results"
        if self.pending_count == 0:
            self.copied = True
            self.finished.set()
        self.wake.set()

    @property
    def done(self) -> bool:
        """Whether every block has a result."""
        return self.pending_count == 0


def results_of(done: SliceDone) -> npt.NDArray[Any]:
    """The results of a slice, RESULT_DTYPE."""
    return np.frombuffer(done.results, dtype=RESULT_DTYPE)

"""One move of blocks on its way: what each block's result is so far, when its sources are free, and where the time went."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from offloadd.model.enums import Path, Tier, Way
from offloadd.model.slots import RESULT_DTYPE
from offloadd.mover.messages import SliceDone

#: What tells ways apart in an answer.
WayName = tuple[Tier, Path, Way]

#: In place of a part's number; those are never negative.
_FILLING = -1
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
        if other.queue_ns > self.queue_ns:
            self.queue_ns = other.queue_ns
        self.copy_ns += other.copy_ns
        self.checksum_ns += other.checksum_ns
        self.io_ns += other.io_ns


@dataclass(slots=True)
class PathUse:
    """Bytes that really went one way. `path` AUTO: they are still on their way to cuFile, and which one that will be is not known yet."""

    tier: Tier
    path: Path
    way: Way
    block_count: int = 0
    payload_bytes: int = 0
    io_bytes: int = 0

    @property
    def name(self) -> WayName:
        """What tells it apart in an answer."""
        return self.tier, self.path, self.way


@dataclass(slots=True)
class _Used:
    """`unread`: results, RESULT_DTYPE, that were counted but not entered. Slices come by tens of thousands a second, and NumPy takes as long for one of
    them as for a hundred: they are entered when somebody looks."""

    use: PathUse
    clock: StageClock = field(default_factory=StageClock)
    unread: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Move:
    """Blocks numbered 0..count-1 in flight on one or more lanes. Owned by the event-loop thread.

    `copied` becomes true when no source will be read any more; `done` when every block has a result, also when movers die. `wake` is set at every
    change; whoever waits clears it first.
    """

    number: int
    count: int
    #: Names of the devices whose movers have jobs of it.
    devices: set[str] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    copied: bool = False
    #: Set when it can't be proven that engine memory is not touched any more.
    quarantined: bool = False
    #: Called when some of its jobs stand still and may do so for long: what does not depend on them need not wait.
    on_stuck: Callable[[], None] = lambda: None
    pending_count: int = field(init=False)
    _reasons: npt.NDArray[np.uint32] = field(init=False)
    _checksums: npt.NDArray[np.uint32] = field(init=False)
    _used: dict[WayName, _Used] = field(default_factory=dict)
    _uncopied: dict[int, int] = field(default_factory=dict)
    _at_end: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reasons = np.full(self.count, PENDING, dtype=np.uint32)
        self._checksums = np.zeros(self.count, dtype=np.uint32)
        self.pending_count = self.count
        if self.count == 0:
            self.copied = True
            self.finished.set()

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call once every block has a result, before anybody who waits for that is woken; at once if that is so already."""
        if self.done:
            callback()
        else:
            self._at_end.append(callback)

    def sent(self, part: int, count: int) -> None:
        """A part with this many blocks, whose sources will be read, belongs to the move."""
        self._uncopied[part] = count

    def filling(self) -> None:
        """Parts are being queued: whatever becomes of the first of them at once, the move is not copied before `filled`."""
        self._uncopied[_FILLING] = 1

    def filled(self) -> None:
        """All parts have been queued."""
        self.on_copied(_FILLING, 1)

    def on_copied(self, part: int, count: int) -> None:
        """The sources of `count` more blocks of a part are free."""
        left = self._uncopied.get(part, 0) - count
        if left > 0:
            self._uncopied[part] = left
        else:
            self._uncopied.pop(part, None)
        if not self._uncopied:
            self.copied = True
            self.wake.set()

    @property
    def reasons(self) -> npt.NDArray[np.uint32]:
        """By block: 0 moved, PENDING, else a `Reason`. Writable."""
        self._read()
        return self._reasons

    @property
    def checksums(self) -> npt.NDArray[np.uint32]:
        """By block: CRC32C of the payload, where its result is there."""
        self._read()
        return self._checksums

    @property
    def uses(self) -> dict[WayName, PathUse]:
        """What was moved by which way so far; ways by which nothing was are left out."""
        self._read()
        return {name: used.use for name, used in self._used.items() if used.use.block_count}

    @property
    def clocks(self) -> list[tuple[PathUse, StageClock]]:
        """Each way that slices went, or failed on, and where their time went so far."""
        self._read()
        return [(used.use, used.clock) for used in self._used.values()]

    def _read(self) -> None:
        for used in self._used.values():
            if not used.unread:
                continue
            results = np.frombuffer(b"".join(used.unread), dtype=RESULT_DTYPE)
            used.unread.clear()
            positions, reasons = results["position"], results["reason"]
            self._reasons[positions] = reasons
            self._checksums[positions] = results["checksum"]
            used.use.block_count += results.shape[0] - int(np.count_nonzero(reasons))

    def on_slice(self, done: SliceDone, name: WayName, count: int) -> None:
        """Results of one slice of `count` blocks that went this way."""
        used = self._used.get(name)
        if used is None:
            used = self._used[name] = _Used(PathUse(*name))
        used.unread.append(done.results)
        used.clock.add(done)
        use = used.use
        if done.payload_bytes:
            use.payload_bytes += done.payload_bytes
            use.io_bytes += done.io_bytes
        self._settle(count)

    def fail(self, positions: npt.NDArray[np.uint32], reason: int) -> None:
        """Blocks that will never get a result of their own."""
        reasons = self.reasons
        open_positions = positions[reasons[positions] == PENDING]
        reasons[open_positions] = reason
        self._settle(open_positions.shape[0])

    def _settle(self, count: int) -> None:
        self.pending_count -= count
        assert self.pending_count >= 0, "a block got two results"
        if self.pending_count == 0:
            self.copied = True
            for callback in self._at_end:
                callback()
            self.finished.set()
        self.wake.set()

    @property
    def done(self) -> bool:
        """Whether every block has a result."""
        return self.pending_count == 0

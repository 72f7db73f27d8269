"""Slices: a job cut into pieces that each take one I/O, evenly over the lane's threads."""

import time
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from offloadd.model.enums import Reason, Way
from offloadd.model.slots import BLOCK_DTYPE, RESULT_DTYPE, Records
from offloadd.mover.messages import Job, Operation, SliceDone
from offloadd.mover.slot_io import BUFFERS_MAX
from offloadd.units import MIB

#: Longest piece of an arena job: 320 MiB reach 0.75 of memcpy in pieces of 4 MiB, 0.85 of 8 MiB and 0.94 of 16 MiB (messages and Python between them). One
#: piece takes 2 to 4 ms: as long may a restore wait for an evict.
ARENA_SLICE_BYTES = 16 * MIB

_ARENA_OPERATIONS = (Operation.ARENA_EVICT, Operation.ARENA_RESTORE)
#: Operations that pass one header page and one payload a block to the kernel.
_VECTORED_OPERATIONS = (Operation.SPILL, Operation.PREFETCH)


class Slice:
    """Some blocks of a job, in its order; for a volume: neighbouring slots. One thread owns it.

    `reasons` and `checksums` hold one number a block. The `spent_on_*` methods charge the time since the last of them to a stage.
    """

    __slots__ = (
        "_last_ns",
        "checksum_ns",
        "checksums",
        "copy_ns",
        #: Why its engine's event or flag can't be waited for.
        "failure",
        "io_bytes",
        "io_ns",
        "job",
        "operation",
        "queue_ns",
        "reasons",
        "records",
        "regions",
        "way",
    )

    def __init__(self, job: Job, operation: Operation, records: Records) -> None:
        self.job = job
        self.operation = operation
        self.records = records
        self.regions: list[int] = sorted(set(records["region"].tolist()))
        self.reasons = np.zeros(len(records), dtype=np.uint32)
        self.checksums = np.zeros(len(records), dtype=np.uint32)
        #: Of a lane that hands its bytes to cuFile: how they really went.
        self.way = Way.PLAIN
        self.failure: Exception | None = None
        self.queue_ns = self.copy_ns = self.checksum_ns = self.io_ns = self.io_bytes = self._last_ns = 0

    def start(self) -> None:
        """The owner begins to work."""
        self._last_ns = time.monotonic_ns()
        self.queue_ns = max(0, self._last_ns - self.job.submitted_ns) if self.job.submitted_ns else 0

    def spent_on_copy(self, *, checksum_ns: int = 0) -> None:
        """Time since the last call went into copies, and so much of it into checksums that were taken on the way."""
        self.copy_ns += max(0, self._lap() - checksum_ns)
        self.checksum_ns += checksum_ns

    def spent_on_checksum(self) -> None:
        """Time since the last call went into checksums and headers."""
        self.checksum_ns += self._lap()

    def spent_on_io(self, moved_bytes: int) -> None:
        """Time since the last call went into an I/O of `moved_bytes`."""
        self.io_ns += self._lap()
        self.io_bytes += moved_bytes

    def _lap(self) -> int:
        last, self._last_ns = self._last_ns, time.monotonic_ns()
        return self._last_ns - last

    def expired(self) -> bool:
        """Whether the job's deadline has passed."""
        return bool(self.job.deadline_ns) and time.monotonic_ns() >= self.job.deadline_ns

    def good(self) -> npt.NDArray[np.intp]:
        """Indices of the blocks that nothing has failed yet."""
        return np.flatnonzero(self.reasons == 0)

    def fail(self, reason: Reason) -> None:
        """Give every block without a reason this one."""
        self.reasons[self.reasons == 0] = reason

    def sampled(self, index: int) -> bool:
        """Whether this block's bytes in engine memory are to be compared."""
        return self.job.verify_target > 0 and int(self.records["position"][index]) % self.job.verify_target == 0

    def done(self) -> SliceDone:
        """The message that reports this slice."""
        results = np.zeros(len(self.records), dtype=RESULT_DTYPE)
        results["position"] = self.records["position"]
        results["reason"] = self.reasons
        results["checksum"] = self.checksums
        return SliceDone(
            job=self.job.job,
            results=results.tobytes(),
            queue_ns=self.queue_ns,
            copy_ns=self.copy_ns,
            checksum_ns=self.checksum_ns,
            io_ns=self.io_ns,
            payload_bytes=int(self.records["payload_bytes"][self.reasons == 0].sum()),
            io_bytes=self.io_bytes,
            way=int(self.way),
        )


def cut(job: Job, *, thread_count: int, staging_slot_bytes: int) -> list[Slice]:
    """The slices of a job. Raises ValueError when it can't be read (operation, record size, slot size)."""
    operation = Operation(job.operation)
    records: Records = np.frombuffer(job.blocks, dtype=BLOCK_DTYPE)
    count = len(records)
    if operation == Operation.NULL:
        bounds = [(0, count)]
    elif operation in _ARENA_OPERATIONS:
        total_bytes = int(records["payload_bytes"].sum())
        limit = max(1, ARENA_SLICE_BYTES * count // max(total_bytes, 1))
        bounds = _cut_runs([(0, count)], limit, thread_count)
    else:
        if job.slot_bytes < 1:
            raise ValueError(f"a volume job has slot_bytes {job.slot_bytes}; at least 1 is needed")
        # A slot longer than a staging slot passes through it chunk by chunk, one block a slice.
        limit = max(1, staging_slot_bytes // job.slot_bytes)
        if operation in _VECTORED_OPERATIONS:
            limit = min(limit, BUFFERS_MAX // 2)
        bounds = _cut_runs(_runs(records), limit, thread_count)
    return [Slice(job, operation, records[begin:end]) for begin, end in bounds if begin < end]


def _cut_runs(runs: Iterable[tuple[int, int]], limit: int, thread_count: int) -> list[tuple[int, int]]:
    """Cut runs of blocks into slices of at most `limit` blocks: as many for every thread, and within a run of equal length but for one block."""
    runs = list(runs)
    count = runs[-1][1]
    slice_count = -(-max(1, -(-count // limit)) // thread_count) * thread_count
    bounds = []
    for begin, end in runs:
        length = end - begin
        # The run's share of the slices, but no longer ones than fit, and none without a block.
        pieces = min(length, max(-(-length // limit), round(slice_count * length / max(count, 1))))
        bounds += [(begin + length * piece // pieces, begin + length * (piece + 1) // pieces) for piece in range(pieces)]
    return bounds


def _runs(records: Records) -> Iterator[tuple[int, int]]:
    """Maximal runs of neighbouring slots of one slab."""
    if len(records) == 1:
        yield 0, 1
        return
    slots = records["slot"].astype(np.int64)
    apart = (np.diff(slots) != 1) | (np.diff(records["slab"].astype(np.int64)) != 0)
    begin = 0
    for end in (np.flatnonzero(apart) + 1).tolist():
        yield begin, end
        begin = end
    yield begin, len(records)

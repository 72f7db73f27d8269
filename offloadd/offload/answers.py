"""Answers of the use cases: outcomes as arrays, in the order of the request."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.offload.moves import Move, PathUse, StageClock
from offloadd.scheduler.job_class import INTERACTIVE, JobClass


@dataclass(slots=True)
class Answer:
    """`status` holds EvictStatus or RestoreStatus numbers, `reason` Reason, `tier` Tier; one per block. `job_class`: whose turn the request took."""

    status: npt.NDArray[np.uint8]
    reason: npt.NDArray[np.uint8]
    tier: npt.NDArray[np.uint8]
    uses: list[PathUse] = field(default_factory=list)
    clock: StageClock = field(default_factory=StageClock)
    job_class: JobClass = INTERACTIVE

    @classmethod
    def of(cls, count: int, job_class: JobClass) -> "Answer":
        """An answer of `count` blocks that nothing is said of yet."""
        return cls(np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.uint8), job_class=job_class)

    @property
    def payload_bytes(self) -> int:
        """Bytes that were moved by now, and those of blocks answered COPIED that are on their way."""
        return sum(use.payload_bytes for use in self.uses)

    def tally(self) -> list[tuple[int, int, int, int]]:
        """(status, reason, tier, blocks) of each outcome that there is. Nearly always that is one."""
        packed = self.status.astype(np.uint32) << 16 | self.reason.astype(np.uint32) << 8 | self.tier
        if packed.shape[0] and (packed == packed[0]).all():
            values, counts = [int(packed[0])], [packed.shape[0]]
        else:
            values, counts = (array.tolist() for array in np.unique(packed, return_counts=True))
        return [(value >> 16, value >> 8 & 0xFF, value & 0xFF, count) for value, count in zip(values, counts, strict=True)]

    def add_clock(self, move: Move) -> None:
        """Time of one more move of the request."""
        for _, clock in move.clocks:
            self.clock.add(clock)

    def add_use(self, more: PathUse) -> None:
        """Bytes went a way; what went the same one before is added to."""
        for use in self.uses:
            if use.name == more.name:
                use.block_count += more.block_count
                use.payload_bytes += more.payload_bytes
                use.io_bytes += more.io_bytes
                return
        # A copy: the move's own goes on counting.
        self.uses.append(replace(more))

    def set(self, where: Any, status: int, reason: int | npt.NDArray[Any] = 0, tier: int | npt.NDArray[Any] = 0) -> None:
        """Say what became of these blocks."""
        self.status[where] = status
        self.reason[where] = reason
        self.tier[where] = tier

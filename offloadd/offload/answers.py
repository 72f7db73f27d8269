"""Answers of the use cases: outcomes as arrays, in the order of the request."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.offload.moves import PathUse, StageClock


@dataclass(slots=True)
class Answer:
    """`status` holds EvictStatus or RestoreStatus numbers, `reason` Reason, `tier` Tier; one per block."""

    status: npt.NDArray[np.uint8]
    reason: npt.NDArray[np.uint8]
    tier: npt.NDArray[np.uint8]
    uses: list[PathUse] = field(default_factory=list)
    clock: StageClock = field(default_factory=StageClock)

    @classmethod
    def of(cls, count: int) -> "Answer":
        """An answer of `count` blocks that nothing is said of yet."""
        return cls(np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.uint8), np.zeros(count, dtype=np.uint8))

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

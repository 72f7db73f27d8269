"""Answers of the use cases: outcomes as arrays, in the order of the request."""

from dataclasses import dataclass, field
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

    def set(self, where: Any, status: int, reason: int | npt.NDArray[Any] = 0, tier: int | npt.NDArray[Any] = 0) -> None:
        """Say what became of these blocks."""
        self.status[where] = status
        self.reason[where] = reason
        self.tier[where] = tier

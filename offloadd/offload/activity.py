"""What was done since the start, by class of work, and how long the latest of it took: what `offloadd top` shows."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from offloadd.scheduler.job_class import JobClass

#: Times that percentiles are made of. A hundredth of them is ten, so the p99 does not hang on one alone.
RECENT_MAX = 1000
#: How old they may be: what is shown as the present is no older than a minute.
RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the latest `count` times, in seconds; 0 for none."""

    count: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0


@dataclass(slots=True)
class ClassActivity:
    """One class. `done_count`: requests that were answered, and copies between the tiers that are over; `block_count` and `payload_bytes` of them, moved."""

    done_count: int = 0
    block_count: int = 0
    payload_bytes: int = 0
    #: (when it was over, how long it took), both in seconds.
    _recent: "deque[tuple[float, float]]" = field(default_factory=lambda: deque(maxlen=RECENT_MAX))

    def took(self, seconds: float, now_s: float) -> None:
        """One more is over."""
        self.done_count += 1
        self._recent.append((now_s, seconds))

    def moved(self, block_count: int, payload_bytes: int) -> None:
        """So much of it was moved."""
        self.block_count += block_count
        self.payload_bytes += payload_bytes

    def percentiles(self, now_s: float) -> Percentiles:
        """Of the latest RECENT_MAX times that are no older than RECENT_S; each of them is a time that something took."""
        seconds = [seconds for ended_s, seconds in self._recent if now_s - ended_s <= RECENT_S]
        if not seconds:
            return Percentiles()
        p50_s, p99_s = np.percentile(seconds, (50, 99), method="inverted_cdf").tolist()
        return Percentiles(len(seconds), p50_s, p99_s)


@dataclass(slots=True)
class Activity:
    """All classes, by their numbers, and what was found of what was asked for. Event-loop owned."""

    classes: list[ClassActivity] = field(default_factory=lambda: [ClassActivity() for _ in JobClass])
    #: Blocks that lookups asked for, and those that were held.
    looked_up_count: int = 0
    held_count: int = 0
    #: Blocks that restores asked for, and those that were restored.
    asked_count: int = 0
    restored_count: int = 0

"""Time: monotonic for everything that decides, wall time for display only.

CLOCK_MONOTONIC is one clock for all processes of a node, so a deadline made in the front means the same in a mover.
"""

import time


def monotonic_s() -> float:
    """Seconds on CLOCK_MONOTONIC."""
    return time.monotonic()


def monotonic_ns() -> int:
    """Nanoseconds on CLOCK_MONOTONIC."""
    return time.monotonic_ns()


def wall_ns() -> int:
    """Nanoseconds since the Unix epoch. Display only: it may jump."""
    return time.time_ns()

"""Classes of work, and the order in which they go."""

from dataclasses import dataclass
from enum import IntEnum


class JobClass(IntEnum):
    """Restores, then evicts."""

    #: Somebody waits for these blocks.
    INTERACTIVE = 0
    #: Restores that nobody waits for, and copies from a volume into the arena.
    PREFETCH = 1
    #: Decode stands still until these blocks are copied.
    PREEMPT = 2
    #: Evicts that nobody waits for.
    BACKGROUND = 3
    #: Copies from the arena to a volume.
    SPILL = 4


INTERACTIVE, PREFETCH, PREEMPT, BACKGROUND, SPILL = JobClass
#: Those that write to the tier.
EVICTS = (PREEMPT, BACKGROUND, SPILL)


@dataclass(frozen=True, slots=True)
class Precedence:
    """`order`: the classes, first ones first. `shares`: by class as they are numbered, one byte of it for so many bytes that go before it while it waits."""

    order: tuple[JobClass, ...]
    shares: tuple[int, ...]

    def below(self, job_class: JobClass) -> tuple[JobClass, ...]:
        """The classes that come after this one."""
        return self.order[self.order.index(job_class) + 1 :]

    def above(self, job_class: JobClass) -> tuple[JobClass, ...]:
        """The classes that come before it."""
        return self.order[: self.order.index(job_class)]


#: Restores before evicts. Preemptions have a larger share than what nobody waits for.
VOLUME_PRECEDENCE = Precedence(
    order=(INTERACTIVE, PREEMPT, PREFETCH, BACKGROUND, SPILL),
    shares=(1, 8, 4, 8, 8),
)
#: Into the arena a preemption takes milliseconds, and a whole engine waits for it: with restores first and a share of an eighth, 320 MiB beside steady restores
#: would take nine times as long as alone. Restores keep a quarter of what goes before them, so it takes 1.45 times as long, with 64 MiB of restores sent ahead.
ARENA_PRECEDENCE = Precedence(
    order=(PREEMPT, INTERACTIVE, PREFETCH, BACKGROUND, SPILL),
    shares=(4, 8, 1, 8, 8),
)

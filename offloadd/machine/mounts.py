"""The mount that a path lies on, from /proc/self/mountinfo alone: no system call here waits for the file system."""

import re
from dataclasses import dataclass

from offloadd.machine.system import System


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. `device` is `major:minor`; `options` holds those of the mount and of the file system."""

    point: str
    device: str
    kind: str
    source: str
    options: frozenset[str]

    def option(self, name: str) -> str | None:
        """The value of `name=value`; None if it is not there."""
        return next((option.partition("=")[2] for option in self.options if option.startswith(f"{name}=")), None)


def mounts(system: System) -> list[Mount]:
    """All mounts, in the order in which they were made."""
    found = []
    for line in (system.text("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if len(before) < 6 or len(after) < 2:
            continue
        options = frozenset(before[5].split(",")) | frozenset(after[2].split(",") if len(after) > 2 else ())
        found.append(Mount(point=_plain(before[4]), device=before[2], kind=after[0], source=_plain(after[1]), options=options))
    return found


def mount_of(system: System, name: str) -> Mount | None:
    """The mount that `name` lies on; of several at one point the last one, which hides the others."""
    best: Mount | None = None
    for mount in mounts(system):
        above = mount.point.rstrip("/")
        if (name == above or name.startswith(f"{above}/")) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

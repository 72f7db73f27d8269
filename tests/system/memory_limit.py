"""A control group with a memory limit, for a daemon under test. Needs root and the memory controller of cgroup v1."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..standin.controls import wait_until

CONTROLLER = Path("/sys/fs/cgroup/memory")


class MemoryLimit:
    """The group `path`. What is charged to it: all memory of its processes, the pages of shared memory and of files that they touched first."""

    def __init__(self, limit_bytes: int) -> None:
        own = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if "memory" in line.split(":")[1].split(","))
        self.path = CONTROLLER / own.lstrip("/") / f"offloadd-test-{os.getpid()}"
        self.limit_bytes = limit_bytes
        try:
            self.path.mkdir()
            (self.path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no memory cgroup of our own: {error}")

    @property
    def most_bytes(self) -> int:
        """The most that it ever held."""
        return int((self.path / "memory.max_usage_in_bytes").read_text())

    @property
    def refused_count(self) -> int:
        """How often the limit was reached; pages of files were given up then, or a process was killed."""
        return int((self.path / "memory.failcnt").read_text())

    def stat(self, name: str) -> int:
        """A figure of memory.stat, in bytes."""
        return next(int(value) for key, value in map(str.split, (self.path / "memory.stat").read_text().splitlines()) if key == name)

    @property
    def killed_count(self) -> int:
        """Processes that were killed because the limit was reached."""
        return next(int(value) for key, value in map(str.split, (self.path / "memory.oom_control").read_text().splitlines()) if key == "oom_kill")

    def close(self) -> None:
        """Give the group back once nobody is left in it."""
        wait_until(lambda: not (self.path / "cgroup.procs").read_text().split(), "the end of the daemon's processes")
        self.path.rmdir()


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[MemoryLimit]:
    """A group with this limit; skips where there can't be one."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a memory cgroup")
    if not (CONTROLLER / "memory.limit_in_bytes").exists():
        pytest.skip("the memory controller of cgroup v1 is not mounted")
    made = MemoryLimit(limit_bytes)
    try:
        yield made
    finally:
        made.close()

"""What a daemon's processes hold: memory, descriptors, threads, and what of theirs lies in the system."""

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Footprint:
    """Summed over the front and its workers. `private_bytes`: of smaps_rollup, what is theirs alone, plus swap; the pages of the arena and of engine memory,
    which they share with each other and with the test, are counted by `shared_bytes` (PSS less what is private)."""

    private_bytes: int
    shared_bytes: int
    fds: int
    threads: int
    processes: int
    #: Names under /dev/shm, everybody's.
    shm_files: int

    @classmethod
    def of(cls, front: int) -> "Footprint":
        """Of the front with this process id and all its descendants."""
        process = psutil.Process(front)
        pids = [front, *(child.pid for child in process.children(recursive=True))]
        rollups = [_rollup(pid) for pid in pids]
        private = sum(rollup["Private_Clean"] + rollup["Private_Dirty"] + rollup["Swap"] for rollup in rollups)
        return cls(
            private_bytes=private,
            shared_bytes=sum(rollup["Pss"] + rollup["Swap"] for rollup in rollups) - private,
            fds=sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
            threads=sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids),
            processes=len(pids),
            shm_files=len(list(Path("/dev/shm").iterdir())),
        )


def private_bytes(pid: int) -> int:
    """Of one process, what is its alone."""
    rollup = _rollup(pid)
    return rollup["Private_Clean"] + rollup["Private_Dirty"] + rollup["Swap"]


def _rollup(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}

"""A block device whose I/O hangs in the kernel, in D state, when a test says so: a loop device at one byte a second, by the cgroup of the test's processes.

Needs root, loop devices, and the blkio controller of cgroup v1. SIGKILL does not end what hangs here, as it does not on a lost NVMe-oF path; `lift` does,
at once.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..root import BLKIO, BLKIO_CONTROLLER, LOOP_DEVICES, needs_root
from ..standin.controls import wait_until


class Throttle:
    """The device `path`, and the switch of its hang. Processes that this one starts are in its cgroup."""

    def __init__(self, image: Path, size_bytes: int) -> None:
        with image.open("wb") as file:
            file.truncate(size_bytes)
        self.path = Path(subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=True).stdout.strip())
        number = self.path.stat().st_rdev
        self._device = f"{os.major(number)}:{os.minor(number)}"
        self._group = BLKIO_CONTROLLER / f"offloadd-test-{os.getpid()}"
        try:
            self._group.mkdir()
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            subprocess.run(["losetup", "--detach", str(self.path)], check=True)
            raise

    def hang(self) -> None:
        """From now on I/O on the device does not end."""
        self._set(1)

    def lift(self) -> None:
        """What hangs goes on."""
        self._set(0)

    def _set(self, bytes_per_s: int) -> None:
        for direction in ("read", "write"):
            (self._group / f"blkio.throttle.{direction}_bps_device").write_text(f"{self._device} {bytes_per_s}\n")

    def close(self) -> None:
        """Let everything go on, and give the device and the cgroup back once nobody is left who uses them."""
        self.lift()
        (BLKIO_CONTROLLER / "cgroup.procs").write_text(str(os.getpid()))
        wait_until(lambda: not (self._group / "cgroup.procs").read_text().split(), "the end of the daemon's processes")
        subprocess.run(["losetup", "--detach", str(self.path)], check=True)
        self._group.rmdir()


@contextmanager
def throttle(folder: Path, size_bytes: int) -> Iterator[Throttle]:
    """A device of this size; skips where there can't be one."""
    needs_root(LOOP_DEVICES, BLKIO)
    made = Throttle(folder / "image", size_bytes)
    try:
        yield made
    finally:
        made.close()


def threads_in_d_state(pid: int) -> int:
    """Threads of the process that wait for a device, and that no signal ends; none of one that is gone."""
    states = []
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states.count("D")

"""What is left of a process that was killed, by /proc alone: only what can't execute anything any more may be taken to be lost."""

import subprocess
import sys
from pathlib import Path

import pytest

from offloadd.machine.system import System
from offloadd.machine.tasks import Left, left_of

PENDING, NOT_PENDING = "0000000000000100", "0000000000000000"
LEADER = ("Z (zombie)", NOT_PENDING)
IN_KERNEL = ("D (disk sleep)", PENDING)


def left(root: Path, *tasks: tuple[str, str]) -> Left:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/status").touch()
    for number, (state, pending) in enumerate(tasks):
        task = root / "proc/7/task" / str(7 + number)
        task.mkdir(parents=True)
        # A pending signal of the whole process is no thread's yet.
        (task / "status").write_text(f"Name:\tpython\nState:\t{state}\nSigQ:\t1/100\nSigPnd:\t{pending}\nShdPnd:\t{PENDING}\n")
    return left_of(7, System(root))


def test_a_killed_process_whose_last_threads_wait_for_a_device_can_not_run(tmp_path: Path) -> None:
    assert left(tmp_path, LEADER, IN_KERNEL, ("X (dead)", NOT_PENDING), IN_KERNEL) is Left.IN_KERNEL


@pytest.mark.parametrize(
    "task",
    [
        ("R (running)", PENDING),
        ("S (sleeping)", PENDING),
        ("T (stopped)", PENDING),
        ("t (tracing stop)", PENDING),
        ("S (sleeping)", NOT_PENDING),
        # It waits for a device, and nobody has killed it: it goes on when the device answers.
        ("D (disk sleep)", NOT_PENDING),
    ],
)
def test_one_thread_that_may_run_makes_it_running(tmp_path: Path, task: tuple[str, str]) -> None:
    assert left(tmp_path, LEADER, IN_KERNEL, task) is Left.RUNNING


def test_a_zombie_and_a_process_that_was_waited_for_are_nothing(tmp_path: Path) -> None:
    assert left(tmp_path) is Left.NOTHING
    assert left(tmp_path, LEADER) is Left.NOTHING


def test_where_proc_tells_nothing_a_process_runs(tmp_path: Path) -> None:
    assert left_of(7, System(tmp_path)) is Left.RUNNING
    assert left(tmp_path, LEADER, IN_KERNEL) is Left.IN_KERNEL
    (tmp_path / "proc/7/task/8/status").unlink()
    assert left_of(7, System(tmp_path)) is Left.RUNNING


def test_a_real_process_runs_until_it_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    assert left_of(process.pid) is Left.RUNNING
    process.kill()
    process.wait()
    process.stdout.close()
    assert left_of(process.pid) is Left.NOTHING

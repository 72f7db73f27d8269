"""Threads with a descriptor table of their own: locks and sockets end with the threads that have them."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

from offloadd.ipc.descriptors import keep_only


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "volume"
    path.touch()
    return path


def open_fds() -> set[int]:
    found = set()
    for entry in Path("/proc/thread-self/fd").iterdir():
        try:
            if "/fd" not in str(entry.readlink()):
                found.add(int(entry.name))
        except FileNotFoundError:
            continue
    return found


def in_thread(work) -> object:  # type: ignore[no-untyped-def]
    answer: list[object] = []
    thread = threading.Thread(target=lambda: answer.append(work()))
    thread.start()
    thread.join()
    return answer[0]


def test_a_table_of_ones_own_has_what_was_kept_and_nothing_else_and_so_have_threads_that_are_started_in_it(path: Path) -> None:
    fds = [os.open(path, os.O_RDWR) for _ in range(6)]
    kept = {fds[1], fds[2], fds[5]}

    def work() -> tuple[bool, set[int], object]:
        return keep_only(kept), open_fds(), in_thread(open_fds)

    apart, mine, of_child = in_thread(work)  # type: ignore[misc]
    assert apart
    assert mine - {0, 1, 2} == kept and of_child == mine
    for fd in fds:
        # Here nothing was closed.
        os.close(fd)


def test_a_lock_is_held_for_as_long_as_the_thread_that_kept_it(path: Path) -> None:
    kept, other = (os.open(path, os.O_RDWR) for _ in range(2))
    fcntl.flock(kept, fcntl.LOCK_EX)
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        keep_only([kept])
        begun.set()
        over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    os.close(kept)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    over.set()
    thread.join()
    # The kernel lets a thread's table go a moment after Python has seen its end.
    fcntl.flock(other, fcntl.LOCK_EX)
    os.close(other)

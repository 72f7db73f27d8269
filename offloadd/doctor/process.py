"""One worker process, read line by line, each line within a time limit."""

import contextlib
import select
import subprocess
import sys
import tempfile
import time

import msgspec

from offloadd.doctor.messages import Task

#: A killed process that waits for nothing is gone within milliseconds; one that is not gone by then is left to the kernel.
_REAP_S = 1.0


class WorkerSilent(Exception):
    """No line came within the limit: something that the worker asked does not answer."""


class WorkerEnded(Exception):
    """The worker ended before its last line; the message says how."""


class WorkerProcess:
    """A context manager: leaving it kills the worker and waits for it a moment only, because one in D state would keep us waiting."""

    def __init__(self, task: Task, limit_s: float) -> None:
        self._task = task
        self._limit_s = limit_s
        self._buffer = b""

    def __enter__(self) -> "WorkerProcess":
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen([sys.executable, "-m", "offloadd.doctor.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            # Longer than a pipe's buffer or not: the worker reads to the end before it does anything else.
            self._process.stdin.write(msgspec.json.encode(self._task))
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # It has ended; reading its first line tells how.
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)

    def line(self) -> bytes:
        """The next line. Raises `WorkerSilent`, `WorkerEnded`."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._limit_s
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise WorkerSilent(f"no answer within {self._limit_s:g} s")
            piece = self._process.stdout.read1()  # type: ignore[attr-defined]
            if not piece:
                raise WorkerEnded(self._last_words())
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        try:
            status: int | str = self._process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            status = "unknown"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with status {status}{f': {lines[-1]}' if lines else ''}"

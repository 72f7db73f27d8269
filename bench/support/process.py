"""A program of the benchmarks in a process of its own, commanded over its standard input: one JSON line a command, one an answer."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec

from bench.support.machine import ROOT

Answer = dict[str, Any]


class CommandedError(RuntimeError):
    """What the process was asked for failed there; the text is its own."""


class Commanded:
    """The other end, a context manager: starts `python -m module` and hands it `setup`; `ready` is its first answer. Raises CommandedError."""

    def __init__(self, module: str, setup: Answer, environment: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=None if environment is None else dict(environment)
        )
        try:
            self.ready = self.ask(**setup)
        except BaseException:
            self.__exit__()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, **command: Any) -> Answer:
        """Send a command and wait for what came of it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # Why a process has ended is told below, by its status.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise CommandedError(f"{self._module} ended with status {self._process.wait(30)}")
        answer: Answer = msgspec.json.decode(line)
        if "error" in answer:
            raise CommandedError(answer["error"])
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


Handler = Callable[[Answer], Answer]


def obey(begin: Callable[[Answer, contextlib.ExitStack], tuple[Answer, Handler]]) -> None:
    """The commanded side: `begin` takes the setup and gives the first answer, and what answers every later command until the input ends.

    What it puts on the stack is undone then.
    Answers go to the standard output that the process was started with; whatever else prints there goes to the standard error.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(answer: Answer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    handle: Handler | None = None
    with contextlib.ExitStack() as held:
        for line in sys.stdin.buffer:
            try:
                command: Answer = msgspec.json.decode(line)
                if handle is None:
                    first, handle = begin(command, held)
                    say(first)
                else:
                    say(handle(command))
            except Exception as error:
                # The commanding process is told and decides; here nothing can be mended.
                say({"error": str(error) or type(error).__name__})

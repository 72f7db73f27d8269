"""`offloadd top` on a terminal of its own: keys, sizes, a daemon that goes away and comes back, and a terminal that is left as it was."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from offloadd.model.runtime import ADMIN_SOCKET
from offloadd.v1 import admin_pb2_grpc

from .test_cli import Admin, offloadd

WAIT_S = 60.0
OTHER_SCREEN, FIRST_SCREEN, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


class HeldAdmin(Admin):
    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()

    def Status(self, request: Any, context: Any) -> Any:
        self.go_on.wait(WAIT_S)
        return super().Status(request, context)


class FakeDaemon:
    """Answers every Status with the same, or, with `admin.go_on` cleared, none."""

    def __init__(self, runtime_dir: Path) -> None:
        self._address = f"unix:{runtime_dir / ADMIN_SOCKET}"
        self.admin = HeldAdmin()
        self.start()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(8))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.admin, self._server)  # type: ignore[no-untyped-call]
        assert self._server.add_insecure_port(self._address)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()


class Terminal:
    """`offloadd top` on a pseudo-terminal, and what it has written there so far."""

    def __init__(self, runtime_dir: Path, *, interval_s: float = 0.1, **environment: str) -> None:
        self.ours, self._theirs = pty.openpty()
        self.resize(80, 24)
        self.attributes = termios.tcgetattr(self._theirs)
        self.text = ""
        # The terminal becomes its controlling one, from which Ctrl-C and new sizes come, in a program of its own: a fork here would copy gRPC's threads.
        take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
        command = [sys.executable, "-m", "offloadd", "top", "--runtime-dir", str(runtime_dir), "--interval", str(interval_s)]
        base = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", take, *command],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={**base, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, *texts: str, timeout_s: float = WAIT_S) -> str:
        """Read until all of these stand in what comes from now on, and give that."""
        seen, end_s = "", time.monotonic() + timeout_s
        while not all(text in seen for text in texts):
            assert time.monotonic() < end_s and self.process.poll() is None, f"{texts} did not come: {self.text[-3000:]!r}"
            seen += self._read()
        return seen

    def _read(self) -> str:
        if not select.select([self.ours], [], [], 0.1)[0]:
            return ""
        text = os.read(self.ours, 65536).decode(errors="replace")
        self.text += text
        return text

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def end(self) -> int:
        """Its exit status, with all that it wrote read."""
        end_s = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end_s, "it does not end"
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def is_restored(self) -> bool:
        """Whether the terminal is as it was: the first screen, a cursor, and lines that are edited and echoed."""
        shown = self.text.rfind(FIRST_SCREEN) > self.text.rfind(OTHER_SCREEN) >= 0 and self.text.rfind(SHOW_CURSOR) > self.text.rfind("\x1b[?25l")
        return shown and termios.tcgetattr(self._theirs) == self.attributes

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self._theirs)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(tmp_path)
    yield daemon
    daemon.stop()


@pytest.fixture
def terminal(fake: FakeDaemon, tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("key", [b"q", b"Q", b"\x03"])
def test_a_key_ends_it_and_the_terminal_is_as_it_was(terminal: Terminal, key: bytes) -> None:
    terminal.wait_for("SERVING", "interactive", "mover host")
    terminal.press(b"x")
    terminal.wait_for("SERVING")
    terminal.press(key)
    assert terminal.end() == 0 and terminal.is_restored()
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_and_the_terminal_is_as_it_was(terminal: Terminal, number: signal.Signals) -> None:
    terminal.wait_for("SERVING")
    terminal.process.send_signal(number)
    assert terminal.end() == (0 if number == signal.SIGINT else 128 + number)
    assert terminal.is_restored() and "Traceback" not in terminal.text


def test_a_new_size_is_drawn_at_once(fake: FakeDaemon, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, interval_s=60)
    try:
        terminal.wait_for("SERVING", "mover host")
        assert "tenant" not in terminal.text
        terminal.resize(130, 40)
        # The columns of a wide terminal, before the next answer of the daemon.
        terminal.wait_for("tenant", "uid-1000", timeout_s=40)
    finally:
        terminal.close()


def test_a_daemon_that_goes_away_and_comes_back_is_told(terminal: Terminal, fake: FakeDaemon) -> None:
    terminal.wait_for("SERVING")
    fake.stop()
    seen = terminal.wait_for("no daemon is running", "for 1 s; asking again", "q quits")
    assert "interactive" not in seen[seen.index("no daemon is running") :], "figures of a daemon that is gone are shown"
    fake.start()
    terminal.wait_for("the daemon is back after", "(pid 4711)", "SERVING")
    terminal.press(b"q")
    assert terminal.end() == 0 and terminal.is_restored()


def test_a_daemon_that_does_not_answer_is_told_and_keys_are_read_meanwhile(terminal: Terminal, fake: FakeDaemon) -> None:
    terminal.wait_for("SERVING")
    fake.admin.go_on.clear()
    terminal.wait_for("no answer for 2 s: what stands here is as old", "SERVING")
    terminal.wait_for("the daemon does not answer", "asking again")
    fake.admin.go_on.set()
    terminal.wait_for("the daemon is back after", "SERVING")
    fake.admin.go_on.clear()
    terminal.wait_for("no answer for")
    terminal.press(b"q")
    assert terminal.end() == 0 and terminal.is_restored()
    fake.admin.go_on.set()


def test_it_waits_for_a_daemon_that_is_not_there_yet(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    try:
        terminal.wait_for("no daemon is running", "q quits")
        daemon = FakeDaemon(tmp_path)
        terminal.wait_for("SERVING")
        daemon.stop()
        terminal.press(b"q")
        assert terminal.end() == 0 and terminal.is_restored()
    finally:
        terminal.close()


def test_without_colours_the_words_say_it(fake: FakeDaemon, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, NO_COLOR="1")
    try:
        seen = terminal.wait_for("SERVING", "failed", "restarting")
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", seen), "a colour was set"
    finally:
        terminal.close()


def test_away_from_a_terminal_it_prints_one_frame(fake: FakeDaemon, tmp_path: Path) -> None:
    for arguments in ((), ("--once",)):
        done = offloadd("top", "--runtime-dir", tmp_path, "--interval", "0.1", *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("SERVING") == 1 and "\x1b" not in done.stdout and "rates of 0.1 s" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_one_frame_of_no_daemon_is_an_exit_status(tmp_path: Path) -> None:
    done = offloadd("top", "--runtime-dir", tmp_path, "--once")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", f"no daemon is running at {tmp_path}\n")


def test_a_wrong_interval_is_a_wrong_usage(tmp_path: Path) -> None:
    assert offloadd("top", "--interval", "0").returncode == 2

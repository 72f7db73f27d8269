"""`offloadd top`: what a running daemon holds and does, drawn anew every second until somebody presses q."""

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from offloadd.cli.grid import crop
from offloadd.cli.status import EXIT_NO_DAEMON, values_of
from offloadd.cli.tables import format_duration
from offloadd.cli.top_frame import Interval, Values, frame
from offloadd.errors import OffloaddError, Unavailable
from offloadd.model.runtime import runtime_dir_default

#: A daemon that has not answered by then does not answer; it answers in milliseconds.
ANSWER_S = 5.0
#: An answer that is so much later than it is due is said to be missing, and the frame to be old.
LATE_S = 1.0
#: How long it is said that the daemon is back.
BACK_S = 10.0
_QUIT_KEYS = b"qQ\x03\x04"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of asking: values, or why there are none."""

    values: Values | None
    why: str = ""


def show_top(
    runtime_dir: Annotated[Path | None, typer.Option("--runtime-dir", metavar="DIR", help="Runtime directory of the daemon.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, metavar="SECONDS", help="Time between two frames.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, with the rates of one interval, and end. So it is done where the output is no terminal.")
    ] = False,
) -> None:
    """Show live what the daemon holds and does. q ends it. Exit status 3: no daemon is running (only with --once; else it is waited for)."""
    directory = runtime_dir if runtime_dir is not None else runtime_dir_default()
    console = Console(highlight=False)
    if once or not console.is_terminal or console.is_dumb_terminal:
        _print_one(directory, interval, console)
    else:
        _Top(directory, interval, console).run()


def _print_one(directory: Path, interval_s: float, console: Console) -> None:
    from offloadd.client import AdminClient

    try:
        with AdminClient(directory, timeout_s=ANSWER_S) as admin:
            before = values_of(admin.status())
            time.sleep(interval_s)
            now = values_of(admin.status())
    except Unavailable:
        print(f"no daemon is running at {directory}", file=sys.stderr)
        raise typer.Exit(EXIT_NO_DAEMON) from None
    # Nothing is left out for its height: what reads this is a file or a pipe, unless somebody asked for one frame on a terminal.
    height = console.height if console.is_terminal else 10_000
    for line in frame(Interval.of(before, now), width=console.width, height=height, right=f"rates of {interval_s:g} s"):
        console.print(line, no_wrap=True, crop=False)


class _Asker(threading.Thread):
    """Asks the daemon every `interval_s`, beside the thread that draws: a daemon that does not answer must not keep keys from being read.

    `answer` is the latest one; each is announced by a byte to `wake_fd`.
    """

    def __init__(self, directory: Path, interval_s: float, wake_fd: int) -> None:
        super().__init__(name="offloadd-top", daemon=True)
        self._directory = directory
        self._interval_s = interval_s
        self._wake_fd = wake_fd
        self._ending = threading.Event()
        self.answer: _Answer | None = None

    def run(self) -> None:
        """Until `end`."""
        from offloadd.client import AdminClient

        admin: Any = None
        due_s = time.monotonic()
        while not self._ending.wait(max(0.0, due_s - time.monotonic())):
            due_s = max(due_s + self._interval_s, time.monotonic())
            try:
                admin = admin or AdminClient(self._directory, timeout_s=ANSWER_S)
                self.answer = _Answer(values_of(admin.status()))
            except OffloaddError as error:
                self.answer = _Answer(None, "no daemon is running" if isinstance(error, Unavailable) else f"the daemon does not answer: {error}")
                # A new channel: an old one waits longer and longer until it tries again.
                if admin is not None:
                    admin.close()
                admin = None
            except Exception as error:
                # A thread that ends would leave a frame that looks like the present.
                self.answer = _Answer(None, f"the daemon's answer can't be read: {error!r}")
            with suppress(OSError):
                os.write(self._wake_fd, b"a")

    def end(self) -> None:
        """Ask no more. An answer that is waited for is not waited for any longer."""
        self._ending.set()


class _Top:
    def __init__(self, directory: Path, interval_s: float, console: Console) -> None:
        self._directory = directory
        self._interval_s = interval_s
        self._console = console
        self._interval: Interval | None = None
        self._why = "asking the daemon"
        #: When it was seen to be gone, and when it was seen again.
        self._gone_s = 0.0
        self._back_s = 0.0
        self._back = ""
        self._answered_s = time.monotonic()
        self._seen = False

    def run(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        asker = _Asker(self._directory, self._interval_s, wake_write)
        with _keys() as keys, _signals(wake_write), suppress(KeyboardInterrupt), Live(console=self._console, screen=True, auto_refresh=False) as live:
            asker.start()
            seen: _Answer | None = None
            while True:
                live.update(Group(*self._lines()), refresh=True)
                readable, _, _ = select.select([wake_read, *keys], [], [], LATE_S)
                if wake_read in readable:
                    os.read(wake_read, 4096)
                if any(fd in readable and _is_quit(fd) for fd in keys):
                    break
                if asker.answer is not None and asker.answer is not seen:
                    seen = asker.answer
                    self._take(seen)
        asker.end()

    def _take(self, answer: _Answer) -> None:
        now_s = self._answered_s = time.monotonic()
        if answer.values is None:
            if self._interval is not None or not self._gone_s:
                self._gone_s = now_s
            self._why, self._interval = answer.why, None
            return
        if self._gone_s:
            there = "is back" if self._seen else "is there"
            self._back = f"the daemon {there} after {format_duration(now_s - self._gone_s)} (pid {answer.values['pid']})"
            self._back_s, self._gone_s = now_s, 0.0
        elif self._interval is not None and self._interval.now["pid"] != answer.values["pid"]:
            self._back, self._back_s = f"the daemon was restarted (pid {answer.values['pid']})", now_s
        self._seen = True
        self._interval = Interval.of(self._interval.now if self._interval is not None else None, answer.values)

    def _lines(self) -> list[Text]:
        width, height = self._console.width, self._console.height
        if self._interval is None:
            lines = [Text(self._why, style="bold red" if self._gone_s else ""), Text(str(self._directory))]
            if self._gone_s:
                lines.append(Text(f"for {format_duration(time.monotonic() - self._gone_s)}; asking again every {self._interval_s:g} s; q quits"))
            return [crop(line, width) for line in lines]
        silent_s = time.monotonic() - self._answered_s
        notice = self._back if self._back and time.monotonic() - self._back_s < BACK_S else ""
        if silent_s > self._interval_s + LATE_S:
            notice = f"no answer for {format_duration(silent_s)}: what stands here is as old"
        # The last line stays free: some terminals scroll when it is full.
        return frame(self._interval, width=width, height=height - 1, notice=notice, right=f"every {self._interval_s:g} s, q quits")


def _is_quit(fd: int) -> bool:
    pressed = os.read(fd, 256)
    # Nothing: the terminal is gone.
    return not pressed or any(key in _QUIT_KEYS for key in pressed)


@contextmanager
def _keys() -> Iterator[list[int]]:
    """Where keys come from, one by one and unseen; nothing if the input is no terminal."""
    if not sys.stdin.isatty():
        yield []
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield [fd]
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _signals(wake_fd: int) -> Iterator[None]:
    """A new size is drawn at once, and an end by a signal gives the terminal back as it was."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {
        signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, end),
        signal.SIGHUP: signal.signal(signal.SIGHUP, end),
        # Stopped in the middle of it the shell would be left on the other screen.
        signal.SIGTSTP: signal.signal(signal.SIGTSTP, signal.SIG_IGN),
    }
    wake_before = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wake_before)
        for number, handler in before.items():
            signal.signal(number, handler)

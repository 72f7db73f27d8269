"""A worker process and its control socket: spawned, never forked; restarted when it has died.

running ──a socket ends, SIGKILL, it exits──▶ ending ──it can't touch memory any more──▶ lost (`on_lost`) ──after a pause──▶ running
   └──it has closed its memory: `supersede`──────────────────────────────────────────────▶ lost ──at once──▶ running

**Lost** is more than a closed socket: either the kernel has given its exit status; or, of a worker whose code alone changes memory, what is left of it was
killed and waits in the kernel (`machine.tasks`). What is left is kept in `lost` until it is gone, and holds what its system calls hold.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import structlog

from offloadd.ipc.channel import AsyncChannel, socket_pair
from offloadd.machine.tasks import Left, left_of

Incoming = TypeVar("Incoming")

#: Pause before a restart, doubling up to the maximum while the worker keeps dying; back to the first after it lived for RESTART_RESET_S.
RESTART_PAUSE_S = 0.05
RESTART_PAUSE_MAX_S = 5.0
RESTART_RESET_S = 10.0
#: Between two looks at a process that is ending: it takes milliseconds as a rule, and for ever if its main thread waits for a device.
ENDING_LOOK_S = 0.002
ENDING_LOOK_S_MAX = 0.25
#: One that has closed its sockets and is still there after so long is killed: an interpreter that hangs at its end.
ENDING_WAIT_S = 5.0

log = structlog.get_logger()


class _Running:
    """One process of a worker."""

    def __init__(self, process: "subprocess.Popen[bytes]", life_fd: int, started_s: float) -> None:
        self.process = process
        #: Its other end is open in the table of the worker's main thread: readable once that is gone.
        self.life_fd = life_fd
        self.started_s = started_s
        self.pidfd = os.pidfd_open(process.pid)
        self.gone = asyncio.Event()
        #: It is lost, or gone.
        self.over = asyncio.Event()
        self.ending = False
        self.ending_s = 0.0
        self._loop = asyncio.get_running_loop()

    def watch(self, on_end: Callable[[], None], on_gone: Callable[[], None]) -> None:
        def gone() -> None:
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            # A zombie must not be left behind. Readable means that this does not wait.
            self.process.wait()
            self._forget_life()
            self.gone.set()
            self.over.set()
            on_gone()

        def ended() -> None:
            self._forget_life()
            on_end()

        self._loop.add_reader(self.pidfd, gone)
        self._loop.add_reader(self.life_fd, ended)

    def _forget_life(self) -> None:
        if self.life_fd >= 0:
            self._loop.remove_reader(self.life_fd)
            os.close(self.life_fd)
            self.life_fd = -1


class WorkerProcess(Generic[Incoming]):
    """`python -m module --fd N [arguments]` at the other end of a channel.

    `on_start()` runs each time a fresh process is there to be told what it must know; `on_message` for its messages; `on_lost()` when it is lost, before it is
    started again. `code_alone`: nothing but its code, and system calls into memory of its own, reads or writes memory that others use, so that it is lost once
    its code can't run. Not so where a device is told to copy (a GPU), or where the next process writes the same sectors (a keeper): these are lost when they
    are gone.
    """

    def __init__(
        self,
        *,
        name: str,
        module: str,
        incoming: Any,
        on_start: Callable[[], None],
        on_message: Callable[[Incoming, list[int]], None],
        on_lost: Callable[[], None],
        environment: Mapping[str, str] | None = None,
        arguments: tuple[str, ...] = (),
        code_alone: bool = False,
        lost_max: int = 4,
    ) -> None:
        """`lost_max`: processes of which something is left; with so many there is no further one, since each holds its memory."""
        self.name = name
        self.restart_count = 0
        self._module = module
        #: Of the next process that is started.
        self.arguments = arguments
        self._incoming = incoming
        self._on_start = on_start
        self._on_message = on_message
        self._on_lost = on_lost
        self._environment = {**os.environ, **(environment or {})}
        self._code_alone = code_alone
        self._lost_max = lost_max
        self._running: _Running | None = None
        self._channel: AsyncChannel[Incoming] | None = None
        #: Process ids of earlier ones that were killed and are not gone.
        self.lost: list[int] = []
        self._stopping = False
        #: The process was told to end, for another one to take its place.
        self._renewing = False
        self._pause_s = RESTART_PAUSE_S
        self._restart: asyncio.TimerHandle | None = None
        #: What is to be done once there is room for one more process.
        self._waiting: Callable[[], None] | None = None

    def start(self) -> None:
        """Spawn the process and tell `on_start`. Raises OSError; there is none then."""
        ours, theirs = socket_pair()
        life_ours, life_theirs = os.pipe()
        loop = asyncio.get_running_loop()
        try:
            # A new process group: Ctrl-C in a terminal is the front's to handle, which then stops its workers in order.
            process = subprocess.Popen(
                [sys.executable, "-m", self._module, "--fd", str(theirs.fileno()), *self.arguments],
                pass_fds=[theirs.fileno(), life_theirs],
                stdin=subprocess.DEVNULL,
                env=self._environment,
                process_group=0,
            )
        except BaseException:
            os.close(life_ours)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(life_theirs)
        try:
            running = self._running = _Running(process, life_ours, loop.time())
        except BaseException:
            process.kill()
            process.wait()
            os.close(life_ours)
            ours.close()
            raise
        running.watch(lambda: self._ends(running), lambda: self._gone(running))
        self._channel = AsyncChannel(ours, self._incoming, on_message=self._on_message, on_close=lambda: self._ends(running))
        self._on_start()

    @property
    def pid(self) -> int:
        """Process id, 0 while there is none."""
        return self._running.process.pid if self._running is not None else 0

    @property
    def alive(self) -> bool:
        """Whether there is a process that was not lost. What is sent to one that is ending is dropped, and `on_lost` will tell."""
        return self._running is not None

    @property
    def what_is_left(self) -> Left:
        """Of the present process."""
        return left_of(self.pid) if self._running is not None else Left.NOTHING

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send, or drop when the process is gone (`on_lost` has told)."""
        if self._channel is not None:
            self._channel.send(message, fds)

    def after_sent(self, callback: Callable[[], None]) -> None:
        """Call once all that was sent so far has left (or the process is gone): until then descriptors that go along must stay open."""
        if self._channel is None:
            callback()
        else:
            self._channel.after_sent(callback)

    # -- its end ---------------------------------------------------------------------------------------------------------------------

    def _ends(self, running: _Running) -> None:
        """A sign of its end: it is ending, or what is left of it can't run."""
        if running.ending:
            return
        running.ending = True
        running.ending_s = asyncio.get_running_loop().time()
        self._look(running, ENDING_LOOK_S)

    def look(self) -> None:
        """See whether the process was killed, and has left nothing but threads in the kernel: where these hold its sockets, nothing else tells."""
        if self._running is not None and self._code_alone and self.what_is_left is not Left.RUNNING:
            self._ends(self._running)

    def _look(self, running: _Running, pause_s: float) -> None:
        if self._running is not running:
            return
        if running.gone.is_set() or (self._code_alone and left_of(running.process.pid) is not Left.RUNNING):
            self._lose(running)
            return
        loop = asyncio.get_running_loop()
        if loop.time() - running.ending_s > ENDING_WAIT_S and not self._stopping:
            running.process.kill()
        loop.call_later(pause_s, self._look, running, min(2 * pause_s, ENDING_LOOK_S_MAX))

    def _gone(self, running: _Running) -> None:
        if self._running is running:
            running.ending = True
            self._lose(running)
        elif running.process.pid in self.lost:
            self.lost.remove(running.process.pid)
            log.info("what was left of a worker is gone", worker=self.name, pid=running.process.pid)
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                waiting()

    def _lose(self, running: _Running) -> None:
        self._drop(running)
        if self._stopping:
            return
        loop = asyncio.get_running_loop()
        if self._renewing:
            self._renewing = False
            self._restart = loop.call_later(RESTART_PAUSE_S, self._start_if_room)
            return
        if loop.time() - running.started_s > RESTART_RESET_S:
            self._pause_s = RESTART_PAUSE_S
        log.warning("worker died; restarting", worker=self.name, pause_s=self._pause_s, lost=len(self.lost))
        self._restart = loop.call_later(self._pause_s, self._start_again)
        self._pause_s = min(self._pause_s * 2, RESTART_PAUSE_MAX_S)

    def _drop(self, running: _Running) -> None:
        """It is lost. Whatever comes from it on this channel comes too late."""
        self._running = None
        channel, self._channel = self._channel, None
        if channel is not None:
            running.ending = True
            channel.close()
        if not running.gone.is_set():
            self.lost.append(running.process.pid)
            log.warning("a worker is lost and not gone; what it holds is not used until it is", worker=self.name, pid=running.process.pid)
        running.over.set()
        self._on_lost()

    def _start_again(self) -> None:
        self.restart_count += 1
        self._start_if_room()

    def _start_if_room(self) -> None:
        if len(self.lost) < self._lost_max:
            try:
                self.start()
            except OSError as error:
                # Of memory or descriptors that are short for the moment.
                log.error("worker can't be started; trying again", worker=self.name, error=str(error), pause_s=RESTART_PAUSE_MAX_S)
                self._restart = asyncio.get_running_loop().call_later(RESTART_PAUSE_MAX_S, self._start_if_room)
            return
        log.error("too many lost workers are not gone; there is no further one until one of them is", worker=self.name, lost=self.lost)
        self._waiting = self._start_if_room

    # -- ending it -------------------------------------------------------------------------------------------------------------------

    def renew(self, farewell: Any) -> None:
        """Have the process end, by a message that it ends at, and start another. Neither logged nor counted: none has died."""
        if self._channel is not None:
            self._renewing = True
            self.send(farewell)

    def replace(self) -> None:
        """As `renew`, by SIGKILL: for a process that does not read its messages. One that is stuck in the kernel ends when that lets go of it."""
        if self._channel is not None and self._running is not None:
            self._renewing = True
            self._running.process.kill()

    def kill(self) -> None:
        """SIGKILL; another one is started once it is lost."""
        if self._running is not None:
            self._running.process.kill()

    def supersede(self) -> None:
        """Start another one beside it, and kill it last. Only for one that is known not to touch memory any more."""
        running = self._running
        if running is None:
            return
        self._drop(running)
        self._start_again()
        running.process.kill()

    def expect_exit(self) -> None:
        """The process will end by itself: do not start it again."""
        self._stopping = True

    async def stop(self, *, timeout_s: float) -> None:
        """Close the control socket, at which a worker exits; kill it if it does not within `timeout_s`. What waits in the kernel is not waited for."""
        self._stopping = True
        self._waiting = None
        if self._restart is not None:
            self._restart.cancel()
        running = self._running
        if self._channel is not None:
            self._channel.close()
        if running is None:
            return
        try:
            await asyncio.wait_for(running.over.wait(), timeout_s)
        except TimeoutError:
            log.warning("worker does not exit; killing it", worker=self.name, pid=running.process.pid, timeout_s=timeout_s)
            running.process.kill()
            # A thread in D state survives SIGKILL; nobody can wait for it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.over.wait(), 1.0)

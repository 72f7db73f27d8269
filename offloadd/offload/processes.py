"""A worker process and its control socket: spawned, never forked; restarted when it dies."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import structlog

from offloadd.ipc.channel import AsyncChannel, socket_pair

Incoming = TypeVar("Incoming")

#: Pause before a restart, doubling up to the maximum while the worker keeps dying; back to the first after it lived for RESTART_RESET_S.
RESTART_PAUSE_S = 0.05
RESTART_PAUSE_MAX_S = 5.0
RESTART_RESET_S = 10.0

log = structlog.get_logger()


class WorkerProcess(Generic[Incoming]):
    """`python -m module --fd N [arguments]` at the other end of a channel.

    `on_start()` runs each time a fresh process is there to be told what it must know; `on_message` for its messages; `on_lost()` when it is gone,
    before it is started again.
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
    ) -> None:
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
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: AsyncChannel[Incoming] | None = None
        self._stopping = False
        #: The process was told to end, for another one to take its place.
        self._renewing = False
        self._pause_s = RESTART_PAUSE_S
        self._started_s = 0.0
        self._restart: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Spawn the process and tell `on_start`."""
        ours, theirs = socket_pair()
        loop = asyncio.get_running_loop()
        self._started_s = loop.time()
        try:
            # A new process group: Ctrl-C in a terminal is the front's to handle, which then stops its workers in order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, "--fd", str(theirs.fileno()), *self.arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._environment,
                process_group=0,
            )
        finally:
            theirs.close()
        self._channel = AsyncChannel(ours, self._incoming, on_message=self._on_message, on_close=self._closed)
        self._on_start()

    @property
    def pid(self) -> int:
        """Process id, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        """Whether messages can be sent."""
        return self._channel is not None

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

    def _closed(self) -> None:
        self._channel = None
        process, self._process = self._process, None
        self._on_lost()
        if process is not None:
            # The socket closes when the last thread of the process is gone, so this does not wait in practice; a zombie must not be left behind.
            asyncio.get_running_loop().run_in_executor(None, process.wait)
        if self._stopping:
            return
        if self._renewing:
            self._renewing = False
            self._restart = asyncio.get_running_loop().call_later(RESTART_PAUSE_S, self.start)
            return
        loop = asyncio.get_running_loop()
        if loop.time() - self._started_s > RESTART_RESET_S:
            self._pause_s = RESTART_PAUSE_S
        log.warning("worker died; restarting", worker=self.name, pause_s=self._pause_s)
        self._restart = loop.call_later(self._pause_s, self._start_again)
        self._pause_s = min(self._pause_s * 2, RESTART_PAUSE_MAX_S)

    def _start_again(self) -> None:
        self.restart_count += 1
        self.start()

    def renew(self, farewell: Any) -> None:
        """Have the process end, by a message that it ends at, and start another. Neither logged nor counted: none has died."""
        if self._channel is not None:
            self._renewing = True
            self.send(farewell)

    def replace(self) -> None:
        """As `renew`, by SIGKILL: for a process that does not read its messages. One that is stuck in the kernel ends when that lets go of it."""
        if self._channel is not None and self._process is not None:
            self._renewing = True
            self._process.kill()

    def expect_exit(self) -> None:
        """The process will end by itself: do not start it again."""
        self._stopping = True

    async def stop(self, *, timeout_s: float) -> None:
        """Close the control socket, at which a worker exits; kill it if it does not within `timeout_s`."""
        self._stopping = True
        if self._restart is not None:
            self._restart.cancel()
        process = self._process
        if self._channel is not None:
            self._channel.close()
        if process is None:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.run_in_executor(None, process.wait)
        try:
            await asyncio.wait_for(asyncio.shield(waiter), timeout_s)
        except TimeoutError:
            log.warning("worker does not exit; killing it", worker=self.name, pid=process.pid, timeout_s=timeout_s)
            process.kill()
            # A thread in D state survives SIGKILL; nobody can wait for it.
            await asyncio.wait([waiter], timeout=1.0)

"""Who is at the other end of a unix socket, and the news of its death.

Three ways, the best that the kernel has: SO_PEERPIDFD (6.5) names the very process that connected; pidfd_open names whoever has its number now, which
start time, uid and the still open socket must confirm; without pidfds /proc is looked at every half second.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offloadd.errors import NotAllowed

SO_PEERPIDFD = 77
_UCRED = struct.Struct("3i")

#: Half the 1 s that leaves the daemon another second to free what a dead process held (2 s are promised).
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of the process that connected, at the time of connect, as the kernel recorded them. `pid` is 0 if the daemon's pid namespace has no number for it."""

    pid: int
    uid: int
    gid: int


def credentials_of(sock: socket.socket) -> Credentials:
    """SO_PEERCRED of a connected unix socket."""
    return Credentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def start_time_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (field 22 of /proc/PID/stat); None if there is none, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command name in parentheses may hold spaces and parentheses itself; what follows the last one is plain.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def peer_pidfd(sock: socket.socket) -> int | None:
    """SO_PEERPIDFD, close-on-exec; None if the kernel has no such option. Raises NotAllowed if the process is gone already."""
    try:
        return int(sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
    except ProcessLookupError as error:
        raise NotAllowed("the process that connected is gone") from error
    except OSError:
        return None


def open_pidfd(sock: socket.socket, credentials: Credentials) -> int | None:
    """A pidfd by number, which is proven to be the process that connected; None if the kernel has no pidfds. Raises NotAllowed without that proof."""
    if credentials.pid <= 0:
        raise NotAllowed("the process that connected has no number in the daemon's pid namespace")
    before = start_time_ticks(credentials.pid)
    if before is None:
        raise NotAllowed(f"process {credentials.pid} is gone")
    try:
        pidfd = os.pidfd_open(credentials.pid)
    except ProcessLookupError as error:
        raise NotAllowed(f"process {credentials.pid} is gone") from error
    except OSError:
        return None
    # A number that was reused has another start time; one reused before `before` was read would need the first process to have died, and with it its
    # end of the socket.
    if start_time_ticks(credentials.pid) != before or _owner(credentials.pid) != credentials.uid or _hung_up(sock):
        os.close(pidfd)
        raise NotAllowed(f"process {credentials.pid} is not the one that connected any more")
    return pidfd


class PeerWatch:
    """Calls `on_death` once when the process behind the socket dies, on the event loop, until `close`. Raises NotAllowed if it can't be watched."""

    def __init__(self, sock: socket.socket, credentials: Credentials, on_death: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._pid = credentials.pid
        self._timer: asyncio.TimerHandle | None = None
        self._start_ticks: int | None = None
        self.pidfd = peer_pidfd(sock)
        if self.pidfd is None:
            self.pidfd = open_pidfd(sock, credentials)
        if self.pidfd is not None:
            self._loop.add_reader(self.pidfd, self._died)
            return
        self._start_ticks = start_time_ticks(self._pid)
        if self._start_ticks is None or _owner(self._pid) != credentials.uid or _hung_up(sock):
            raise NotAllowed(f"process {self._pid} is gone")
        self._timer = self._loop.call_later(POLL_S, self._look)

    def _look(self) -> None:
        if start_time_ticks(self._pid) == self._start_ticks:
            self._timer = self._loop.call_later(POLL_S, self._look)
        else:
            self._died()

    def _died(self) -> None:
        self.close()
        self._on_death()

    def close(self) -> None:
        """Stop watching. May be called again."""
        if self.pidfd is not None:
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _owner(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def _hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True

"""One end of a SEQPACKET socket that carries typed messages and file descriptors.

A message is one msgspec tagged union member, msgpack-encoded into one packet; descriptors ride along by SCM_RIGHTS. The kernel keeps packets whole
and in order, so there is no framing and several threads may send or receive at once.
"""

import array
import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

#: Largest packet. Linux refuses a packet longer than the socket's send buffer, whose default limit (net.core.wmem_max) is 208 KiB; half of it is
#: left for the kernel's own accounting.
MESSAGE_BYTES_MAX = 96 * 1024
#: Descriptors in one packet: as many as Linux lets SCM_RIGHTS carry (SCM_MAX_FD). GPU memory of virtual memory management has one for each 2 or 20 MiB, and
#: whatever a receiver leaves no room for, the kernel drops.
FDS_MAX = 253
#: Pause before another try when the user's descriptors in flight are more than RLIMIT_NOFILE: they get fewer as other peers receive theirs.
IN_FLIGHT_PAUSE_S = 0.02

Incoming = TypeVar("Incoming")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair with send buffers as large as the system lets us have."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    return pair


def receive_fds(sock: socket.socket, bytes_max: int, fds_max: int) -> tuple[bytes, list[int], int]:
    """One packet, its descriptors (close-on-exec, now the caller's to close) and the flags. Raises OSError.

    Not `socket.recv_fds`: CPython's ignores its flags (seen in 3.11), so that the descriptors would be inherited by every program started later.
    """
    data, ancillary, flags, _ = sock.recvmsg(bytes_max, socket.CMSG_LEN(fds_max * 4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), flags


def _encode(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    if len(data) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a {type(message).__name__} of {len(data)} bytes exceeds MESSAGE_BYTES_MAX {MESSAGE_BYTES_MAX}")
    return data


class Channel(Generic[Incoming]):
    """Blocking end, for worker processes. `incoming` is the union of the messages that the peer may send."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self.sock = sock
        self._decoder = msgspec.msgpack.Decoder(incoming)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send one message; blocks while the peer's queue is full. Raises OSError when the peer is gone."""
        data = _encode(message)
        if fds:
            socket.send_fds(self.sock, [data], list(fds))
        else:
            self.sock.send(data)

    def receive(self) -> tuple[Incoming, list[int]] | None:
        """The next message and its descriptors (close-on-exec, now ours to close), or None when the peer is gone."""
        try:
            data, fds, _ = receive_fds(self.sock, MESSAGE_BYTES_MAX, FDS_MAX)
        except (ConnectionResetError, BrokenPipeError):
            return None
        if not data:
            return None
        return self._decoder.decode(data), fds

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


class AsyncChannel(Generic[Incoming]):
    """Event-loop end, for the front. Sends never block: what the socket does not take waits in a queue that `backlog` shows."""

    def __init__(
        self,
        sock: socket.socket,
        incoming: Any,
        *,
        on_message: Callable[[Incoming, list[int]], None],
        on_close: Callable[[], None],
        takes_fds: bool = True,
    ) -> None:
        """`takes_fds` False: the peer passes no descriptors (the kernel would close them); a packet then costs half as much to receive."""
        sock.setblocking(False)
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._on_message = on_message
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[bytes, tuple[int, ...]] | Callable[[], None]] = deque()
        self._takes_fds = takes_fds
        self._closed = False
        #: The socket is full, and the loop tells when it is not.
        self._waiting_to_write = False
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def backlog(self) -> int:
        """Messages that wait because the peer does not read."""
        return len(self._queue)

    @property
    def closed(self) -> bool:
        """Whether the peer is gone or `close` was called."""
        return self._closed

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send or queue one message. Descriptors must stay open until it is sent, else it goes without them; the front keeps those it passes for as long as
        it may have to pass them again. Does nothing on a closed channel: `on_close` has told."""
        if self._closed:
            return
        self._append((_encode(message), tuple(fds)))

    def after_sent(self, callback: Callable[[], None]) -> None:
        """Call once all that was sent so far has left or the channel is closed: descriptors that were passed may be closed then."""
        if self._closed:
            callback()
        else:
            self._append(callback)

    def _append(self, item: tuple[bytes, tuple[int, ...]] | Callable[[], None]) -> None:
        self._queue.append(item)
        if len(self._queue) == 1:
            self._writable()

    def _writable(self) -> None:
        while self._queue:
            item = self._queue[0]
            if callable(item):
                self._queue.popleft()
                item()
                continue
            data, fds = item
            try:
                if fds:
                    socket.send_fds(self._sock, [data], list(fds))
                else:
                    self._sock.send(data)
            except BlockingIOError:
                if not self._waiting_to_write:
                    self._waiting_to_write = True
                    self._loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError as error:
                if error.errno == errno.EBADF and fds:
                    # Closed while it waited: a client that is gone. It may not cost others their worker; the receiver counts descriptors and refuses it.
                    self._queue[0] = (data, ())
                    continue
                if error.errno != errno.ETOOMANYREFS:
                    self.close()
                    return
                # The socket is not full, so the loop would call again at once.
                self._stop_waiting()
                self._loop.call_later(IN_FLIGHT_PAUSE_S, self._writable)
                return
            self._queue.popleft()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiting_to_write:
            self._waiting_to_write = False
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        # A bounded number of packets a turn, so that one busy worker can't keep the loop from the others.
        for _ in range(64):
            if self._closed:
                return
            fds: list[int] = []
            try:
                if self._takes_fds:
                    data, fds, _ = receive_fds(self._sock, MESSAGE_BYTES_MAX, FDS_MAX)
                else:
                    data = self._sock.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            if not data:
                self.close()
                return
            self._on_message(self._decoder.decode(data), fds)

    def close(self) -> None:
        """Close once and tell `on_close`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        waiting, self._queue = self._queue, deque()
        for item in waiting:
            if callable(item):
                item()
        self._on_close()

"""The client's end of the attach socket: a session, and the memory handed over to it. Blocking, and every step takes microseconds."""

import select
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from offloadd.client.cuda.memory import DeviceMemory
from offloadd.client.memory import HostMemory
from offloadd.errors import DaemonFailed, InvalidRequest, Unavailable
from offloadd.model.attach import (
    ATTACH_MESSAGE_BYTES_MAX,
    ATTACH_VERSION,
    Attach,
    AttachAnswer,
    AttachDeviceMemory,
    Attached,
    AttachMemory,
    AttachRequest,
    DetachMemory,
    MemoryAttached,
    MemoryDetached,
    Refused,
)
from offloadd.model.runtime import ATTACH_SOCKET, refuse_foreign_dir
from offloadd.model.status import error_of_kind

Answer = TypeVar("Answer", Attached, MemoryAttached, MemoryDetached)


class AttachLink:
    """One attached socket; the session lives as long as it. May be used from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._decoder = msgspec.json.Decoder(AttachAnswer)
        #: Metadata value of every call. A secret.
        self.token = ""
        self.session = ""
        self.tenant = ""

    @classmethod
    def connect(cls, runtime_dir: Path, instance: str, process: str, timeout_s: float) -> "AttachLink":
        """Attach once. Raises Unavailable (nobody listens, or no answer within `timeout_s`), NotAllowed (a directory that strangers may write to), or what
        the daemon refused with."""
        refuse_foreign_dir(runtime_dir)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        link = cls(sock)
        try:
            sock.settimeout(timeout_s)
            try:
                sock.connect(str(runtime_dir / ATTACH_SOCKET))
            except OSError as error:
                raise Unavailable(f"no daemon at {runtime_dir / ATTACH_SOCKET}: {error}") from error
            attached = link._ask(Attach(ATTACH_VERSION, instance, process), Attached)
        except BaseException:
            sock.close()
            raise
        link.token, link.session, link.tenant = attached.token, attached.session, attached.tenant
        return link

    def attach_memory(self, fd: int, memory_bytes: int) -> bytes:
        """Hand over a sealed memfd and get its id. Raises InvalidRequest, LimitExceeded, Unavailable."""
        return _memory_id(self._ask(AttachMemory(memory_bytes), MemoryAttached, [fd]))

    def attach_device_memory(self, memory: DeviceMemory) -> bytes:
        """Hand over GPU memory in chunks and get its id. Raises as `attach_memory`."""
        request = AttachDeviceMemory(memory.device_uuid, tuple(chunk.chunk_bytes for chunk in memory.chunks), memory.offset_bytes, memory.memory_bytes)
        return _memory_id(self._ask(request, MemoryAttached, memory.fds))

    def hand_over(self, memory: HostMemory | DeviceMemory) -> bytes:
        """Attach it, whichever it is. Raises as `attach_memory`."""
        return self.attach_device_memory(memory) if isinstance(memory, DeviceMemory) else self.attach_memory(memory.fd, memory.memory_bytes)

    def detach_memory(self, memory_id: bytes) -> None:
        """Let the daemon close the descriptors. Raises Unavailable."""
        self._ask(DetachMemory(memory_id.hex()), MemoryDetached)

    def wait_lost(self, timeout_s: float) -> bool:
        """Whether the daemon has hung up, or does so within `timeout_s`: then the session is over."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLRDHUP)
        except ValueError:
            return True
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Hang up, which ends the session. May be called again."""
        self._sock.close()

    def _ask(self, request: AttachRequest, expected: type[Answer], fds: Sequence[int] = ()) -> Answer:
        data = msgspec.json.encode(request)
        if len(data) > ATTACH_MESSAGE_BYTES_MAX:
            raise InvalidRequest(f"an attach message of {len(data)} bytes is too long; {ATTACH_MESSAGE_BYTES_MAX} is the most")
        with self._lock:
            try:
                if fds:
                    socket.send_fds(self._sock, [data], list(fds))
                else:
                    self._sock.send(data)
                reply = self._sock.recv(ATTACH_MESSAGE_BYTES_MAX)
            except OSError as error:
                # After a timeout a late answer would be taken for that of the next request.
                self._sock.close()
                raise Unavailable(f"the attach socket failed: {error}") from error
        if not reply:
            raise Unavailable("the daemon hung up on the attach socket")
        try:
            answer: AttachAnswer = self._decoder.decode(reply)
        except msgspec.DecodeError as error:
            raise DaemonFailed(f"the daemon's answer is not of the attach protocol: {error}") from error
        if isinstance(answer, Refused):
            raise error_of_kind(answer.kind, answer.error)
        if not isinstance(answer, expected):
            raise DaemonFailed(f"the daemon answered {type(answer).__name__} where {expected.__name__} was expected")
        return answer


def _memory_id(answer: MemoryAttached) -> bytes:
    try:
        return bytes.fromhex(answer.memory_id)
    except ValueError as error:
        raise DaemonFailed("the daemon answered a memory_id that is not hexadecimal") from error

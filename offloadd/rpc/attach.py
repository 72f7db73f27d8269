"""The attach socket: proves who a client is, takes its memory descriptors, and ends its session when the process or the socket ends.

    accepted ──attach──▶ attached ──EOF, death, table.end──▶ closed
        └──anything else, or attach_timeout_s──▶ closed

One SEQPACKET listener on the event loop, no threads. Nothing a client sends can do more than close its own connection.
"""

import asyncio
import fcntl
import os
import resource
import socket
import stat
from pathlib import Path
from typing import Any

import msgspec
import structlog

from offloadd.errors import ConfigError, InvalidRequest, LimitExceeded, OffloaddError
from offloadd.ipc.channel import FDS_MAX, receive_fds
from offloadd.memory.memfd import validate_sealed
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
from offloadd.offload.sessions import DeviceChunks, Session, SessionTable
from offloadd.rpc.peer import Credentials, PeerWatch, credentials_of

#: sun_path has 108 bytes with its closing zero.
SOCKET_PATH_BYTES_MAX = 107
F_SEAL_FUTURE_WRITE = 0x0010
#: Chunks of one memory, side by side: what fits into the signed 64 bits of messages and offsets, with room for sums.
MEMORY_BYTES_MAX = 1 << 62
#: Packets read and connections accepted in one turn of the loop, so that a busy client can't keep it from the others.
TURN_MAX = 16
#: Refused requests after which an attached socket is hung up on: each is a line in the log.
REFUSED_MAX = 100
#: Pause after accept found no free descriptor: the listener stays readable, and without a pause the loop would spin.
ACCEPT_PAUSE_S = 0.1


class _Version(msgspec.Struct):
    """What can be read of an `attach` of any version."""

    type: str
    version: int


class AttachServer:
    """Serves the attach protocol at `path`. `waiting_max` bounds connections that have not attached; each is closed after `attach_timeout_s`."""

    def __init__(self, path: Path, table: SessionTable, *, attach_timeout_s: float = 5.0, waiting_max: int = 64, mode: int = 0o660, logger: Any = None) -> None:
        self.path = path
        self.table = table
        self.attach_timeout_s = attach_timeout_s
        self.waiting_max = waiting_max
        self.mode = mode
        self.log: Any = logger if logger is not None else structlog.get_logger("attach")
        #: Connections that were refused or dropped without a session, since the start.
        self.refused_count = 0
        self._connections: set[_Connection] = set()
        #: Connections that have not attached yet.
        self.waiting_count = 0
        self._listener: socket.socket | None = None
        self._inode: int | None = None
        self._resume: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Bind and listen. The caller holds the daemon's lock, so a socket file of this name is a stale one. Raises ConfigError for an unusable path."""
        length_bytes = len(os.fsencode(self.path))
        if length_bytes > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(f"socket path {self.path} has {length_bytes} bytes; a unix socket's path has at most {SOCKET_PATH_BYTES_MAX}")
        _remove_stale(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        # The mode is set by the umask at bind, so that the socket is never open to more than it should be, not even between bind and chmod.
        umask = os.umask(0o777 & ~self.mode)
        try:
            listener.bind(str(self.path))
        except OSError as error:
            listener.close()
            raise ConfigError(f"can't bind {self.path}: {error}") from error
        finally:
            os.umask(umask)
        listener.listen(self.waiting_max)
        self._listener = listener
        self._inode = self.path.stat().st_ino
        self._listen()

    async def close(self) -> None:
        """Stop listening, end every session that attached here, remove the socket file unless another one has taken its name."""
        if self._listener is None:
            return
        if self._resume is not None:
            self._resume.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        for connection in list(self._connections):
            connection.close("the daemon stops")
        if self.path.exists() and self.path.stat().st_ino == self._inode:
            self.path.unlink()

    def _listen(self) -> None:
        assert self._listener is not None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(TURN_MAX):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self.log.warning("attach_accept_failed", error=str(error), pause_s=ACCEPT_PAUSE_S)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener.fileno())
                self._resume = loop.call_later(ACCEPT_PAUSE_S, self._listen)
                return
            sock.setblocking(False)
            try:
                if self.waiting_count >= self.waiting_max:
                    raise LimitExceeded(f"{self.waiting_count} connections wait to attach; waiting_max is {self.waiting_max}")
                self._connections.add(_Connection(self, sock))
                self.waiting_count += 1
            except OffloaddError as error:
                self.refused_count += 1
                self.log.warning("attach_refused", reason=str(error))
                _send(sock, Refused(type(error).__name__, str(error)))
                sock.close()

    def drop(self, connection: "_Connection") -> None:
        """Forget a connection that closed."""
        self._connections.discard(connection)
        self.waiting_count -= connection.session is None


class _Connection:
    """One accepted socket, its process watched from the first moment."""

    def __init__(self, server: AttachServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._refused_count = 0
        self.session: Session | None = None
        self.credentials: Credentials = credentials_of(sock)
        self._watch = PeerWatch(sock, self.credentials, lambda: self.close("its process died"))
        self._timer = self._loop.call_later(server.attach_timeout_s, self._silent)
        self._loop.add_reader(sock.fileno(), self._readable)

    def close(self, reason: str) -> None:
        """Hang up, and end the session if there is one."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self._watch.close()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._server.drop(self)
        if self.session is None:
            self._server.refused_count += 1
            self._server.log.info("attach_dropped", pid=self.credentials.pid, uid=self.credentials.uid, reason=reason)
        elif self._server.table.end(self.session, reason):
            self._server.log.info("session_ended", session=self.session.name, pid=self.credentials.pid, reason=reason)

    def _silent(self) -> None:
        error = f"no attach message within attach_timeout_s {self._server.attach_timeout_s:g}"
        _send(self._sock, Refused("DeadlineExpired", error))
        self.close(error)

    def _readable(self) -> None:
        for _ in range(TURN_MAX):
            if self._closed:
                return
            try:
                data, fds, flags = receive_fds(self._sock, ATTACH_MESSAGE_BYTES_MAX, FDS_MAX)
            except BlockingIOError:
                return
            except OSError as error:
                self.close(f"its socket failed: {error}")
                return
            try:
                if not data:
                    self.close("its socket was closed")
                    return
                self._take(data, fds, flags)
            finally:
                # What the session took over is off the list; nothing else that a client sends stays open.
                for fd in fds:
                    os.close(fd)

    def _take(self, data: bytes, fds: list[int], flags: int) -> None:
        answer: AttachAnswer
        refusal = ""
        try:
            answer = self._answer(_decode(data, flags, len(fds)), fds)
        except OffloaddError as error:
            refusal = str(error)
            answer = Refused(type(error).__name__, refusal)
            self._refused_count += 1
            self._server.log.info("attach_request_refused", pid=self.credentials.pid, uid=self.credentials.uid, reason=refusal)
        # A client that does not read its few answers until the socket is full gets no more of them.
        if not _send(self._sock, answer):
            self.close("it does not read its answers")
        elif refusal and (self.session is None or self._refused_count >= REFUSED_MAX):
            self.close(refusal)

    def _answer(self, request: AttachRequest, fds: list[int]) -> AttachAnswer:
        if isinstance(request, AttachDeviceMemory):
            _validate_chunks(request)
        fds_expected = len(request.chunk_bytes) if isinstance(request, AttachDeviceMemory) else 1 if isinstance(request, AttachMemory) else 0
        if len(fds) != fds_expected:
            raise InvalidRequest(f"{len(fds)} descriptors came with this message; {fds_expected} belong to it")
        if isinstance(request, Attach):
            return self._attach(request)
        if self.session is None:
            raise InvalidRequest("the first message must be attach")
        if isinstance(request, AttachMemory):
            _validate_memory(fds[0], request.memory_bytes)
            memory_id = self._server.table.attach_memory(self.session, fds[0], request.memory_bytes)
            fds.clear()
            return MemoryAttached(memory_id.hex())
        if isinstance(request, AttachDeviceMemory):
            chunks = DeviceChunks(request.device_uuid, request.chunk_bytes, request.offset_bytes)
            memory_id = self._server.table.attach_device_memory(self.session, tuple(fds), request.memory_bytes, chunks)
            fds.clear()
            return MemoryAttached(memory_id.hex())
        return self._detach(self.session, request)

    def _attach(self, request: Attach) -> Attached:
        if self.session is not None:
            raise InvalidRequest(f"this socket is attached as session {self.session.name} already")
        if request.version != ATTACH_VERSION:
            raise _wrong_version(request.version)
        session = self._server.table.create(
            tenant=f"uid:{self.credentials.uid}",
            instance=request.instance,
            uid=self.credentials.uid,
            pid=self.credentials.pid,
            process=request.process,
        )
        self._timer.cancel()
        self.session = session
        self._server.waiting_count -= 1
        session.at_end.append(self.close)
        self._server.log.info("session_attached", session=session.name, instance=request.instance, pid=session.pid, uid=session.uid, process=request.process)
        return Attached(session.token, session.name, session.tenant)

    def _detach(self, session: Session, request: DetachMemory) -> MemoryDetached:
        try:
            memory_id = bytes.fromhex(request.memory_id)
        except ValueError as error:
            raise InvalidRequest("memory_id is not hexadecimal") from error
        self._server.table.detach_memory(session, memory_id)
        return MemoryDetached()


_decoder = msgspec.json.Decoder(AttachRequest)
_version_decoder = msgspec.json.Decoder(_Version)


def _decode(data: bytes, flags: int, fd_count: int) -> AttachRequest:
    if flags & socket.MSG_TRUNC:
        raise InvalidRequest(f"message has more than {ATTACH_MESSAGE_BYTES_MAX} bytes; that is the largest")
    if flags & socket.MSG_CTRUNC:
        # There is room for as many as the kernel lets a message carry: what is missing, this process may not open.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise LimitExceeded(f"only {fd_count} descriptors of the message could be taken; the daemon may open {limit} files and has them open")
    try:
        request: AttachRequest = _decoder.decode(data)
        return request
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # An attach of another version may have fields that this one does not know: the version is the useful answer.
        try:
            of_any_version = _version_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            of_any_version = None
        if of_any_version is not None and of_any_version.type == "attach" and of_any_version.version != ATTACH_VERSION:
            raise _wrong_version(of_any_version.version) from None
        raise InvalidRequest(f"message of {len(data)} bytes is not of the attach protocol: {error}") from None


def _validate_memory(fd: int, memory_bytes: int) -> None:
    """Raise InvalidRequest unless the descriptor is a sealed memfd of exactly this size that a mover can map for writing."""
    size_bytes = validate_sealed(fd, memory_bytes)
    if size_bytes != memory_bytes or memory_bytes < 1:
        raise InvalidRequest(f"the memfd has {size_bytes} bytes; memory_bytes says {memory_bytes}")
    # Found out here, where the client can be told which memory it was, and not by the mover's failing mmap.
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise InvalidRequest("the memfd is not open for reading and writing")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & (fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE):
        raise InvalidRequest("the memfd is sealed against writing: nothing could be restored into it")


def _validate_chunks(request: AttachDeviceMemory) -> None:
    """Raise InvalidRequest unless the numbers fit together. Whether the descriptors are chunks of such sizes, only a driver can tell: a mover's."""
    count = len(request.chunk_bytes)
    if not 1 <= count <= FDS_MAX:
        raise InvalidRequest(f"the memory has {count} chunks; 1 to {FDS_MAX} are allowed, which is what one message carries")
    for number, chunk_bytes in enumerate(request.chunk_bytes):
        if chunk_bytes < 1:
            raise InvalidRequest(f"chunk {number} has {chunk_bytes} bytes; at least 1 is needed")
    total_bytes = sum(request.chunk_bytes)
    if total_bytes > MEMORY_BYTES_MAX:
        raise InvalidRequest(f"the chunks have {total_bytes} bytes; {MEMORY_BYTES_MAX} is the most")
    if request.offset_bytes < 0 or request.memory_bytes < 1 or request.offset_bytes + request.memory_bytes > total_bytes:
        raise InvalidRequest(f"memory of {request.memory_bytes} bytes at offset {request.offset_bytes} is outside its chunks of {total_bytes} bytes")


def _wrong_version(version: int) -> InvalidRequest:
    return InvalidRequest(f"attach version is {version}; this daemon speaks {ATTACH_VERSION}")


def _send(sock: socket.socket, answer: AttachAnswer) -> bool:
    data = msgspec.json.encode(answer)
    try:
        return sock.send(data) == len(data)
    except OSError:
        return False


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket")
    path.unlink()

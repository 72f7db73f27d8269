"""Who is attached: sessions, the memory they handed over, and the engine instances that they form.

A session is made by the attach socket, opened by its gRPC stream, and ended once, by whichever of process, socket and stream goes first. An engine
instance lives from its first session to its last. Owned by the event loop; no I/O but the closing of descriptors.
"""

import hashlib
import hmac
import os
import resource
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from offloadd.errors import InvalidRequest, LimitExceeded, UnknownSession

#: 256 bits: not guessable, and long enough that the digests of two tokens never meet.
TOKEN_BYTES = 32
#: Longest name of an instance or process, in UTF-8 bytes: they stand in logs and metrics.
NAME_BYTES_MAX = 128
#: Chunks of GPU memory, one descriptor each, that one session may hand over: 80 GiB in PyTorch's chunks of 20 MiB.
CHUNKS_PER_SESSION_MAX = 4096


@dataclass(frozen=True, slots=True)
class DeviceChunks:
    """GPU memory of virtual memory management: how much of each chunk counts, and where in them, side by side, the memory begins."""

    device_uuid: str
    chunk_bytes: tuple[int, ...]
    offset_bytes: int


@dataclass(slots=True)
class AttachedMemory:
    """A sealed memfd of a client, or GPU memory in chunks. `fds` are the daemon's own. `use_count` regions use it; a detached one is closed when none does."""

    fds: tuple[int, ...]
    memory_bytes: int
    #: None for a memfd.
    chunks: DeviceChunks | None = None
    use_count: int = 0
    detached: bool = False


@dataclass(eq=False, slots=True)
class Instance:
    """The processes of one engine of one tenant. Leases and keeps belong to it, by `ordinal`, which never names another one in the daemon's life."""

    key: tuple[str, str]
    ordinal: int
    #: Live sessions only; the instance is gone when it is empty.
    sessions: "dict[str, Session]" = field(default_factory=dict, repr=False)

    @property
    def tenant(self) -> str:
        """The tenant that all its sessions have."""
        return self.key[0]

    @property
    def name(self) -> str:
        """The name that its processes chose."""
        return self.key[1]


@dataclass(eq=False, slots=True)
class Session:
    """One attached process. Whoever knows `token` is it, so the token stays out of repr and logs; `name` is for those."""

    name: str
    token: str = field(repr=False)
    tenant: str
    uid: int
    pid: int
    process: str
    instance: Instance
    memories: dict[bytes, AttachedMemory] = field(default_factory=dict, repr=False)
    #: Its gRPC stream runs, or ran.
    opened: bool = False
    #: No call is served any more; its descriptors are closed.
    ended: bool = False
    #: Run once at its end, after `on_end`: the attach socket and the stream hang up here.
    at_end: list[Callable[[str], None]] = field(default_factory=list, repr=False)


class SessionTable:
    """All live sessions. `on_end` is called once for each that ends, while its descriptors are still open."""

    def __init__(
        self,
        *,
        sessions_max: int,
        memories_per_session_max: int,
        on_end: Callable[[Session], None],
        chunks_per_session_max: int = CHUNKS_PER_SESSION_MAX,
        memory_files_max: int | None = None,
    ) -> None:
        """`memory_files_max`: descriptors of memories (memfds and chunks) of all sessions; half of the files that the process may open if None, so that sockets
        and volumes find theirs."""
        self.sessions_max = sessions_max
        self.memories_per_session_max = memories_per_session_max
        self.chunks_per_session_max = chunks_per_session_max
        self.memory_files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 if memory_files_max is None else memory_files_max
        #: Descriptors of all memories that are held.
        self._memory_file_count = 0
        self._on_end = on_end
        #: By SHA-256 of the token: what a lookup's time tells about the digests in the table tells nothing about a token.
        self._by_digest: dict[bytes, Session] = {}
        self._instances: dict[tuple[str, str], Instance] = {}
        self._session_count = 0
        #: Sessions that `sessions_max` did not let in.
        self.refused_count = 0
        self._instance_count = 0

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def sessions(self) -> list[Session]:
        """Live sessions, oldest first."""
        return list(self._by_digest.values())

    @property
    def instances(self) -> list[Instance]:
        """Live engine instances, oldest first."""
        return list(self._instances.values())

    def create(self, *, tenant: str, instance: str, uid: int, pid: int, process: str = "") -> Session:
        """A new session, which joins the tenant's instance of this name or begins it. Raises InvalidRequest (names), LimitExceeded (sessions_max)."""
        _refuse_bad_name("instance", instance)
        if process:
            _refuse_bad_name("process", process)
        if len(self._by_digest) >= self.sessions_max:
            self.refused_count += 1
            raise LimitExceeded(f"{len(self._by_digest)} sessions are live; sessions_max is {self.sessions_max}")
        key = (tenant, instance)
        joined = self._instances.get(key)
        if joined is None:
            self._instance_count += 1
            joined = self._instances[key] = Instance(key, self._instance_count)
        self._session_count += 1
        token = secrets.token_hex(TOKEN_BYTES)
        session = Session(f"s-{self._session_count}", token, tenant, uid, pid, process, joined)
        joined.sessions[session.name] = session
        self._by_digest[_digest(token)] = session
        return session

    def by_token(self, token: str) -> Session:
        """The live session with this token. Raises UnknownSession, in a time that does not depend on how much of a token is right."""
        session = self._by_digest.get(_digest(token))
        if session is None or not hmac.compare_digest(session.token.encode(), token.encode(errors="replace")):
            raise UnknownSession("no live session has this token; attach again")
        return session

    def open(self, session: Session) -> bool:
        """Mark the session's stream as begun. False if it had begun before: a session has one stream in its life."""
        self._refuse_ended(session)
        first = not session.opened
        session.opened = True
        return first

    def attach_memory(self, session: Session, fd: int, memory_bytes: int) -> bytes:
        """Take over a validated descriptor and answer its 16-byte id. Raises LimitExceeded or UnknownSession; then `fd` stays the caller's."""
        return self._attach(session, AttachedMemory((fd,), memory_bytes))

    def attach_device_memory(self, session: Session, fds: tuple[int, ...], memory_bytes: int, chunks: DeviceChunks) -> bytes:
        """As `attach_memory`, for GPU memory: one descriptor a chunk. Raises InvalidRequest (device_uuid), too."""
        _refuse_bad_name("device_uuid", chunks.device_uuid)
        held = _chunk_count(session)
        if held + len(fds) > self.chunks_per_session_max:
            raise LimitExceeded(
                f"session {session.name} has {held} chunks of GPU memory and hands over {len(fds)}; chunks_per_session_max is {self.chunks_per_session_max}"
            )
        return self._attach(session, AttachedMemory(fds, memory_bytes, chunks))

    def _attach(self, session: Session, memory: AttachedMemory) -> bytes:
        self._refuse_ended(session)
        if len(session.memories) >= self.memories_per_session_max:
            raise LimitExceeded(f"session {session.name} has {len(session.memories)} memories; memories_per_session_max is {self.memories_per_session_max}")
        if self._memory_file_count + len(memory.fds) > self.memory_files_max:
            raise LimitExceeded(
                f"all sessions have {self._memory_file_count} descriptors of memories and session {session.name} hands over {len(memory.fds)}; "
                f"{self.memory_files_max} is the most, half of the files that the daemon may open (RLIMIT_NOFILE)"
            )
        self._memory_file_count += len(memory.fds)
        memory_id = secrets.token_bytes(16)
        session.memories[memory_id] = memory
        return memory_id

    def use_memory(self, session: Session, memory_id: bytes) -> AttachedMemory:
        """Count one region that uses the memory: its descriptors stay open until `disuse_memory`. Raises InvalidRequest for unknown or detached ids."""
        self._refuse_ended(session)
        memory = session.memories.get(memory_id)
        if memory is None or memory.detached:
            raise InvalidRequest(f"session {session.name} has no attached memory {memory_id.hex()}")
        memory.use_count += 1
        return memory

    def disuse_memory(self, session: Session, memory_id: bytes) -> None:
        """Undo one `use_memory`. Does nothing once the session has ended: its descriptors are closed."""
        memory = session.memories.get(memory_id)
        if memory is None:
            return
        assert memory.use_count > 0, "disuse_memory without use_memory"
        memory.use_count -= 1
        self._close_if_idle(session, memory_id, memory)

    def detach_memory(self, session: Session, memory_id: bytes) -> None:
        """Close the descriptors now, or when the last region stops using it. Unknown ids are no error: the memory is not attached."""
        memory = session.memories.get(memory_id)
        if memory is not None:
            memory.detached = True
            self._close_if_idle(session, memory_id, memory)

    def end(self, session: Session, reason: str) -> bool:
        """End the session: no token leads to it any more, `on_end` runs, its descriptors are closed, `at_end` runs with `reason`. False if it had ended."""
        if session.ended:
            return False
        session.ended = True
        del self._by_digest[_digest(session.token)]
        instance = session.instance
        del instance.sessions[session.name]
        if not instance.sessions:
            del self._instances[instance.key]
        try:
            self._on_end(session)
        finally:
            for memory in session.memories.values():
                self._close(memory)
            session.memories.clear()
            listeners, session.at_end = session.at_end, []
            for listener in listeners:
                listener(reason)
        return True

    def check(self) -> None:
        """Assert the invariants: instances hold exactly the live sessions, and none is empty."""
        held = [session for instance in self._instances.values() for session in instance.sessions.values()]
        assert len(held) == len(self._by_digest) <= self.sessions_max
        assert {session.name for session in held} == {session.name for session in self._by_digest.values()}
        assert all(instance.sessions and instance.key == key for key, instance in self._instances.items())
        assert not any(session.ended for session in held)
        assert all(len(session.memories) <= self.memories_per_session_max for session in held)
        assert all(_chunk_count(session) <= self.chunks_per_session_max for session in held)
        file_count = sum(len(memory.fds) for session in held for memory in session.memories.values())
        assert file_count == self._memory_file_count <= self.memory_files_max

    @staticmethod
    def _refuse_ended(session: Session) -> None:
        if session.ended:
            raise UnknownSession(f"session {session.name} has ended; attach again")

    def _close_if_idle(self, session: Session, memory_id: bytes, memory: AttachedMemory) -> None:
        if memory.detached and memory.use_count == 0:
            del session.memories[memory_id]
            self._close(memory)

    def _close(self, memory: AttachedMemory) -> None:
        self._memory_file_count -= len(memory.fds)
        for fd in memory.fds:
            os.close(fd)


def _chunk_count(session: Session) -> int:
    return sum(len(memory.fds) for memory in session.memories.values() if memory.chunks is not None)


def _digest(token: str) -> bytes:
    # Metadata may carry any text; "replace" keeps lone surrogates from raising, and the comparison afterwards is on the same bytes.
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _refuse_bad_name(what: str, name: str) -> None:
    length_bytes = len(name.encode(errors="replace"))
    if not 1 <= length_bytes <= NAME_BYTES_MAX:
        raise InvalidRequest(f"{what} name has {length_bytes} bytes; 1 to {NAME_BYTES_MAX} are allowed")
    if not name.isprintable():
        raise InvalidRequest(f"{what} name holds characters that can't be printed")

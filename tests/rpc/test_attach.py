import asyncio
import fcntl
import itertools
import json
import os
import resource
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from offloadd.errors import ConfigError, NotAllowed
from offloadd.memory.memfd import create_sealed
from offloadd.model.attach import ATTACH_MESSAGE_BYTES_MAX
from offloadd.offload.sessions import DeviceChunks, Session, SessionTable
from offloadd.rpc import attach as attach_module
from offloadd.rpc import peer
from offloadd.rpc.attach import AttachServer

#: Runs in a process of its own, with nothing of offloadd: attaches, hands a memory over, says what it was answered, and waits to be killed.
CHILD = """
import fcntl, json, os, socket, sys
fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 1 << 20)
fcntl.fcntl(fd, 1033, 7)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
s.send(json.dumps({"type": "attach", "version": 1, "instance": "engine", "process": "worker"}).encode())
print(s.recv(16384).decode(), flush=True)
socket.send_fds(s, [json.dumps({"type": "attach_memory", "memory_bytes": 1 << 20}).encode()], [fd])
print(s.recv(16384).decode(), flush=True)
sys.stdin.read()
"""


class Harness:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended: list[Session] = []
        self.table = SessionTable(sessions_max=3, memories_per_session_max=2, on_end=self.ended.append)
        self.server = AttachServer(path, self.table, attach_timeout_s=60, waiting_max=4)
        self.sockets: list[socket.socket] = []

    async def until(self, condition: Callable[[], object]) -> None:
        """The loop runs until the condition holds; a test that would wait for ever fails at this limit."""
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(self.path))
        sock.settimeout(60)
        self.sockets.append(sock)
        return sock

    async def ask(self, sock: socket.socket, message: dict[str, Any] | bytes, fds: list[int] | None = None) -> dict[str, Any]:
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        if fds:
            socket.send_fds(sock, [data], fds)
        else:
            sock.send(data)
        return await self.read(sock)

    async def read(self, sock: socket.socket) -> dict[str, Any]:
        data = await asyncio.to_thread(sock.recv, 65536)
        return dict(json.loads(data)) if data else {}

    async def attached(self, **changes: object) -> tuple[socket.socket, dict[str, Any]]:
        sock = self.connect()
        return sock, await self.ask(sock, {"type": "attach", "version": 1, "instance": "engine"} | changes)

    async def is_hung_up(self, sock: socket.socket) -> bool:
        return await self.read(sock) == {}


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    made = Harness(tmp_path / "attach.sock")
    await made.server.start()
    yield made
    for sock in made.sockets:
        sock.close()
    await made.server.close()


def open_fds() -> set[str]:
    return {f"{fd}:{os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}  # noqa: PTH110,PTH115,PTH208


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


async def spawn(path: Path) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, str(path), stdin=pipe, stdout=pipe)


async def line(child: asyncio.subprocess.Process) -> dict[str, Any]:
    assert child.stdout is not None
    return dict(json.loads(await child.stdout.readline()))


async def gone(child: asyncio.subprocess.Process) -> None:
    """Let the child, and what it forked, end, and its pipes be closed while the loop still runs."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()
    await child.stdout.read()
    await child.wait()


async def test_a_client_is_who_the_kernel_says_and_its_memory_arrives(harness: Harness) -> None:
    child = await spawn(harness.path)
    answer = await line(child)
    session = harness.table.by_token(answer["token"])
    assert (session.pid, session.uid, session.tenant) == (child.pid, os.getuid(), f"uid:{os.getuid()}")
    assert (answer["session"], answer["tenant"], session.process) == (session.name, session.tenant, "worker")
    memory = session.memories[bytes.fromhex((await line(child))["memory_id"])]
    (fd,) = memory.fds
    assert memory.memory_bytes == os.fstat(fd).st_size == 1 << 20
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    child.kill()
    await gone(child)


async def test_a_killed_client_ends_its_session_even_while_another_process_holds_its_socket(harness: Harness) -> None:
    # A fork inherits the socket, so no EOF comes: only the pidfd tells.
    forking = CHILD.replace("sys.stdin.read()", "if os.fork():\n    import signal; os.kill(os.getpid(), signal.SIGKILL)\nos.read(0, 1)")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", forking, str(harness.path), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    await line(child)
    await harness.until(lambda: harness.ended)
    assert harness.ended[0].pid == child.pid and len(harness.table) == 0
    await gone(child)


async def test_kill_9_ends_the_session_and_closes_its_memory(harness: Harness) -> None:
    child = await spawn(harness.path)
    await line(child)
    await line(child)
    (memory_fd,) = next(iter(harness.table.sessions[0].memories.values())).fds
    child.kill()
    await harness.until(lambda: harness.ended)
    assert harness.ended[0].ended and not is_open(memory_fd)
    await gone(child)


async def test_closing_the_socket_ends_the_session(harness: Harness) -> None:
    sock, _ = await harness.attached()
    sock.close()
    await harness.until(lambda: harness.ended)
    assert len(harness.table) == 0


async def test_ending_the_session_hangs_up_the_socket(harness: Harness) -> None:
    sock, answer = await harness.attached()
    harness.table.end(harness.table.by_token(answer["token"]), "test")
    assert await harness.is_hung_up(sock)
    assert len(harness.ended) == 1


@pytest.mark.parametrize("way", ["by_number", "by_proc"])
async def test_death_is_noticed_on_kernels_without_peerpidfd_and_without_pidfds(harness: Harness, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(peer, "peer_pidfd", lambda sock: None)
    monkeypatch.setattr(peer, "POLL_S", 0.01)
    if way == "by_proc":
        monkeypatch.setattr(peer, "open_pidfd", lambda sock, credentials: None)
    forking = CHILD.replace("sys.stdin.read()", "if os.fork():\n    import signal; os.kill(os.getpid(), signal.SIGKILL)\nos.read(0, 1)")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", forking, str(harness.path), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    await line(child)
    await harness.until(lambda: harness.ended)
    await gone(child)


async def test_a_pid_that_was_reused_is_not_taken_for_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    credentials = peer.credentials_of(ours)
    pidfd = peer.open_pidfd(ours, credentials)
    assert pidfd is not None
    os.close(pidfd)
    starts = iter([1, 2])
    with monkeypatch.context() as patch, pytest.raises(NotAllowed):
        patch.setattr(peer, "start_time_ticks", lambda pid: next(starts))
        peer.open_pidfd(ours, credentials)
    with pytest.raises(NotAllowed):
        peer.open_pidfd(ours, peer.Credentials(credentials.pid, credentials.uid + 1, 0))
    theirs.close()
    with pytest.raises(NotAllowed):
        peer.open_pidfd(ours, credentials)
    ours.close()


def unsealed(size_bytes: int, seals: int) -> int:
    fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


GOOD = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("make", "memory_bytes", "words"),
    [
        (lambda: unsealed(8192, 0), 8192, "seals"),
        (lambda: unsealed(8192, fcntl.F_SEAL_GROW), 8192, "F_SEAL_SHRINK"),
        (lambda: create_sealed("kv", 4096), 8192, "4096 bytes; 8192"),
        (lambda: create_sealed("kv", 8192), 4096, "8192 bytes; memory_bytes says 4096"),
        (lambda: unsealed(0, GOOD), 0, "0 bytes"),
        (lambda: create_sealed("kv", 8192), -1, "memory_bytes says -1"),
        (lambda: unsealed(8192, GOOD | fcntl.F_SEAL_WRITE), 8192, "against writing"),
        (lambda: os.open("/dev/null", os.O_RDWR), 8192, "not a memfd"),
        (lambda: os.open(f"/proc/self/fd/{create_sealed('kv', 8192)}", os.O_RDONLY), 8192, "reading and writing"),
    ],
)
async def test_memory_that_could_fault_or_lies_about_its_size_is_refused(harness: Harness, make: Callable[[], int], memory_bytes: int, words: str) -> None:
    sock, _ = await harness.attached()
    fd = make()
    before = len(open_fds())
    answer = await harness.ask(sock, {"type": "attach_memory", "memory_bytes": memory_bytes}, [fd])
    assert (answer["type"], answer["kind"]) == ("refused", "InvalidRequest") and words in answer["error"]
    await harness.until(lambda: len(open_fds()) == before)
    # The session goes on.
    good = create_sealed("kv", 4096)
    assert (await harness.ask(sock, {"type": "attach_memory", "memory_bytes": 4096}, [good]))["type"] == "memory_attached"


async def test_a_memory_over_the_limit_is_refused_and_its_descriptor_closed(harness: Harness) -> None:
    sock, _ = await harness.attached()
    fd = create_sealed("kv", 4096)
    for _ in range(2):
        assert (await harness.ask(sock, {"type": "attach_memory", "memory_bytes": 4096}, [fd]))["type"] == "memory_attached"
    before = len(open_fds())
    answer = await harness.ask(sock, {"type": "attach_memory", "memory_bytes": 4096}, [fd])
    assert answer["kind"] == "LimitExceeded" and "memories_per_session_max is 2" in answer["error"]
    await harness.until(lambda: len(open_fds()) == before)


async def test_a_detached_memory_makes_room_and_unknown_ids_do_no_harm(harness: Harness) -> None:
    sock, answer = await harness.attached()
    session = harness.table.by_token(answer["token"])
    fd = create_sealed("kv", 4096)
    memory_id = (await harness.ask(sock, {"type": "attach_memory", "memory_bytes": 4096}, [fd]))["memory_id"]
    assert session.memories
    for _ in range(2):
        assert await harness.ask(sock, {"type": "detach_memory", "memory_id": memory_id}) == {"type": "memory_detached"}
    assert not session.memories
    assert (await harness.ask(sock, {"type": "detach_memory", "memory_id": "no hex"}))["kind"] == "InvalidRequest"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\xfe",
        b"{}",
        b"[" * 16000,
        b'{"type":"attach","version":1,"instance":"e","x":' + b"[" * 8000 + b"]" * 8000 + b"}",
        b'{"type":"exec","version":1}',
        b'{"type":"attach","version":"1","instance":"e"}',
        b'{"type":"attach","version":1,"instance":"e","extra":1}',
        b'{"type":"attach","version":1,"instance":""}',
        b'{"type":"attach","version":1,"instance":"a\\u0000b"}',
        b'{"type":"attach","version":1,"instance":"\\ud800"}',
        b'{"type":"attach_memory","memory_bytes":4096}',
        b'{"type":"detach_memory","memory_id":"00"}',
        b"x" * (ATTACH_MESSAGE_BYTES_MAX + 1),
    ],
    ids=range(13),
)
async def test_garbage_is_refused_and_hung_up_on(harness: Harness, garbage: bytes) -> None:
    sock = harness.connect()
    answer = await harness.ask(sock, garbage)
    assert (answer["type"], answer["kind"]) == ("refused", "InvalidRequest")
    assert await harness.is_hung_up(sock)
    assert len(harness.table) == 0 and harness.server.waiting_count == 0
    assert (await harness.attached())[1]["type"] == "attached"


async def test_garbage_of_an_attached_client_leaves_its_session_alone(harness: Harness) -> None:
    sock, answer = await harness.attached()
    assert (await harness.ask(sock, b"garbage"))["kind"] == "InvalidRequest"
    assert (await harness.ask(sock, {"type": "attach", "version": 1, "instance": "other"}))["kind"] == "InvalidRequest"
    assert harness.table.by_token(answer["token"])


async def test_another_version_is_refused_by_number_whatever_fields_it_has(harness: Harness) -> None:
    for fields in ({}, {"field_of_the_future": [1, 2]}):
        sock, answer = await harness.attached(version=2, **fields)
        assert answer["error"] == "attach version is 2; this daemon speaks 1"
        assert await harness.is_hung_up(sock)


@pytest.mark.parametrize("count", [1, 8, 9, 200])
async def test_descriptors_that_nobody_asked_for_are_all_closed(harness: Harness, count: int) -> None:
    sock = harness.connect()
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    before = len(open_fds())
    answer = await harness.ask(sock, {"type": "attach", "version": 1, "instance": "e"}, fds)
    assert answer["kind"] == "InvalidRequest" and "descriptors" in answer["error"]
    assert await harness.is_hung_up(sock)
    # The connection's own two (socket and pidfd) may still have been open when the count was taken.
    await harness.until(lambda: len(open_fds()) <= before)
    for fd in fds:
        os.close(fd)


async def test_a_memory_without_its_descriptor_is_refused(harness: Harness) -> None:
    sock, _ = await harness.attached()
    answer = await harness.ask(sock, {"type": "attach_memory", "memory_bytes": 4096})
    assert answer["error"] == "0 descriptors came with this message; 1 belong to it"


async def test_a_silent_socket_is_closed_at_attach_timeout(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "a.sock")
    harness.server = AttachServer(harness.path, harness.table, attach_timeout_s=0.05)
    await harness.server.start()
    silent = harness.connect()
    answer = await harness.read(silent)
    assert answer["kind"] == "DeadlineExpired" and "attach_timeout_s 0.05" in answer["error"]
    assert await harness.is_hung_up(silent)
    # One that attached in time is left alone, for ever.
    sock, _ = await harness.attached()
    await asyncio.sleep(0.1)
    assert len(harness.table) == 1
    silent.close()
    sock.close()
    await harness.server.close()


async def test_sessions_max_refuses_the_next_client_and_an_end_makes_room(harness: Harness) -> None:
    first = [await harness.attached() for _ in range(3)]
    sock, answer = await harness.attached()
    assert answer["kind"] == "LimitExceeded" and "sessions_max is 3" in answer["error"]
    assert await harness.is_hung_up(sock)
    first[0][0].close()
    await harness.until(lambda: harness.ended)
    assert (await harness.attached())[1]["type"] == "attached"


async def test_waiting_connections_are_bounded(harness: Harness) -> None:
    waiting = [harness.connect() for _ in range(4)]
    await harness.until(lambda: harness.server.waiting_count == 4)
    answer = await harness.read(harness.connect())
    assert answer["kind"] == "LimitExceeded" and "waiting_max is 4" in answer["error"]
    waiting[0].close()
    await harness.until(lambda: harness.server.waiting_count == 3)
    assert (await harness.attached())[1]["type"] == "attached"


async def test_a_client_that_never_reads_its_answers_is_hung_up_on(harness: Harness) -> None:
    sock, _ = await harness.attached()
    sock.setblocking(False)

    def flood() -> bool:
        for _ in range(50):
            try:
                sock.send(b'{"type":"detach_memory","memory_id":"00"}' + b" " * 1000)
            except BlockingIOError:
                break
            except OSError:
                return True
        return bool(harness.ended)

    await harness.until(flood)
    assert len(harness.table) == 0


async def test_a_client_can_not_fill_the_log_with_refused_requests(harness: Harness) -> None:
    sock, _ = await harness.attached()
    for _ in range(attach_module.REFUSED_MAX):
        assert (await harness.ask(sock, b"garbage"))["type"] == "refused"
    assert await harness.is_hung_up(sock)


async def test_the_socket_is_for_owner_and_group_and_only_a_stale_socket_is_replaced(harness: Harness, tmp_path: Path) -> None:
    mode = harness.path.stat().st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o660
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(str(tmp_path / "stale.sock"))
    stale.close()
    second = AttachServer(tmp_path / "stale.sock", harness.table)
    await second.start()
    await second.close()
    assert not (tmp_path / "stale.sock").exists()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        await AttachServer(tmp_path / "file", harness.table).start()
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(ConfigError, match="at most 107"):
        await AttachServer(tmp_path / ("x" * 108), harness.table).start()


async def test_closing_leaves_a_socket_that_another_daemon_bound_meanwhile(harness: Harness) -> None:
    second = AttachServer(harness.path, harness.table)
    await second.start()
    await harness.server.close()
    assert harness.path.exists()
    await second.close()
    assert not harness.path.exists()


async def test_closing_ends_all_sessions_and_leaks_nothing(tmp_path: Path) -> None:
    before = open_fds()
    harness = Harness(tmp_path / "a.sock")
    await harness.server.start()
    for _ in range(2):
        sock, _ = await harness.attached()
        fd = create_sealed("kv", 4096)
        await harness.ask(sock, {"type": "attach_memory", "memory_bytes": 4096}, [fd])
        os.close(fd)
    await harness.server.close()
    assert len(harness.ended) == 2 and len(harness.table) == 0
    for sock in harness.sockets:
        sock.close()
    assert open_fds() == before


async def test_a_full_descriptor_table_pauses_accepting_instead_of_spinning(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = harness.server._listener
    assert listener is not None
    attempts: list[int] = []

    class Full:
        def accept(self) -> tuple[socket.socket, object]:
            attempts.append(1)
            if len(attempts) <= 2:
                raise OSError(24, "Too many open files")
            return listener.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(listener, name)

    monkeypatch.setattr(attach_module, "ACCEPT_PAUSE_S", 0.01)
    harness.server._listener = Full()  # type: ignore[assignment]
    _, answer = await harness.attached()
    assert answer["type"] == "attached" and 3 <= len(attempts) <= 6


async def test_tokens_never_reach_the_log(tmp_path: Path) -> None:
    lines: list[str] = []

    class Log:
        def info(self, event: str, **fields: object) -> None:
            lines.append(f"{event} {fields}")

        warning = info

    harness = Harness(tmp_path / "a.sock")
    harness.server = AttachServer(harness.path, harness.table, logger=Log())
    await harness.server.start()
    sock, answer = await harness.attached()
    await harness.ask(sock, b"garbage")
    sock.close()
    await harness.until(lambda: harness.ended)
    await harness.server.close()
    assert any("session_attached" in text for text in lines) and not any(answer["token"] in text for text in lines)


# ---- GPU memory in chunks ----

CHUNK = 2 << 20
#: The message for two chunks. Only a mover's driver can tell whether descriptors are chunks, so any will do here.
CHUNKS: dict[str, Any] = {
    "type": "attach_device_memory",
    "device_uuid": "GPU-0",
    "chunk_bytes": [CHUNK, 2 * CHUNK],
    "offset_bytes": CHUNK,
    "memory_bytes": CHUNK,
}


def null_fds(count: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDWR) for _ in range(count)]


async def test_chunks_arrive_in_order_with_all_their_descriptors(harness: Harness) -> None:
    sock, answer = await harness.attached()
    sent = [os.memfd_create("first"), os.memfd_create("second")]
    memory_id = (await harness.ask(sock, CHUNKS, sent))["memory_id"]
    memory = harness.table.by_token(answer["token"]).memories[bytes.fromhex(memory_id)]
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in memory.fds] == ["/memfd:first (deleted)", "/memfd:second (deleted)"]  # noqa: PTH115
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in memory.fds)
    assert (memory.memory_bytes, memory.chunks) == (CHUNK, DeviceChunks("GPU-0", (CHUNK, 2 * CHUNK), CHUNK))
    harness.table.check()
    assert await harness.ask(sock, {"type": "detach_memory", "memory_id": memory_id}) == {"type": "memory_detached"}
    assert not any(is_open(fd) for fd in memory.fds)
    for fd in sent:
        os.close(fd)


async def test_as_many_chunks_as_a_message_carries_are_taken_and_closed_when_the_client_is_gone(harness: Harness) -> None:
    harness.table.memory_files_max = 253
    before = len(open_fds())
    sock, _ = await harness.attached()
    sent = null_fds(253)
    answer = await harness.ask(sock, CHUNKS | {"chunk_bytes": [CHUNK] * 253, "offset_bytes": 0, "memory_bytes": 253 * CHUNK}, sent)
    assert answer["type"] == "memory_attached"
    for fd in sent:
        os.close(fd)
    assert len(open_fds()) > before + 253
    sock.close()
    await harness.until(lambda: harness.ended)
    await harness.until(lambda: len(open_fds()) == before)


@pytest.mark.parametrize(
    ("changes", "count", "words"),
    [
        ({}, 1, "1 descriptors came with this message; 2 belong to it"),
        ({}, 3, "3 descriptors came with this message; 2 belong to it"),
        ({}, 0, "0 descriptors came with this message; 2 belong to it"),
        ({"chunk_bytes": []}, 0, "the memory has 0 chunks; 1 to 253 are allowed"),
        ({"chunk_bytes": [CHUNK] * 254}, 253, "the memory has 254 chunks; 1 to 253 are allowed"),
        ({"chunk_bytes": [CHUNK, 0]}, 2, "chunk 1 has 0 bytes; at least 1 is needed"),
        ({"chunk_bytes": [-CHUNK, 3 * CHUNK]}, 2, f"chunk 0 has {-CHUNK} bytes; at least 1 is needed"),
        ({"chunk_bytes": [CHUNK, 1 << 62]}, 2, f"the chunks have {CHUNK + (1 << 62)} bytes; {1 << 62} is the most"),
        ({"offset_bytes": -1}, 2, f"memory of {CHUNK} bytes at offset -1 is outside its chunks of {3 * CHUNK} bytes"),
        ({"memory_bytes": 0}, 2, f"memory of 0 bytes at offset {CHUNK} is outside"),
        ({"memory_bytes": 2 * CHUNK + 1}, 2, f"memory of {2 * CHUNK + 1} bytes at offset {CHUNK} is outside its chunks of {3 * CHUNK} bytes"),
        ({"offset_bytes": 1 << 64}, 2, f"at offset {1 << 64} is outside"),
        ({"device_uuid": ""}, 2, "device_uuid name has 0 bytes; 1 to 128 are allowed"),
        ({"device_uuid": "GPU\n"}, 2, "device_uuid name holds characters that can't be printed"),
        ({"chunk_bytes": "all"}, 2, "not of the attach protocol"),
        ({"chunk_bytes": [1.5, CHUNK]}, 2, "not of the attach protocol"),
        ({"extra": 1}, 2, "not of the attach protocol"),
    ],
)
async def test_chunks_that_do_not_fit_together_are_refused_and_closed(harness: Harness, changes: dict[str, Any], count: int, words: str) -> None:
    sock, answer = await harness.attached()
    sent = null_fds(count)
    before = len(open_fds())
    refused = await harness.ask(sock, CHUNKS | changes, sent)
    assert (refused["type"], refused["kind"]) == ("refused", "InvalidRequest") and words in refused["error"]
    await harness.until(lambda: len(open_fds()) == before)
    assert not harness.table.by_token(answer["token"]).memories
    for fd in sent:
        os.close(fd)


async def test_chunks_over_a_limit_are_refused_and_closed_and_a_detached_memory_makes_room(harness: Harness) -> None:
    harness.table.chunks_per_session_max, harness.table.memory_files_max = 3, 4
    sent = null_fds(2)
    (sock, _), (other, _) = await harness.attached(), await harness.attached(instance="other")
    memory_id = (await harness.ask(sock, CHUNKS, sent))["memory_id"]
    before = len(open_fds())
    refused = await harness.ask(sock, CHUNKS, sent)
    assert refused["kind"] == "LimitExceeded" and "has 2 chunks of GPU memory and hands over 2; chunks_per_session_max is 3" in refused["error"]
    await harness.until(lambda: len(open_fds()) == before)
    one = {"chunk_bytes": [2 * CHUNK]}
    assert (await harness.ask(other, CHUNKS, sent))["type"] == "memory_attached"
    refused = await harness.ask(other, CHUNKS | one, sent[:1])
    assert refused["kind"] == "LimitExceeded" and "all sessions have 4 descriptors of memories" in refused["error"] and "4 is the most" in refused["error"]
    await harness.until(lambda: len(open_fds()) == before + 2)
    harness.table.check()
    await harness.ask(sock, {"type": "detach_memory", "memory_id": memory_id})
    assert (await harness.ask(other, CHUNKS | one, sent[:1]))["type"] == "memory_attached"
    refused = await harness.ask(other, CHUNKS | one, sent[:1])
    assert refused["kind"] == "LimitExceeded" and "chunks_per_session_max is 3" in refused["error"]
    assert (await harness.ask(sock, CHUNKS | one, sent[:1]))["type"] == "memory_attached"


async def test_chunks_are_memories_of_the_session_and_are_counted_with_them(harness: Harness) -> None:
    sock, _ = await harness.attached()
    sent = null_fds(2)
    for _ in range(2):
        assert (await harness.ask(sock, CHUNKS, sent))["type"] == "memory_attached"
    refused = await harness.ask(sock, CHUNKS, sent)
    assert refused["kind"] == "LimitExceeded" and "has 2 memories; memories_per_session_max is 2" in refused["error"]


async def test_chunks_before_the_attach_are_refused_and_closed(harness: Harness) -> None:
    sock = harness.connect()
    sent = null_fds(2)
    before = len(open_fds())
    assert (await harness.ask(sock, CHUNKS, sent))["error"] == "the first message must be attach"
    assert await harness.is_hung_up(sock)
    await harness.until(lambda: len(open_fds()) <= before)


async def test_descriptors_that_the_daemon_may_not_open_are_refused_by_that_limit(harness: Harness) -> None:
    sock, _ = await harness.attached()
    sent = null_fds(2)
    before = open_fds()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = next(number for number in itertools.count() if not is_open(number))
    # Room for one of the two.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, limits[1]))
    try:
        refused = await harness.ask(sock, CHUNKS, sent)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (
        refused["kind"] == "LimitExceeded"
        and f"only 1 descriptors of the message could be taken; the daemon may open {lowest_free + 1} files" in refused["error"]
    )
    await harness.until(lambda: open_fds() == before)

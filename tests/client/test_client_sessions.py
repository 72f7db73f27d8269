"""The clients against a working double. One suite, run with the blocking and the asyncio client."""

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest

from offloadd.client import AdminClient, AsyncClient, Blocks, Client, EvictStatus, HostMemory, Namespace, Path, Plane, Region, RestoreStatus, Tier
from offloadd.errors import DaemonFailed, InvalidRequest, LimitExceeded, Unavailable, UnknownRegion

from .daemon_double import Double

BLOCK_BYTES = 512
NAMESPACE = Namespace(model="m", weights="w", block_tokens=16)


class Blocking:
    """An asyncio client driven from ordinary code, so that both clients run through one suite."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client: Any = None

    def connect(self, *args: Any, **kwargs: Any) -> "Blocking":
        self._client = self._run(AsyncClient.connect(*args, **kwargs))
        return self

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name == "restore_stream":
            return lambda *args, **kwargs: self._stream(found(*args, **kwargs))
        if inspect.iscoroutinefunction(found):
            return lambda *args, **kwargs: self._run(found(*args, **kwargs))
        return found

    def _stream(self, parts: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._run(anext(parts))
                except StopAsyncIteration:
                    return
        finally:
            self._run(parts.aclose())

    def stop(self) -> None:
        if self._client is not None:
            self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


Connect = Callable[..., Any]


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest, runtime_dir: FilePath) -> Iterator[Connect]:
    made: list[Any] = []

    def connect(**options: Any) -> Any:
        options = {"instance": "engine", "process": "worker", "timeout_s": 30.0} | options
        if request.param == "blocking":
            made.append(Client.connect(runtime_dir, **options))
            return made[-1]
        made.append(Blocking())
        return made[-1].connect(runtime_dir, **options)

    yield connect
    for client in made:
        client.close() if isinstance(client, Client) else client.stop()


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    made = HostMemory.allocate(64 * BLOCK_BYTES)
    yield made
    made.close()


def register(client: Any, memory: HostMemory, **changes: Any) -> Region:
    planes = [Plane(0, 0, BLOCK_BYTES // 2, BLOCK_BYTES // 2), Plane(0, 16 * BLOCK_BYTES // 2, BLOCK_BYTES // 2, BLOCK_BYTES // 2)]
    options: dict[str, Any] = {"block_count": 16, "planes": planes, "memories": [memory], "namespace": NAMESPACE} | changes
    region: Region = client.register_region(**options)
    return region


def names(count: int) -> list[bytes]:
    return [bytes([position]) * 32 for position in range(count)]


def fill(memory: HostMemory, seed: int = 1) -> bytes:
    content = np.random.default_rng(seed).integers(0, 256, memory.memory_bytes, dtype=np.uint8)
    memory.numpy(np.uint8, (memory.memory_bytes,))[:] = content
    return content.tobytes()


def test_what_was_evicted_comes_back_into_other_blocks(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    region = register(client, memory)
    assert (region.payload_bytes, region.slot_bytes, len(region.namespace_id)) == (BLOCK_BYTES, 8192, 32)
    fill(memory)
    half = memory.numpy(np.uint8, (2, 16, BLOCK_BYTES // 2))
    before = half.copy()
    result = client.evict(Blocks(region, [0, 1, 5], names(3)), keep=True, keep_ttl_s=5.0, deadline_s=20.0)
    assert result.all_stored and result.stored_count == 3 and result.times.total_s == 1.5
    assert [(use.tier, use.path, use.block_count) for use in result.paths] == [(Tier.ARENA, Path.DDR, 3)]
    assert client.evict(Blocks(region, [0], names(1))).outcomes[0].status is EvictStatus.DUPLICATE
    half[:] = 0
    restored = client.restore(Blocks(region, [10, 11, 3, 2], [*names(3), b"never seen"]))
    assert [outcome.status for outcome in restored.outcomes] == [RestoreStatus.RESTORED] * 3 + [RestoreStatus.NOT_FOUND]
    assert restored.prefix_count == 3
    assert (half[:, [10, 11, 3]] == before[:, [0, 1, 5]]).all() and not half[:, 2].any()


def test_restored_blocks_stream_in_order_and_an_iterator_may_be_closed_early(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    region = register(client, memory)
    client.evict(Blocks(region, range(5), names(5)))
    parts = list(client.restore_stream(Blocks(region, range(5), names(5))))
    assert [(part.first_position, len(part.outcomes)) for part in parts] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert parts[-1].times is not None and parts[-1].paths and parts[0].times is None
    stream = client.restore_stream(Blocks(region, range(5), names(5)))
    next(stream)
    stream.close()
    assert client.restore(Blocks(region, range(5), names(5))).all_restored


def test_lookup_prefetch_release_cancel_and_capabilities(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    region = register(client, memory)
    client.evict(Blocks(region, [0, 1, 3], [names(4)[i] for i in (0, 1, 3)]))
    prefix = client.lookup([region], names(4), lease_s=1.0, prefill_tokens_per_s=1000.0)
    assert (prefix.held_count, prefix.tiers, prefix.estimated_restore_s, prefix.worth_restoring) == (2, (Tier.ARENA,) * 2, None, True)
    assert client.lookup([region], names(4), membership=True).tiers == (Tier.ARENA, Tier.ARENA, Tier.ANY, Tier.ARENA)
    assert client.prefetch([region], names(4)).present_count == 4
    assert client.release([region], names(4)) == 4 and client.release_all() == 99
    assert client.cancel("known") and not client.cancel("unknown")
    capabilities = client.capabilities()
    assert (capabilities.deadline_s, capabilities.keep_ttl_s, capabilities.blocks_per_request_max) == (30.0, 600.0, 4096)
    assert [(one.path, one.available, one.note) for one in capabilities.paths] == [(Path.DDR, True, ""), (Path.GDS, False, "no CUDA device")]


def test_a_session_belongs_to_this_process_and_ends_with_close(double: Double, connect: Connect) -> None:
    client = connect()
    (session,) = double.table.sessions
    assert (session.pid, client.tenant, client.session_name, session.process) == (os.getpid(), f"uid:{os.getuid()}", session.name, "worker")
    ended = threading.Event()
    session.at_end.append(lambda _: ended.set())
    client.close()
    assert ended.wait(60)
    with pytest.raises(Unavailable, match="client is closed"):
        client.capabilities()


def test_memory_is_handed_over_once_and_detached_with_its_last_region(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    first, second = register(client, memory), register(client, memory, cache_group=1)
    session = double.table.sessions[0]
    assert len(session.memories) == 1
    client.unregister_region(first)
    assert len(session.memories) == 1 and first.region_id == b""
    client.unregister_region(second)
    client.unregister_region(second)
    with pytest.raises(InvalidRequest, match="not registered"):
        client.evict(Blocks(first, [0], names(1)))
    assert double.knobs.calls["UnregisterRegion"] == 2


@pytest.mark.parametrize("code", ["UNAVAILABLE", "CANCELLED"])
def test_a_part_of_the_daemon_that_is_away_costs_one_repetition_and_keeps_the_session(double: Double, connect: Connect, memory: HostMemory, code: str) -> None:
    client = connect()
    region = register(client, memory)
    name = client.session_name
    double.knobs.failures["Evict"] = [code]
    assert client.evict(Blocks(region, [0], names(1))).all_stored
    assert double.knobs.calls["Evict"] == 2 and client.session_name == name and double.knobs.calls["OpenSession"] == 1


def test_a_call_is_repeated_once_and_no_more(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    region = register(client, memory)
    double.knobs.failures["Evict"] = ["UNAVAILABLE"] * 3
    with pytest.raises(Unavailable, match="knob of Evict"):
        client.evict(Blocks(region, [0], names(1)))
    assert double.knobs.calls["Evict"] == 2


@pytest.mark.parametrize(
    ("code", "error"), [("INVALID_ARGUMENT", InvalidRequest), ("RESOURCE_EXHAUSTED", LimitExceeded), ("NOT_FOUND", UnknownRegion), ("DATA_LOSS", DaemonFailed)]
)
def test_other_errors_are_raised_at_once_as_their_class(double: Double, connect: Connect, memory: HostMemory, code: str, error: type[Exception]) -> None:
    client = connect()
    region = register(client, memory)
    double.knobs.failures["Evict"] = [code]
    with pytest.raises(error, match="knob of Evict"):
        client.evict(Blocks(region, [0], names(1)))
    assert double.knobs.calls["Evict"] == 1


def test_incident_16_after_a_restart_memories_and_regions_are_handed_over_again_and_the_call_is_repeated(
    double: Double, connect: Connect, memory: HostMemory
) -> None:
    client = connect()
    regions = [register(client, memory), register(client, memory, cache_group=1)]
    gone = register(client, memory, cache_group=2)
    client.unregister_region(gone)
    fill(memory)
    client.evict([Blocks(region, range(4), names(4)) for region in regions])
    old_ids = [region.region_id for region in regions]
    double.restart()
    view = memory.numpy(np.uint8, (memory.memory_bytes,))
    view[:] = 0
    assert client.restore([Blocks(regions[0], range(4), names(4)), Blocks(regions[1], range(4, 8), names(4))]).all_restored
    assert view.any()
    assert not set(old_ids) & {region.region_id for region in regions}
    (session,) = double.table.sessions
    assert client.session_name == session.name and len(double.regions[session.name]) == 2 and len(session.memories) == 1


def test_a_daemon_that_is_away_for_a_while_is_waited_for(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    region = register(client, memory)
    double.stop()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(client.evict(Blocks(region, [0], names(1)))))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    double.start()
    thread.join(60)
    assert answers[0].all_stored


def test_a_daemon_that_stays_away_is_unavailable_after_timeout_s_and_the_client_recovers_later(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect(timeout_s=0.3)
    region = register(client, memory)
    double.stop()
    for _ in range(2):
        with pytest.raises(Unavailable):
            client.evict(Blocks(region, [0], names(1)))
    assert client.session_name == ""
    double.start()
    assert client.evict(Blocks(region, [0], names(1))).all_stored


def test_an_unknown_token_means_attach_again(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    region = register(client, memory)
    double.end_sessions()
    assert client.evict(Blocks(region, [0], names(1))).all_stored
    assert double.knobs.calls["OpenSession"] == 2 and len(double.table) == 1


def test_many_callers_of_one_client_make_one_new_session(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    region = register(client, memory)
    double.restart()
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda i=i: answers.append(client.evict(Blocks(region, [i], [bytes([i])])).all_stored)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [True] * 8
    assert double.knobs.calls["OpenSession"] == 2 and len(double.regions[client.session_name]) == 1


def test_a_restore_that_yielded_is_not_repeated_behind_the_callers_back(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    region = register(client, memory)
    blocks = Blocks(region, range(6), names(6))
    client.evict(blocks)
    double.knobs.restore_fails_after = 1
    parts: list[Any] = []
    with pytest.raises(Unavailable, match="restore_fails_after"):
        for part in client.restore_stream(blocks):
            parts.append(part)
    assert [part.first_position for part in parts] == [0] and double.knobs.calls["Restore"] == 1
    double.knobs.restore_fails_after = None
    double.knobs.failures["Restore"] = ["UNAVAILABLE"]
    assert sum(len(part.outcomes) for part in client.restore_stream(blocks)) == 6
    assert double.knobs.calls["Restore"] == 3


def test_a_daemon_that_answers_too_few_blocks_has_failed(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    region = register(client, memory)
    double.knobs.missing_outcomes = 1
    with pytest.raises(DaemonFailed, match="1 outcomes for 2 blocks"):
        client.evict(Blocks(region, [0, 1], names(2)))
    with pytest.raises(DaemonFailed, match="1 outcomes for 2 blocks"):
        client.restore(Blocks(region, [0, 1], names(2)))


def test_a_region_that_was_refused_is_not_registered_again_later(double: Double, connect: Connect, memory: HostMemory) -> None:
    client = connect()
    with pytest.raises(InvalidRequest, match="ends at byte"):
        register(client, memory, block_count=1000)
    double.restart()
    assert register(client, memory).payload_bytes == BLOCK_BYTES
    assert len(double.regions[client.session_name]) == 1


def test_connecting_to_nothing_is_unavailable_after_timeout_s(connect: Connect) -> None:
    with pytest.raises(Unavailable, match="no daemon at"):
        connect(timeout_s=0.2)


def test_a_daemon_that_never_opens_the_session_is_unavailable(double: Double, connect: Connect) -> None:
    double.knobs.open_delay_s = 3600.0
    with pytest.raises(Unavailable, match="did not open the session"):
        connect(timeout_s=0.3)


def test_a_refused_attach_raises_what_the_daemon_said(double: Double, connect: Connect) -> None:
    with pytest.raises(InvalidRequest, match="instance name"):
        connect(instance="")


def test_the_admin_client_sees_and_steers(double: Double, runtime_dir: FilePath) -> None:
    double.blocks[b"k" * 32] = b""
    with AdminClient(runtime_dir) as admin:
        assert admin.status().state == "SERVING" and [volume.path for volume in admin.volumes()] == ["v0"] and admin.drain() == 3
        with pytest.raises(UnknownRegion):
            admin.drop_namespace(b"x" * 32)
        events = admin.watch_events()
        assert next(events).keys == [b"k" * 32]
        events.close()
        double.stop()
        with pytest.raises(Unavailable):
            admin.status()
        double.start()


FORGETFUL = """
import sys
from offloadd.client import Client
client = Client.connect(sys.argv[1], instance="engine")
print(client.session_name, flush=True)
"""


def test_an_interpreter_that_forgets_to_close_its_client_exits_at_once(double: Double, runtime_dir: FilePath) -> None:
    done = subprocess.run([sys.executable, "-c", FORGETFUL, str(runtime_dir)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "s-1\n", "")


def test_a_client_that_is_dropped_ends_its_session(double: Double, runtime_dir: FilePath) -> None:
    client = Client.connect(runtime_dir, instance="engine")
    ended = threading.Event()
    double.table.sessions[0].at_end.append(lambda _: ended.set())
    del client
    assert ended.wait(60)


def test_a_daemon_killed_with_9_and_started_again_is_found_again(connect: Connect, runtime_dir: FilePath, memory: HostMemory) -> None:
    def spawn() -> "subprocess.Popen[str]":
        child = subprocess.Popen([sys.executable, str(FilePath(__file__).parent / "daemon_double.py"), str(runtime_dir)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        while (text := child.stdout.readline()) and text != "READY\n":
            continue
        return child

    daemon = spawn()
    client = connect()
    region = register(client, memory)
    fill(memory)
    assert client.evict(Blocks(region, [0], names(1))).all_stored
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    daemon = spawn()
    try:
        # Its memory is gone with it: the honest answer is a miss, not an error.
        assert client.restore(Blocks(region, [0], names(1))).outcomes[0].status is RestoreStatus.NOT_FOUND
        assert client.evict(Blocks(region, [0], names(1))).outcomes[0].status is EvictStatus.STORED
    finally:
        daemon.kill()
        daemon.wait()

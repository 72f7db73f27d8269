"""Calls beyond the limit are refused at once, with a hint when to repeat; health is answered meanwhile. Over a real socket, with handlers that are held."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from offloadd.client.calls import error_of
from offloadd.errors import LimitExceeded, Unavailable
from offloadd.rpc.server import GrpcServer, ServerLimits
from offloadd.v1 import offload_pb2 as pb
from offloadd.v1 import offload_pb2_grpc

CALLS_MAX = 3
CONNECTIONS_MAX = 4
MESSAGE_BYTES_MAX = 1 << 20


class Held(offload_pb2_grpc.OffloadServiceServicer):
    """Its calls end when the test says so."""

    def __init__(self) -> None:
        self.entered = asyncio.Semaphore(0)
        self.go_on = asyncio.Event()

    async def Evict(self, request: Any, context: Any) -> pb.EvictResponse:
        self.entered.release()
        await self.go_on.wait()
        return pb.EvictResponse()

    async def Restore(self, request: Any, context: Any) -> AsyncIterator[pb.RestoreResponse]:
        self.entered.release()
        await self.go_on.wait()
        yield pb.RestoreResponse()

    async def OpenSession(self, request: Any, context: Any) -> AsyncIterator[pb.OpenSessionResponse]:
        yield pb.OpenSessionResponse()
        await self.go_on.wait()

    async def Lookup(self, request: Any, context: Any) -> pb.LookupResponse:
        return pb.LookupResponse()

    async def Cancel(self, request: Any, context: Any) -> pb.CancelResponse:
        raise Unavailable("the mover is away")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[SimpleNamespace]:
    server = GrpcServer(tmp_path / "offloadd.sock", mode=0o600, limits=ServerLimits(MESSAGE_BYTES_MAX, CALLS_MAX, 100, CONNECTIONS_MAX))
    held = Held()
    server.add_offload(held)  # type: ignore[arg-type]
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'offloadd.sock'}") as channel:
        yield SimpleNamespace(
            channel=channel, held=held, stub=offload_pb2_grpc.OffloadServiceStub(channel), health=health_pb2_grpc.HealthStub(channel), server=server
        )  # type: ignore[no-untyped-call]
        held.go_on.set()
    await server.stop(5.0)


async def _fill(served: SimpleNamespace) -> list[Any]:
    """So many calls as the daemon takes, all of them inside."""
    calls = [served.stub.Evict(pb.EvictRequest()), served.stub.Restore(pb.RestoreRequest()), served.stub.Evict(pb.EvictRequest())]
    reading = [asyncio.ensure_future(_first(call)) for call in calls]
    for _ in range(CALLS_MAX):
        await served.held.entered.acquire()
    return reading


async def _first(call: Any) -> Any:
    if hasattr(call, "read"):
        return await call.read()
    return await call


async def test_a_call_beyond_the_limit_is_refused_while_the_others_run_and_told_when_to_repeat(served: SimpleNamespace) -> None:
    reading = await _fill(served)
    for call in (served.stub.Evict(pb.EvictRequest()), served.stub.Restore(pb.RestoreRequest())):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _first(call)
        error = error_of(refused.value)
        assert isinstance(error, LimitExceeded) and error.retry_after_s == 0.1
        assert "3 calls are in flight; calls_max is 3" in str(error)
    assert not any(task.done() for task in reading)
    # Their places are free again when they have ended.
    served.held.go_on.set()
    await asyncio.gather(*reading)
    assert isinstance(await served.stub.Evict(pb.EvictRequest()), pb.EvictResponse)


async def test_health_and_new_sessions_are_answered_while_all_calls_are_taken(served: SimpleNamespace) -> None:
    reading = await _fill(served)
    answer = await served.health.Check(health_pb2.HealthCheckRequest(service="offloadd.v1.OffloadService"), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    sessions = [served.stub.OpenSession(pb.OpenSessionRequest()) for _ in range(2 * CALLS_MAX)]
    for session in sessions:
        assert isinstance(await session.read(), pb.OpenSessionResponse)
    assert not any(task.done() for task in reading)
    for session in sessions:
        session.cancel()
    served.held.go_on.set()
    await asyncio.gather(*reading)


async def test_an_error_that_a_pause_may_mend_says_how_long(served: SimpleNamespace) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.stub.Cancel(pb.CancelRequest())
    error = error_of(refused.value)
    assert isinstance(error, Unavailable) and error.retry_after_s == 0.5


async def test_an_abandoned_call_gives_its_place_back(served: SimpleNamespace) -> None:
    reading = await _fill(served)
    for task in reading:
        task.cancel()
    await asyncio.wait(reading)
    served.held.go_on.set()
    # Cancellation travels; until it has arrived the calls still count.
    async with asyncio.timeout(60):
        while True:
            try:
                await served.stub.Evict(pb.EvictRequest())
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def _without_message(channel: grpc.aio.Channel) -> Any:
    """An Evict whose message does not come."""
    call = channel.stream_unary("/offloadd.v1.OffloadService/Evict", response_deserializer=pb.EvictResponse.FromString)
    return call()


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for what the server does by itself."""
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


async def test_a_refused_call_is_not_read(served: SimpleNamespace) -> None:
    reading = await _fill(served)
    # Bytes that are no message: whoever read them would say so.
    garbage = served.channel.unary_unary("/offloadd.v1.OffloadService/Evict")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await garbage(b"\xff" * 1000)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "calls_max is 3" in str(refused.value.details())
    served.held.go_on.set()
    await asyncio.gather(*reading)
    with pytest.raises(grpc.aio.AioRpcError) as read:
        await garbage(b"\xff" * 1000)
    assert read.value.code() != grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_call_whose_message_never_came_gives_its_place_back_with_its_connection(served: SimpleNamespace, tmp_path: Path) -> None:
    options = (("grpc.use_local_subchannel_pool", 1),)
    silent = grpc.aio.insecure_channel(f"unix:{tmp_path / 'offloadd.sock'}", options=options)
    calls = [_without_message(silent) for _ in range(CALLS_MAX)]
    await _until(lambda: served.server.gate.count == CALLS_MAX)
    with pytest.raises(grpc.aio.AioRpcError, match="calls_max is 3"):
        await served.stub.Lookup(pb.LookupRequest())
    await silent.close()
    del calls
    await _until(lambda: served.server.gate.count == 0)
    await served.stub.Lookup(pb.LookupRequest())


async def test_a_connection_too_many_is_closed_and_one_that_ends_makes_room(served: SimpleNamespace, tmp_path: Path) -> None:
    served.held.go_on.set()
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [served.channel, *(grpc.aio.insecure_channel(f"unix:{tmp_path / 'offloadd.sock'}", options=options) for _ in range(CONNECTIONS_MAX))]
    stubs = [offload_pb2_grpc.OffloadServiceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
    for stub in stubs[:-1]:
        await stub.Evict(pb.EvictRequest(), timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stubs[-1].Evict(pb.EvictRequest(), timeout=60)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    await channels[1].close()
    await stubs[-1].Evict(pb.EvictRequest(), timeout=60, wait_for_ready=True)
    for channel in channels[2:]:
        await channel.close()

"""Each call is told once, with the status that its caller saw; over a real socket, with handlers that are held."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from offloadd.errors import Unavailable
from offloadd.rpc.interceptor import CallGate
from offloadd.rpc.server import CALL_NAMES, GrpcServer, ServerLimits
from offloadd.v1 import offload_pb2 as pb
from offloadd.v1 import offload_pb2_grpc


class Watcher:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.metadata: list[dict[str, str]] = []
        self.ended_one = asyncio.Event()

    def begun(self, method: str, context: Any) -> str:
        self.metadata.append(dict(context.invocation_metadata()))
        return method

    def ended(self, method: str, begun: str, code: str, seconds: float) -> None:
        assert method == begun and seconds >= 0
        self.told.append((method, code))
        self.ended_one.set()

    async def all_told(self, count: int) -> list[tuple[str, str]]:
        async with asyncio.timeout(60):
            while len(self.told) < count:
                self.ended_one.clear()
                await self.ended_one.wait()
        return self.told


class Held(offload_pb2_grpc.OffloadServiceServicer):
    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    async def Evict(self, request: Any, context: Any) -> pb.EvictResponse:
        self.entered.set()
        await self.go_on.wait()
        return pb.EvictResponse()

    async def Restore(self, request: Any, context: Any) -> AsyncIterator[pb.RestoreResponse]:
        yield pb.RestoreResponse(outcomes=[pb.RestoreOutcome()])
        if request.request_id != "short":
            yield pb.RestoreResponse(times=pb.StageTimes(total=Duration(seconds=1)))
        await self.go_on.wait()

    async def OpenSession(self, request: Any, context: Any) -> AsyncIterator[pb.OpenSessionResponse]:
        yield pb.OpenSessionResponse()

    async def Lookup(self, request: Any, context: Any) -> pb.LookupResponse:
        raise Unavailable("away")

    async def Release(self, request: Any, context: Any) -> pb.ReleaseResponse:
        raise RuntimeError("a bug of ours")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[SimpleNamespace]:
    watcher, held = Watcher(), Held()
    server = GrpcServer(tmp_path / "offloadd.sock", mode=0o600, limits=ServerLimits(1 << 20, 1, 100, 100), watchers=[watcher])
    server.add_offload(held)  # type: ignore[arg-type]
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'offloadd.sock'}") as channel:
        yield SimpleNamespace(
            gate=server.gate, held=held, watcher=watcher, stub=offload_pb2_grpc.OffloadServiceStub(channel), health=health_pb2_grpc.HealthStub(channel)
        )  # type: ignore[no-untyped-call]
        held.go_on.set()
    await server.stop(5.0)


async def _until_free(gate: CallGate) -> None:
    """A call has its place until its task ends, which may be after its answer."""
    async with asyncio.timeout(60):
        while gate.count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_the_status_that_the_caller_saw_is_told_also_of_refused_calls(served: SimpleNamespace) -> None:
    first = asyncio.ensure_future(served.stub.Evict(pb.EvictRequest()))
    await served.held.entered.wait()
    with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
        await served.stub.Evict(pb.EvictRequest())
    served.held.go_on.set()
    await first
    for call, request, code in ((served.stub.Lookup, pb.LookupRequest(), "UNAVAILABLE"), (served.stub.Release, pb.ReleaseRequest(), "INTERNAL")):
        await _until_free(served.gate)
        with pytest.raises(grpc.aio.AioRpcError, match=code):
            await call(request)
    # Who was refused may hear of it before we do.
    assert sorted(await served.watcher.all_told(4)) == [("Evict", "OK"), ("Evict", "RESOURCE_EXHAUSTED"), ("Lookup", "UNAVAILABLE"), ("Release", "INTERNAL")]


@pytest.mark.parametrize(("request_id", "code"), [("whole", "OK"), ("short", "CANCELLED")])
async def test_a_caller_that_hangs_up_cancelled_its_call_unless_it_had_everything(served: SimpleNamespace, request_id: str, code: str) -> None:
    call = served.stub.Restore(pb.RestoreRequest(request_id=request_id))
    for _ in range(2 if request_id == "whole" else 1):
        await call.read()
    call.cancel()
    assert await served.watcher.all_told(1) == [("Restore", code)]


async def test_health_and_the_streams_of_sessions_are_not_told(served: SimpleNamespace) -> None:
    await served.health.Check(health_pb2.HealthCheckRequest())
    async for _ in served.stub.OpenSession(pb.OpenSessionRequest()):
        pass
    served.held.go_on.set()
    await served.stub.Evict(pb.EvictRequest(), metadata=(("traceparent", "x"),))
    assert await served.watcher.all_told(1) == [("Evict", "OK")]
    assert served.watcher.metadata[0]["traceparent"] == "x"
    assert "OpenSession" not in CALL_NAMES and {"Evict", "Restore", "Status", "Drain"} <= set(CALL_NAMES)

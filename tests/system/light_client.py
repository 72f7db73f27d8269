"""A session at its smallest: an attached socket, a gRPC connection of its own and one region. For tests that need thousands of them, or many calls a second."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio

from offloadd.client import HostMemory
from offloadd.client.attach import AttachLink
from offloadd.client.calls import CHANNEL_OPTIONS, SESSION_KEY, grpc_target
from offloadd.model.runtime import GRPC_SOCKET
from offloadd.v1 import offload_pb2 as pb
from offloadd.v1.offload_pb2_grpc import OffloadServiceStub

#: Of one call, and longer than any that the daemon answers.
TIMEOUT_S = 300.0


class LightClient:
    """Blocks of `block_bytes` in `memory`, one after the other."""

    def __init__(self, runtime_dir: Path, memory: HostMemory, block_bytes: int, *, model: str) -> None:
        self._runtime_dir = runtime_dir
        self._memory = memory
        self._block_bytes = block_bytes
        self._model = model
        self.region_id = b""

    async def join(self, instance: str) -> None:
        """Attach, open the session and register the region. Raises errors of offloadd.errors, and AioRpcError."""
        self._link = await asyncio.to_thread(AttachLink.connect, self._runtime_dir, instance, "", TIMEOUT_S)
        self._channel = grpc.aio.insecure_channel(grpc_target(self._runtime_dir, GRPC_SOCKET), options=CHANNEL_OPTIONS)
        self.stub: Any = OffloadServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = ((SESSION_KEY, self._link.token),)
        self._stream = self.stub.OpenSession(pb.OpenSessionRequest(), metadata=self._metadata)
        assert await self._stream.read() is not grpc.aio.EOF
        self._memory_id = await asyncio.to_thread(self._link.attach_memory, self._memory.fd, self._memory.memory_bytes)
        await self.register()

    async def register(self) -> None:
        """Register the region, the first time or again."""
        request = pb.RegisterRegionRequest(
            device="host",
            block_count=self._memory.memory_bytes // self._block_bytes,
            planes=[pb.Plane(memory=0, offset_bytes=0, block_stride_bytes=self._block_bytes, block_bytes=self._block_bytes)],
            memories=[pb.Memory(attached_id=self._memory_id)],
            namespace=pb.Namespace(model=self._model, weights="commit-1", engine="test"),
        )
        self.region_id = (await self.call(self.stub.RegisterRegion, request)).region_id

    def call(self, method: Any, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """Begin a call in the session."""
        return method(request, metadata=self._metadata, timeout=timeout_s)

    def span(self, start: int, hashes: list[bytes]) -> pb.BlockSpan:
        """Blocks of the region from `start` on."""
        return pb.BlockSpan(region_id=self.region_id, start=start, count=len(hashes), block_hashes=hashes)

    async def leave(self) -> None:
        """Hang up, which ends the session."""
        self._stream.cancel()
        self._link.close()
        await self._channel.close()

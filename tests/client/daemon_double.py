"""A daemon that works, in memory: the real attach socket and session table, the protocol's services over a dict, and knobs for what can go wrong.

`python daemon_double.py RUNTIME_DIR` serves until it is killed and prints READY.
"""

import asyncio
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from offloadd.errors import AlreadyOpen, InvalidRequest, OffloaddError, UnknownRegion, UnknownSession
from offloadd.memory.memfd import map_shared
from offloadd.model.namespace import KeyMaker, Namespace, Shard
from offloadd.model.region import Layout, Plane, validate_layout
from offloadd.model.runtime import ADMIN_SOCKET, ATTACH_SOCKET, GRPC_SOCKET
from offloadd.model.status import code_of
from offloadd.offload.sessions import Session, SessionTable
from offloadd.rpc.attach import AttachServer
from offloadd.v1 import admin_pb2, admin_pb2_grpc, offload_pb2_grpc
from offloadd.v1 import offload_pb2 as pb


@dataclass
class DoubleRegion:
    layout: Layout
    maps: list[mmap.mmap]
    keys: KeyMaker
    namespace_id: bytes

    def _windows(self, index: int) -> list[tuple[mmap.mmap, int, int]]:
        return [(self.maps[p.memory], p.offset_bytes + index * p.block_stride_bytes, p.block_bytes) for p in self.layout.planes]

    def gather(self, index: int) -> bytes:
        return b"".join(memory[start : start + length] for memory, start, length in self._windows(index))

    def scatter(self, index: int, payload: bytes) -> None:
        at = 0
        for memory, start, length in self._windows(index):
            memory[start : start + length] = payload[at : at + length]
            at += length


class Knobs:
    """What the double does wrong, and what it has seen."""

    def __init__(self) -> None:
        #: Code names to abort the next calls of a method with, first come first served.
        self.failures: dict[str, list[str]] = {}
        #: Calls by method, counted before failures.
        self.calls: Counter[str] = Counter()
        self.requests: list[Any] = []
        #: Outcomes left out at the end of each answer.
        self.missing_outcomes = 0
        #: Blocks in each message of a restore.
        self.restore_part = 2
        #: Abort a restore with UNAVAILABLE after this many messages.
        self.restore_fails_after: int | None = None
        #: Corrupt stored blocks by key: answered with DATA_LOSS.
        self.lost: set[bytes] = set()
        self.open_delay_s = 0.0


class Double(offload_pb2_grpc.OffloadServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """One life of the daemon at a time; `restart` makes the next. Blocks outlive it, sessions do not."""

    def __init__(self, runtime_dir: Path, *, sessions_max: int = 8, memories_per_session_max: int = 4) -> None:
        self.runtime_dir = runtime_dir
        self.limits = {"sessions_max": sessions_max, "memories_per_session_max": memories_per_session_max}
        self.knobs = Knobs()
        self.blocks: dict[bytes, bytes] = {}
        self.ended: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="double", daemon=True)
        self._thread.start()
        self.submit(self._start())

    def submit(self, work: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(60)

    async def _start(self) -> None:
        self.regions: dict[str, dict[bytes, DoubleRegion]] = {}
        self.table = SessionTable(**self.limits, on_end=self._on_end)
        self.attach = AttachServer(self.runtime_dir / ATTACH_SOCKET, self.table)
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        offload_pb2_grpc.add_OffloadServiceServicer_to_server(self, self.server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self.server)
        for name in (GRPC_SOCKET, ADMIN_SOCKET):
            assert self.server.add_insecure_port(f"unix:{self.runtime_dir / name}")
        await self.server.start()
        await self.attach.start()

    def _on_end(self, session: Session) -> None:
        self.ended.append(session.name)
        for region in self.regions.pop(session.name, {}).values():
            for memory in region.maps:
                memory.close()

    async def _stop(self) -> None:
        await self.attach.close()
        await self.server.stop(0)
        for name in (GRPC_SOCKET, ADMIN_SOCKET):
            (self.runtime_dir / name).unlink(missing_ok=True)

    def stop(self) -> None:
        self.submit(self._stop())

    def start(self) -> None:
        self.submit(self._start())

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def end_sessions(self) -> None:
        """Sessions end, the daemon lives: every token is unknown from now on."""

        async def end() -> None:
            for session in self.table.sessions:
                self.table.end(session, "test")

        self.submit(end())

    # -- the services

    def _session(self, context: Any) -> Session:
        metadata = dict(context.invocation_metadata())
        return self.table.by_token(metadata.get("offloadd-session", ""))

    async def _enter(self, method: str, request: Any, context: Any) -> None:
        self.knobs.calls[method] += 1
        self.knobs.requests.append(request)
        if self.knobs.failures.get(method):
            await context.abort(grpc.StatusCode[self.knobs.failures[method].pop(0)], f"knob of {method}")

    async def _serve(self, method: str, request: Any, context: Any, work: Callable[[Session], Any]) -> Any:
        await self._enter(method, request, context)
        try:
            return work(self._session(context))
        except OffloaddError as error:
            await context.abort(grpc.StatusCode[code_of(error)], str(error))

    def _region(self, session: Session, region_id: bytes) -> DoubleRegion:
        try:
            return self.regions[session.name][region_id]
        except KeyError:
            raise UnknownRegion(f"session {session.name} has no such region") from None

    async def OpenSession(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._enter("OpenSession", request, context)
        await asyncio.sleep(self.knobs.open_delay_s)
        ended = asyncio.Event()
        try:
            session = self._session(context)
            if not self.table.open(session):
                raise AlreadyOpen(f"session {session.name} is open")
        except OffloaddError as error:
            await context.abort(grpc.StatusCode[code_of(error)], str(error))
        session.at_end.append(lambda _: ended.set())
        try:
            capabilities = await self.GetCapabilities(None, context)
            yield pb.OpenSessionResponse(session_name=session.name, instance=session.instance.name, tenant=session.tenant, capabilities=capabilities)
            await ended.wait()
        finally:
            self.table.end(session, "stream ended")

    async def RegisterRegion(self, request: Any, context: Any) -> Any:
        def work(session: Session) -> Any:
            memories = [self.table.use_memory(session, m.attached_id) for m in request.memories]
            planes = tuple(Plane(p.memory, p.offset_bytes, p.block_stride_bytes, p.block_bytes) for p in request.planes)
            layout = Layout(request.block_count, planes)
            validate_layout(layout, tuple(m.memory_bytes for m in memories), planes_max=64)
            n = request.namespace
            shard = Shard(n.shard.layer_start, n.shard.layer_count, n.shard.head_start, n.shard.head_count)
            namespace = Namespace(tenant=session.tenant, model=n.model, weights=n.weights, block_tokens=n.block_tokens, salt=n.salt, shard=shard)
            maps = [map_shared(m.fds[0], m.memory_bytes) for m in memories]
            region_id = os.urandom(8)
            keys = KeyMaker(namespace.id(), request.cache_group)
            self.regions.setdefault(session.name, {})[region_id] = DoubleRegion(layout, maps, keys, namespace.id())
            return pb.RegisterRegionResponse(
                region_id=region_id, payload_bytes=layout.payload_bytes, slot_bytes=4096 + -(-layout.payload_bytes // 4096) * 4096, namespace_id=namespace.id()
            )

        return await self._serve("RegisterRegion", request, context, work)

    async def UnregisterRegion(self, request: Any, context: Any) -> Any:
        def work(session: Session) -> Any:
            region = self.regions.get(session.name, {}).pop(request.region_id, None)
            for memory in region.maps if region else []:
                memory.close()
            return pb.UnregisterRegionResponse()

        return await self._serve("UnregisterRegion", request, context, work)

    def _named(self, session: Session, spans: Any) -> list[tuple[DoubleRegion, int, bytes]]:
        named = []
        for span in spans:
            region = self._region(session, span.region_id)
            if span.count != len(span.block_hashes) or span.start + span.count > region.layout.block_count:
                raise InvalidRequest("span does not fit")
            named += [(region, span.start + i, region.keys.key(h)) for i, h in enumerate(span.block_hashes)]
        return named

    async def Evict(self, request: Any, context: Any) -> Any:
        def work(session: Session) -> Any:
            outcomes, moved_bytes = [], 0
            for region, index, key in self._named(session, request.spans):
                status = pb.EVICT_STATUS_DUPLICATE if key in self.blocks else pb.EVICT_STATUS_STORED
                payload = self.blocks.setdefault(key, region.gather(index))
                moved_bytes += len(payload)
                outcomes.append(pb.EvictOutcome(status=status, tier=pb.TIER_ARENA))
            outcomes = outcomes[: len(outcomes) - self.knobs.missing_outcomes]
            use = pb.PathUse(tier=pb.TIER_ARENA, path=pb.PATH_DDR, block_count=len(outcomes), payload_bytes=moved_bytes)
            times = pb.StageTimes()
            times.total.FromMilliseconds(1500)
            return pb.EvictResponse(outcomes=outcomes, paths=[use], times=times)

        return await self._serve("Evict", request, context, work)

    async def Restore(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work(session: Session) -> list[Any]:
            outcomes = []
            for region, index, key in self._named(session, request.spans):
                if key in self.knobs.lost:
                    outcomes.append(pb.RestoreOutcome(status=pb.RESTORE_STATUS_DATA_LOSS, reason=pb.REASON_CHECKSUM_MISMATCH))
                elif key not in self.blocks:
                    outcomes.append(pb.RestoreOutcome(status=pb.RESTORE_STATUS_NOT_FOUND))
                else:
                    region.scatter(index, self.blocks[key])
                    outcomes.append(pb.RestoreOutcome(status=pb.RESTORE_STATUS_RESTORED, tier=pb.TIER_ARENA))
            return outcomes[: len(outcomes) - self.knobs.missing_outcomes]

        outcomes = await self._serve("Restore", request, context, work)
        step = self.knobs.restore_part
        for message, start in enumerate(range(0, len(outcomes), step)):
            if message == self.knobs.restore_fails_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "knob: restore_fails_after")
            yield pb.RestoreResponse(outcomes=outcomes[start : start + step])
        use = pb.PathUse(tier=pb.TIER_ARENA, path=pb.PATH_DDR, block_count=len(outcomes))
        yield pb.RestoreResponse(paths=[use], times=pb.StageTimes())

    async def Lookup(self, request: Any, context: Any) -> Any:
        def work(session: Session) -> Any:
            regions = [self._region(session, shard.region_id) for shard in request.shards]
            held = [all(region.keys.key(h) in self.blocks for region in regions) for h in request.block_hashes]
            if request.mode == pb.LOOKUP_MODE_MEMBERSHIP:
                return pb.LookupResponse(held_count=sum(held), tiers=[pb.TIER_ARENA if h else pb.TIER_UNSPECIFIED for h in held], worth_restoring=True)
            prefix = [*held, False].index(False)
            return pb.LookupResponse(held_count=prefix, tiers=[pb.TIER_ARENA] * prefix, worth_restoring=True)

        return await self._serve("Lookup", request, context, work)

    async def Prefetch(self, request: Any, context: Any) -> Any:
        return await self._serve("Prefetch", request, context, lambda _: pb.PrefetchResponse(present_count=len(request.block_hashes)))

    async def Release(self, request: Any, context: Any) -> Any:
        return await self._serve("Release", request, context, lambda _: pb.ReleaseResponse(released_count=99 if request.all else len(request.block_hashes)))

    async def Cancel(self, request: Any, context: Any) -> Any:
        return await self._serve("Cancel", request, context, lambda _: pb.CancelResponse(found=request.request_id == "known"))

    async def GetCapabilities(self, request: Any, context: Any) -> Any:
        answer = pb.GetCapabilitiesResponse(version="double", blocks_per_request_max=4096, regions_per_session_max=16, planes_per_region_max=64)
        answer.deadline.FromSeconds(30)
        answer.keep_ttl.FromSeconds(600)
        answer.paths.add(tier=pb.TIER_ARENA, path=pb.PATH_DDR, device="host", available=True)
        answer.paths.add(tier=pb.TIER_VOLUME, path=pb.PATH_GDS, device="host", available=False, note="no CUDA device")
        return answer

    async def Status(self, request: Any, context: Any) -> Any:
        return admin_pb2.StatusResponse(version="double", state="SERVING", pid=os.getpid())

    async def DropNamespace(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode[code_of(UnknownRegion())], "no such namespace")

    async def Drain(self, request: Any, context: Any) -> Any:
        return admin_pb2.DrainResponse(spilled_count=3)

    async def Volumes(self, request: Any, context: Any) -> Any:
        return admin_pb2.VolumesResponse(volumes=[admin_pb2.VolumeStatus(path="v0", state="serving")])

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for key in list(self.blocks):
            yield admin_pb2.WatchEventsResponse(kind=admin_pb2.EVENT_KIND_STORED, tier=pb.TIER_ARENA, keys=[key])
        await asyncio.Event().wait()


if __name__ == "__main__":
    Double(Path(sys.argv[1]))
    print("READY", flush=True)
    threading.Event().wait()


__all__ = ["Double", "UnknownSession"]

"""The engines' service: token to session, message to value, use case, value to message."""

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any

import grpc

from offloadd import __version__, clock
from offloadd.errors import AlreadyOpen, InvalidRequest, UnknownSession
from offloadd.model.requests import BlockBatch
from offloadd.offload.admission import Load
from offloadd.offload.bandwidth import Bandwidths, Direction, SizeClass
from offloadd.offload.service import Offload
from offloadd.offload.sessions import Session
from offloadd.offload.ways import VolumeRoute
from offloadd.rpc import convert
from offloadd.rpc.convert import RequestLimits
from offloadd.v1 import offload_pb2 as pb
from offloadd.v1 import offload_pb2_grpc

TOKEN_METADATA_KEY = "offloadd-session"
#: Heartbeats keep a half-dead connection from looking alive for ever.
HEARTBEAT_S = 15.0

Context = grpc.aio.ServicerContext[Any, Any]


class OffloadServicer(offload_pb2_grpc.OffloadServiceServicer):
    """Serves `offloadd.v1.OffloadService`. Errors of offloadd.errors leave it as exceptions; the interceptor makes statuses of them."""

    def __init__(self, offload: Offload, limits: RequestLimits, regions_per_session_max: int, planes_per_region_max: int) -> None:
        self._offload = offload
        self._limits = limits
        self._regions_per_session_max = regions_per_session_max
        self._planes_per_region_max = planes_per_region_max

    def _session(self, context: Context) -> Session:
        for key, value in context.invocation_metadata() or ():
            if key == TOKEN_METADATA_KEY:
                return self._offload.sessions.by_token(value if isinstance(value, str) else value.decode(errors="replace"))
        raise UnknownSession(f"the call carries no {TOKEN_METADATA_KEY} metadata; attach first and send the token with each call")

    def _batches(self, session: Session, request: pb.EvictRequest | pb.RestoreRequest, *, destinations: bool) -> list[BlockBatch]:
        """The request's blocks. What `Core.begin` would refuse is refused here already, before it has cost more than a look."""
        core = self._offload.core
        admit = functools.partial(core.admission.refuse, session.name, now_s=clock.monotonic_s())
        admit(Load(requests=1))
        return convert.batches(request.spans, session, core.regions, self._limits, destinations=destinations, admit=admit)

    def _deadline_s(self, context: Context) -> float:
        """Of a call whose request has no field for one."""
        return convert.call_deadline_s(context.time_remaining(), self._limits)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> AsyncIterator[pb.OpenSessionResponse]:
        """See the protocol."""
        session = self._session(context)
        if not self._offload.sessions.open(session):
            raise AlreadyOpen(f"session {session.name} has its stream already")
        ended = asyncio.Event()
        session.at_end.append(lambda reason: ended.set())
        first = pb.OpenSessionResponse(session_name=session.name, instance=session.instance.name, tenant=session.tenant, capabilities=self._capabilities())
        try:
            yield first
            while not ended.is_set():
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await ended.wait()
                except TimeoutError:
                    yield pb.OpenSessionResponse(session_name=session.name)
        finally:
            self._offload.sessions.end(session, "stream ended")

    async def RegisterRegion(self, request: pb.RegisterRegionRequest, context: Context) -> pb.RegisterRegionResponse:
        """See the protocol."""
        session = self._session(context)
        self._offload.refuse_draining()
        layout, memories = convert.layout(request)
        region = await self._offload.register_region(
            session,
            device=request.device,
            layout=layout,
            memories=memories,
            cache_group=request.cache_group,
            namespace=convert.namespace(request.namespace, session.tenant),
            deadline_s=self._deadline_s(context),
        )
        return pb.RegisterRegionResponse(
            region_id=region.region_id, payload_bytes=region.payload_bytes, slot_bytes=region.slot_bytes, namespace_id=region.namespace.namespace_id
        )

    async def UnregisterRegion(self, request: pb.UnregisterRegionRequest, context: Context) -> pb.UnregisterRegionResponse:
        """See the protocol."""
        await self._offload.unregister_region(self._session(context), request.region_id, self._deadline_s(context))
        return pb.UnregisterRegionResponse()

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        """See the protocol."""
        session = self._session(context)
        self._offload.refuse_draining()
        options = convert.evict_options(request, context.time_remaining(), self._limits)
        batches = self._batches(session, request, destinations=False)
        return convert.evict_response(await self._offload.evictor.evict(session, batches, options))

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> AsyncIterator[pb.RestoreResponse]:
        """See the protocol."""
        session = self._session(context)
        self._offload.refuse_draining()
        options = convert.restore_options(request, context.time_remaining(), self._limits)
        batches = self._batches(session, request, destinations=True)
        async for first, stop, answer in self._offload.restorer.restore(session, batches, options):
            yield convert.restore_response(answer, first, stop)

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        """See the protocol."""
        session = self._session(context)
        keys, tokens_per_block = convert.shard_keys(request.shards, request.block_hashes, session, self._offload.core.regions, self._limits)
        prefix = request.mode != pb.LOOKUP_MODE_MEMBERSHIP
        answer = self._offload.lookups.lookup(
            session,
            keys,
            prefix=prefix,
            lease_until_s=convert.lease_until_s(request, self._limits),
            prefill_tokens_per_s=request.prefill_tokens_per_s,
            tokens_per_block=tokens_per_block,
        )
        response = pb.LookupResponse(
            held_count=answer.held_count,
            tiers=answer.tiers[: answer.held_count].tolist() if prefix else answer.tiers.tolist(),
            worth_restoring=answer.worth_restoring,
        )
        if answer.estimated_s is not None:
            response.estimated_restore.CopyFrom(convert.duration(answer.estimated_s))
        return response

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        """See the protocol."""
        session = self._session(context)
        self._offload.refuse_draining()
        keys, _ = convert.shard_keys(request.shards, request.block_hashes, session, self._offload.core.regions, self._limits)
        queued = present = skipped = 0
        deadline_s = self._deadline_s(context)
        for shard_keys in keys:
            counts = self._offload.spiller.prefetch(self._offload.core.catalog.lookup(shard_keys), deadline_s)
            queued, present, skipped = queued + counts[0], present + counts[1], skipped + counts[2]
        return pb.PrefetchResponse(queued_count=queued, present_count=present, skipped_count=skipped)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """See the protocol."""
        session = self._session(context)
        if request.all:
            if request.shards or request.block_hashes:
                raise InvalidRequest("release of all names no shards and no block hashes")
            return pb.ReleaseResponse(released_count=await self._offload.lookups.release_all(session.instance.ordinal))
        keys, _ = convert.shard_keys(request.shards, request.block_hashes, session, self._offload.core.regions, self._limits)
        return pb.ReleaseResponse(released_count=self._offload.lookups.release(session, keys))

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """See the protocol."""
        return pb.CancelResponse(found=self._offload.core.cancel(self._session(context), request.request_id))

    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Context) -> pb.GetCapabilitiesResponse:
        """See the protocol."""
        return self._capabilities()

    def _capabilities(self) -> pb.GetCapabilitiesResponse:
        return pb.GetCapabilitiesResponse(
            version=__version__,
            blocks_per_request_max=self._limits.blocks_per_request_max,
            regions_per_session_max=self._regions_per_session_max,
            planes_per_region_max=self._planes_per_region_max,
            payload_bytes_max=self._offload.settings.payload_bytes_max,
            deadline=convert.duration(self._limits.deadline_s),
            keep_ttl=convert.duration(self._limits.keep_ttl_s),
            paths=path_capabilities(self._offload),
            requests_per_session_max=self._offload.core.admission.limits.requests_per_session_max,
            bytes_in_flight_per_session_max=self._offload.core.admission.limits.bytes_in_flight_per_session_max,
        )


def path_capabilities(offload: Offload) -> list[pb.PathCapability]:
    """Every way, available or not, with what was measured."""
    rates = offload.core.bandwidths
    return [
        pb.PathCapability(
            tier=int(way.tier),  # type: ignore[arg-type]
            path=int(way.path),  # type: ignore[arg-type]
            device=way.device,
            available=way.available,
            note=way.note,
            restore_bytes_per_s=round(rates.rate("restore", way.tier, way.path)),
            evict_bytes_per_s=round(rates.rate("evict", way.tier, way.path)),
            volumes=[_volume_rates(rates, one) for one in way.volumes],
        )
        for way in offload.ways.notes()
    ]


def _volume_rates(rates: Bandwidths, one: VolumeRoute) -> pb.VolumeRates:
    def rate(direction: Direction, size: SizeClass) -> int:
        return round(rates.rate_of(one.route, direction, size))

    def is_taken(direction: Direction, size: SizeClass) -> bool:
        return rates.choice_of(one.route.device, one.route.volume, direction, size) == one.route.path

    return pb.VolumeRates(
        volume=one.volume,
        available=one.available,
        note=one.note,
        restore_bytes_per_s=rate(Direction.RESTORE, SizeClass.LARGE),
        restore_small_bytes_per_s=rate(Direction.RESTORE, SizeClass.SMALL),
        evict_bytes_per_s=rate(Direction.EVICT, SizeClass.LARGE),
        evict_small_bytes_per_s=rate(Direction.EVICT, SizeClass.SMALL),
        restore_auto=is_taken(Direction.RESTORE, SizeClass.LARGE),
        restore_small_auto=is_taken(Direction.RESTORE, SizeClass.SMALL),
        evict_auto=is_taken(Direction.EVICT, SizeClass.LARGE),
        evict_small_auto=is_taken(Direction.EVICT, SizeClass.SMALL),
    )

"""The operators' service."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc

from offloadd import __version__, clock
from offloadd.mover.messages import Hello
from offloadd.offload.deadlines import result_by
from offloadd.offload.devices import Device
from offloadd.offload.processes import WorkerProcess
from offloadd.offload.service import Offload
from offloadd.offload.volume_link import VolumeLink
from offloadd.rpc import convert
from offloadd.rpc.convert import RequestLimits
from offloadd.rpc.servicer import path_capabilities
from offloadd.v1 import admin_pb2 as pb
from offloadd.v1 import admin_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves `offloadd.v1.AdminService`.

    `counters()` gives (name, value) pairs, `refusals()` how often each limit was in the way.
    `on_drain()` is awaited before a drain; `on_drained()` is told after it, to end the process.
    """

    def __init__(
        self,
        offload: Offload,
        limits: RequestLimits,
        *,
        counters: Callable[[], list[tuple[str, int]]],
        refusals: Callable[[], Mapping[str, int]],
        on_drain: Callable[[], Awaitable[None]],
        on_drained: Callable[[], None],
    ) -> None:
        self._offload = offload
        self._limits = limits
        self._counters = counters
        self._refusals = refusals
        self._on_drain = on_drain
        self._on_drained = on_drained
        self._draining: asyncio.Task[int] | None = None

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """See the protocol."""
        offload, core = self._offload, self._offload.core
        workers: list[WorkerProcess[Any]] = [
            *(device.mover.process for device in core.devices.values() if not device.mover.given_up),
            *(volume.process for volume in core.volumes),
        ]
        hellos = {device.mover.process.name: device.mover.hello for device in core.devices.values() if device.mover.hello is not None}
        return pb.StatusResponse(
            version=__version__,
            pid=os.getpid(),
            uptime=convert.duration(max(0.0, clock.monotonic_s() - offload.ready_s)),
            state="DRAINING" if core.draining else "SERVING",
            sessions=[self._session_status(session) for session in offload.sessions.sessions],
            arena=self._arena_status(),
            volumes=self._volume_statuses(),
            workers=[_worker_status(worker, hellos.get(worker.name)) for worker in workers],
            block_count=core.catalog.block_count,
            block_count_max=core.catalog.index.capacity,
            held_count=core.catalog.holds.held_count,
            paths=path_capabilities(offload),
            counters=[pb.Counter(name=name, value=value) for name, value in self._counters()],
            gpus=[gpu_status(device) for device in core.devices.values() if device.is_gpu],
            load=self._load_status(),
        )

    def _volume_statuses(self) -> list[pb.VolumeStatus]:
        core, now_ns = self._offload.core, clock.monotonic_ns()
        return [volume_status(volume, core.late_count(volume, now_ns)) for volume in core.volumes]

    def _session_status(self, session: Any) -> pb.SessionStatus:
        core = self._offload.core
        regions = core.regions.of_session(session)
        return pb.SessionStatus(
            name=session.name,
            instance=session.instance.name,
            tenant=session.tenant,
            pid=session.pid,
            region_count=len(regions),
            mapped_bytes=sum(region.mapped_bytes for region in regions),
            request_count=core.admission.of(session.name).requests,
            bytes_in_flight=core.admission.of(session.name).bytes,
        )

    def _load_status(self) -> pb.LoadStatus:
        admission, sessions = self._offload.core.admission, self._offload.sessions
        held, limits = admission.in_flight, admission.limits
        return pb.LoadStatus(
            request_count=held.requests,
            request_count_max=limits.requests_max,
            block_count=held.blocks,
            block_count_max=limits.blocks_in_flight_max,
            bytes_in_flight=held.bytes,
            bytes_in_flight_max=limits.bytes_in_flight_max,
            session_count=len(sessions),
            session_count_max=sessions.sessions_max,
            refused_count=sum(self._refusals().values()),
        )

    def _arena_status(self) -> pb.ArenaStatus:
        arena, pool = self._offload.arena, self._offload.core.catalog.arena
        if arena is None or pool is None:
            return pb.ArenaStatus()
        nodes = [
            pb.ArenaNodeStatus(node=node, arena_bytes=slab_count * arena.slab_bytes, used_bytes=used_bytes)
            for node, slab_count, used_bytes in pool.bytes_by_node()
        ]
        return pb.ArenaStatus(arena_bytes=arena.arena_bytes, used_bytes=pool.used_bytes, block_count=pool.used_slots, pages=arena.pages, nodes=nodes)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """See the protocol."""
        # Begun is begun: a caller who does not wait for the end must not leave a daemon that refuses everything and never ends.
        self._draining = self._draining or asyncio.get_running_loop().create_task(self._drain())
        spilled = await result_by(self._deadline_s(context), self._draining, "the drain is not over by the deadline; it goes on")
        return pb.DrainResponse(spilled_count=spilled)

    async def _drain(self) -> int:
        try:
            await self._on_drain()
            return await self._offload.drain()
        finally:
            self._on_drained()

    def _deadline_s(self, context: Context) -> float:
        return convert.call_deadline_s(context.time_remaining(), self._limits)

    async def DropNamespace(self, request: pb.DropNamespaceRequest, context: Context) -> pb.DropNamespaceResponse:
        """See the protocol."""
        return pb.DropNamespaceResponse(dropped_count=await self._offload.drop_namespace(request.namespace_id, self._deadline_s(context)))

    async def Volumes(self, request: pb.VolumesRequest, context: Context) -> pb.VolumesResponse:
        """See the protocol."""
        return pb.VolumesResponse(volumes=self._volume_statuses())

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Context) -> AsyncIterator[pb.WatchEventsResponse]:
        """See the protocol."""
        watcher = self._offload.events.watch()
        try:
            while True:
                watcher.wake.clear()
                while watcher.events:
                    event = watcher.events.popleft()
                    yield pb.WatchEventsResponse(
                        kind=pb.EVENT_KIND_STORED if event.stored else pb.EVENT_KIND_REMOVED,
                        tier=int(event.tier),  # type: ignore[arg-type]
                        keys=event.keys,
                        lost_count=watcher.lost_count,
                    )
                await watcher.wake.wait()
        finally:
            self._offload.events.unwatch(watcher)


def _worker_status(worker: WorkerProcess[Any], hello: Hello | None) -> pb.WorkerStatus:
    status = pb.WorkerStatus(name=worker.name, pid=worker.pid, restart_count=worker.restart_count)
    if hello is not None:
        status.placement, status.copies_by = hello.placement, hello.copies_by
    return status


def gpu_status(device: Device) -> pb.GpuStatus:
    """The state of one GPU."""
    hello = device.mover.hello
    facts = hello.gpu if hello is not None else None
    if facts is None:
        return pb.GpuStatus(device=device.name, uuid=device.uuid, note=device.note)
    return pb.GpuStatus(
        device=device.name,
        uuid=device.uuid,
        name=facts.name,
        pci_bus_id=facts.pci_bus_id,
        compute_mode=facts.compute_mode,
        uses_mps=facts.uses_mps,
        context_bytes=facts.context_bytes,
        note=device.note,
    )


def volume_status(volume: VolumeLink, late_count: int) -> pb.VolumeStatus:
    """The state of one volume. `late_count`: jobs that were sent to it and are late."""
    opened = volume.opened
    state = f"{volume.state}: {volume.failure}" if volume.state in ("failed", "retrying") else volume.state
    if volume.state == "retrying":
        state += f"; tried again in {max(0.0, volume.retry_at_s - clock.monotonic_s()):.1f} s"
    if opened is None:
        return pb.VolumeStatus(path=volume.options.path, state=state)
    pool = volume.pool
    return pb.VolumeStatus(
        path=volume.options.path,
        uuid=opened.volume_uuid.hex(),
        state=state,
        volume_bytes=opened.volume_bytes,
        used_bytes=pool.used_bytes,
        block_count=pool.used_slots,
        slab_count=opened.slab_count,
        cut_count=pool.cut_count,
        open_count=len(pool.open_slabs()),
        file_system=opened.file_system,
        direct_io="yes" if opened.direct_io else opened.direct_io_note,
        scan_header_bytes=volume.scan.header_bytes_read if volume.scan is not None else 0,
        recovery=convert.duration(volume.recovery_s),
        reads_breaker=str(volume.health.reads),
        writes_breaker=str(volume.health.writes),
        late_count=late_count,
    )

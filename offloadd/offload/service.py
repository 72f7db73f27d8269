"""The daemon's use cases behind one door: sessions, regions, moves, lookups, administration."""

import asyncio
import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from offloadd import clock
from offloadd.catalog.catalog import Catalog
from offloadd.catalog.warm_up import warm_up
from offloadd.errors import InvalidRequest, OffloaddError, Unavailable, UnknownRegion
from offloadd.model.enums import Path, Reason, Tier
from offloadd.model.namespace import Namespace
from offloadd.model.region import Layout
from offloadd.mover.messages import JOB_BLOCKS_MAX, Operation
from offloadd.offload.admission import Admission, AdmissionLimits
from offloadd.offload.announcing import Announcer
from offloadd.offload.arena import ArenaMemory, make_arena
from offloadd.offload.bandwidth import REQUEST_WEIGHT, Bandwidths, Choice, Direction, Route
from offloadd.offload.core import Core, Observer
from offloadd.offload.deadlines import refuse_expired, result_by
from offloadd.offload.devices import HOST, Device
from offloadd.offload.events import Events
from offloadd.offload.evict import Evictor
from offloadd.offload.lanes import Lane
from offloadd.offload.lookup import Lookups
from offloadd.offload.measure import Measurer
from offloadd.offload.mover_link import LaneSpec, MoverLink
from offloadd.offload.namespaces import NamespaceEntry, Namespaces
from offloadd.offload.regions import Memories, Region, Regions, namespace_fields
from offloadd.offload.restore import Restorer
from offloadd.offload.sessions import Session, SessionTable
from offloadd.offload.spill import Spiller
from offloadd.offload.traffic import Run, Traffic
from offloadd.offload.volume_health import HealthOptions
from offloadd.offload.volume_link import VolumeLink, VolumeOptions
from offloadd.offload.volume_watch import VolumeWatch
from offloadd.offload.ways import Ways
from offloadd.scheduler.arbiter import Arbiter
from offloadd.scheduler.job_class import ARENA_PRECEDENCE, VOLUME_PRECEDENCE
from offloadd.scheduler.lane_queue import LaneQueue, Windows
from offloadd.scheduler.rate import SECOND_NS, TokenBucket, WriteBudget
from offloadd.tiers.scratch import NO_SCRATCH, Scratch

log = structlog.get_logger()

ARENA_LANE = 0
#: How often expired holds are ended.
EXPIRY_PERIOD_S = 0.5
#: Rows of a dropped namespace that go in one turn of the event loop.
DROP_BATCH = 4096
#: A volume that does not answer within this time at start is served later, when it does: start-up does not wait for it.
VOLUME_OPEN_WAIT_S = 2.0
#: As long for a CUDA context: 0.2 to 2 s each where drivers are well.
GPU_OPEN_WAIT_S = 10.0
DRAIN_TIMEOUT_S = 60.0
#: How long requests may go on after a drain has begun.
DRAIN_GRACE_S = 4.0


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """Plain values from the configuration; bytes, seconds and counts."""

    arena_bytes: int
    arena_slab_bytes: int
    arena_huge_pages: str
    volumes: tuple[VolumeOptions, ...]
    lane_threads: int
    staging_slot_bytes: int
    verify_target: int
    restore_bytes_in_flight: int
    evict_slices_in_flight: int
    index_capacity: int
    sessions_max: int
    memories_per_session_max: int
    chunks_per_session_max: int
    regions_per_session_max: int
    planes_per_region_max: int
    payload_bytes_max: int
    admission: AdmissionLimits
    keep_grace_s: float
    health: HealthOptions = field(default_factory=HealthOptions)
    #: Between two measurements of a route; 0: only when it is opened.
    measure_interval_s: float = 0.0
    #: GPUs, each `cuda:N` or a UUID.
    gpus: tuple[str, ...] = ()
    #: What their copies go by: "auto", "engines" or "kernels".
    gpu_copies: str = "auto"
    #: Whether movers run near to their GPUs, and the nodes (number, bytes of memory) over which the arena is spread.
    numa: bool = True
    native_copies: bool = True
    numa_nodes: tuple[tuple[int, int], ...] = ()
    mover_module: str = "offloadd.mover.main"
    verify: bool = True


@dataclass(slots=True)
class Offload:
    """All use cases. Owned by the event-loop thread."""

    settings: OffloadSettings
    observer: Observer
    core: Core = field(init=False)
    sessions: SessionTable = field(init=False)
    events: Events = field(default_factory=Events)
    evictor: Evictor = field(init=False)
    restorer: Restorer = field(init=False)
    lookups: Lookups = field(init=False)
    spiller: Spiller = field(init=False)
    measurer: Measurer = field(init=False)
    ways: Ways = field(init=False)
    watch: VolumeWatch = field(init=False)
    announcer: Announcer = field(default_factory=Announcer)
    arena: ArenaMemory | None = None
    ready_s: float = 0.0
    _lane_numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(ARENA_LANE + 1))
    #: By the volume's ordinal.
    _arbiters: dict[int, Arbiter] = field(default_factory=dict)
    _expiry: "asyncio.Task[None] | None" = None
    _watching: "asyncio.Task[None] | None" = None
    _drained: "asyncio.Task[int] | None" = None
    #: Drops of namespaces that are under way, by their numbers.
    _drops: "dict[int, asyncio.Task[int]]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.settings
        self.sessions = SessionTable(
            sessions_max=settings.sessions_max,
            memories_per_session_max=settings.memories_per_session_max,
            chunks_per_session_max=settings.chunks_per_session_max,
            on_end=self._session_ended,
        )
        devices = {HOST: Device(HOST, self._mover(HOST), (Path.HOST,))}
        devices |= {name: Device(name, self._mover(name), (Path.BOUNCE, Path.GDS)) for name in settings.gpus}
        self.core = Core(
            catalog=Catalog(capacity=settings.index_capacity, on_event=self.events.publish),
            namespaces=Namespaces(),
            regions=Regions(
                self.sessions,
                regions_per_session_max=settings.regions_per_session_max,
                planes_per_region_max=settings.planes_per_region_max,
                payload_bytes_max=settings.payload_bytes_max,
            ),
            devices=devices,
            observer=self.observer,
            arena_slab_bytes=settings.arena_slab_bytes,
            admission=Admission(settings.admission),
            verify_target=settings.verify_target,
            verify=settings.verify,
        )
        self.core.bandwidths = Bandwidths(self._choice_turned)
        self.core.traffic = Traffic(self._run_over)
        self.measurer = Measurer(self.core, interval_s=settings.measure_interval_s)
        self.ways = Ways(self.core, self.measurer)
        self.spiller = Spiller(self.core)
        self.evictor = Evictor(self.core, self.spiller)
        self.restorer = Restorer(self.core)
        self.lookups = Lookups(self.core)
        self.watch = VolumeWatch(self.core, self._volume_admitted)

    def _mover(self, device: str) -> MoverLink:
        return MoverLink(
            device=device,
            module=self.settings.mover_module,
            copies="" if device == HOST else self.settings.gpu_copies,
            # glibc copies through the cache up to three quarters of the last-level cache; staging copies are better off streaming: 5.7 → 8.9 GB/s.
            environment={"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x40000", "OMP_NUM_THREADS": "1"},
            refuse=lambda uuid: self.core.devices[device].refuse_twin(self.core.devices.values(), uuid),
            numa=self.settings.numa,
            native_copies=self.settings.native_copies,
        )

    # -- life ------------------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the mover and the keepers. Returns when what works can be served; a volume that does not answer in time joins later."""
        settings = self.settings
        warm_up()
        arena = self._make_arena()
        for device in self.core.devices.values():
            device.mover.start(arena)
            if arena is not None:
                device.arena_lane = lane = self._lane(ARENA_LANE, "arena", Tier.ARENA, Path.DDR, device.name)
                device.mover.add_lane(LaneSpec(lane=lane, thread_count=settings.lane_threads, staging_slot_bytes=settings.staging_slot_bytes))
        for options in settings.volumes:
            link = VolumeLink(
                options,
                catalog=self.core.catalog,
                namespaces=self.core.namespaces,
                keep_until_s=self._recovered_keep_until_s,
                on_opened=self._volume_opened,
                on_turn=self.watch.turned,
                health=settings.health,
            )
            self.core.volumes.append(link)
            link.start()
        if self.core.volumes:
            waiters = [asyncio.ensure_future(volume.settled.wait()) for volume in self.core.volumes]
            _, late = await asyncio.wait(waiters, timeout=VOLUME_OPEN_WAIT_S)
            for waiter in late:
                waiter.cancel()
            for volume in self.core.volumes:
                if not volume.settled.is_set():
                    log.warning(
                        "volume does not answer; serving without it until it does",
                        volume=volume.options.path,
                        waited_s=VOLUME_OPEN_WAIT_S,
                        nvme=volume.nvme_paths,
                    )
        await self.core.host.mover.lanes_ready()
        await self._wait_for_gpus()
        self.ready_s = clock.monotonic_s()
        self._expiry = asyncio.get_running_loop().create_task(self._expire_holds())
        self._watching = asyncio.get_running_loop().create_task(self.watch.run())

    async def _wait_for_gpus(self) -> None:
        """A driver that does not answer costs its GPU, not the start."""
        waiters = [asyncio.ensure_future(device.mover.lanes_ready()) for device in self.core.devices.values() if device.is_gpu]
        if not waiters:
            return
        _, late = await asyncio.wait(waiters, timeout=GPU_OPEN_WAIT_S)
        for waiter in late:
            waiter.cancel()
        for device in self.core.devices.values():
            if device.mover.hello is None:
                log.warning("GPU does not answer; serving without it until it does", device=device.name, waited_s=GPU_OPEN_WAIT_S)

    def _recovered_keep_until_s(self) -> float:
        return (self.ready_s or clock.monotonic_s()) + self.settings.keep_grace_s

    def _make_arena(self) -> ArenaMemory | None:
        settings = self.settings
        if settings.arena_bytes == 0:
            return None
        slab_bytes = settings.arena_slab_bytes
        arena = self.arena = make_arena(settings.arena_bytes, slab_bytes, huge_pages=settings.arena_huge_pages, nodes=settings.numa_nodes)
        self.core.catalog.add_arena(
            slab_count=settings.arena_bytes // slab_bytes, slot_count_for=lambda slot_bytes: slab_bytes // slot_bytes, nodes=arena.slab_nodes
        )
        return arena

    def _lane(
        self,
        number: int,
        name: str,
        tier: Tier,
        path: Path,
        device: str,
        volume: int = -1,
        on_io: Callable[[bool, bool], None] = lambda writes, good: None,
    ) -> Lane:
        settings = self.settings
        # The arena has no device behind it that a restore could wait for; more in flight keeps its threads busy.
        evict_bytes = settings.evict_slices_in_flight * settings.staging_slot_bytes
        windows = Windows.of(
            restore_bytes_in_flight=settings.restore_bytes_in_flight,
            evict_bytes_in_flight=evict_bytes if tier == Tier.VOLUME else settings.restore_bytes_in_flight,
            evict_job_bytes=evict_bytes,
            slice_bytes=settings.staging_slot_bytes,
            blocks_max=JOB_BLOCKS_MAX,
        )
        return Lane(
            number=number,
            name=name,
            tier=tier,
            path=path,
            queue=LaneQueue(self._arbiter(volume), windows),
            device=device,
            volume=volume,
            traffic=self.core.traffic,
            on_io=on_io,
        )

    def _arbiter(self, volume: int) -> Arbiter:
        """One for all lanes of a volume; each lane of the arena has its own."""
        settings = self.settings
        slice_bytes = settings.staging_slot_bytes
        if volume < 0:
            return Arbiter(ARENA_PRECEDENCE, slice_bytes=slice_bytes, bytes_in_flight=settings.restore_bytes_in_flight)
        if volume not in self._arbiters:
            # Two lanes may write at a time: while one's slices are gathered the other's are under way.
            evict_bytes = 2 * settings.evict_slices_in_flight * slice_bytes
            rate = self.core.volume(volume).options.evict_bytes_per_s_max
            evict_rate = TokenBucket(bytes_per_period=rate, period_ns=SECOND_NS, burst_bytes=slice_bytes) if rate else None
            self._arbiters[volume] = Arbiter(VOLUME_PRECEDENCE, slice_bytes=slice_bytes, bytes_in_flight=evict_bytes, evict_rate=evict_rate)
        return self._arbiters[volume]

    def _volume_opened(self, volume: VolumeLink) -> None:
        self.core.spawn(self._serve_volume(volume))

    async def _serve_volume(self, volume: VolumeLink) -> None:
        opened = volume.opened
        assert opened is not None
        settings = self.settings
        if volume.options.write_bytes_per_day_max and volume.ordinal not in self.core.write_budgets:
            self.core.write_budgets[volume.ordinal] = WriteBudget(volume.options.write_bytes_per_day_max)
        whole = Scratch(opened.scratch_offset, opened.scratch_bytes)
        gpus = [device for device in self.core.devices.values() if device.is_gpu]
        for device in self.core.devices.values():
            scratch = whole.part(gpus.index(device), len(gpus)) if device.is_gpu else NO_SCRATCH
            for path in device.volume_paths:
                lane = self._lane(next(self._lane_numbers), volume.options.path, Tier.VOLUME, path, device.name, volume.ordinal, volume.health.on_io)
                settled = functools.partial(self._route_settled, device, volume, lane, scratch)
                device.mover.add_lane(
                    LaneSpec(
                        lane=lane,
                        thread_count=volume.options.io_threads,
                        staging_slot_bytes=settings.staging_slot_bytes,
                        fds=volume.fds,
                        volume_uuid=opened.volume_uuid,
                        slab_bytes=opened.slab_bytes,
                        data_offset=opened.data_offset,
                        scratch=scratch,
                        on_settled=settled,
                    )
                )
                if path != Path.GDS:
                    # Jobs wait in the lane while the mover starts. Whether there is a way past the host only the mover can tell.
                    settled("")
        self._enter_namespaces(volume)

    def _enter_namespaces(self, volume: VolumeLink) -> None:
        """Those that regions were registered with while the volume was away."""
        for entry in self.core.namespaces.entries:
            if entry.tenant and not entry.dropped:
                self.announcer.announce(volume, entry)

    def _volume_admitted(self, volume: VolumeLink) -> None:
        """It gets writes again."""
        self._enter_namespaces(volume)
        # What is kept was to lie on a volume; its spill may have been given up.
        self.spiller.spill(self.core.catalog.arena_only(held=True))

    def _route_settled(self, device: Device, volume: VolumeLink, lane: Lane, scratch: Scratch, why: str) -> None:
        """The mover serves a lane to a volume (`why` empty), or does not."""
        device.settled(volume.ordinal, lane, why)
        route = Route(device.name, volume.ordinal, lane.path)
        if why:
            self.core.bandwidths.withdraw(route)
        else:
            self.core.bandwidths.serve(route)
        if device.is_gpu:
            self.measurer.settled(device, volume.ordinal, volume.options.path, scratch)

    def _run_over(self, run: Run) -> None:
        """A lane is idle again: what it did tells how fast its route is, if nothing else moved."""
        if self.measurer.run_over(run) or run.volume < 0:
            return
        route = Route(run.device, run.volume, run.path)
        if run.bounced:
            self.core.bandwidths.failed(route, f"{run.path.name.lower()}: bytes of a request passed the host")
        elif run.counts:
            direction = Direction.EVICT if run.operation == Operation.EVICT else Direction.RESTORE
            self.core.bandwidths.measured(route, direction, run.payload_bytes, run.seconds, REQUEST_WEIGHT)

    def _choice_turned(self, choice: Choice) -> None:
        path, before = choice.path.name.lower(), choice.before.name.lower()
        if Path.AUTO in (choice.path, choice.before):
            return
        self.core.counters[f"auto_{choice.direction.value}_turned_to_{path}"] += 1
        log.info(
            "auto takes another path",
            device=choice.device,
            volume=self.core.volume(choice.volume).options.path,
            operation=choice.direction.value,
            size=choice.size.name.lower(),
            path=path,
            before=before,
            bytes_per_s={one.name.lower(): round(rate) for one, rate in choice.rates},
        )

    async def _expire_holds(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            holds, now_s = self.core.catalog.holds, clock.monotonic_s()
            while holds.due(now_s):
                holds.expire(now_s)
                await asyncio.sleep(0)

    async def drain(self) -> int:
        """Stop taking work, answer what runs, spill held arena blocks to volumes, close the volumes. Returns the blocks spilled. Idempotent."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_task(self._drain())
        return await asyncio.shield(self._drained)

    async def _drain(self) -> int:
        self.core.draining = True
        self.announcer.stop()
        spilled = 0
        await self.measurer.stop()
        await self._end_requests()
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                task = self.spiller.spill(self.core.catalog.arena_only(held=True))
                if task is not None:
                    spilled = await task
        except TimeoutError:
            log.warning("kept blocks could not be spilled in time; those in the arena are lost", timeout_s=DRAIN_TIMEOUT_S)
        await asyncio.gather(*(volume.close(timeout_s=DRAIN_TIMEOUT_S) for volume in self.core.volumes))
        return spilled

    async def _end_requests(self) -> None:
        """Requests that run may end by themselves for some time; the others are answered as cancelled. None of them may be without an answer."""
        if await self._idle_within(DRAIN_GRACE_S):
            return
        waiting = list(self.core.active.values())
        log.warning("ending requests that are not over", waiting=len(waiting), waited_s=DRAIN_GRACE_S)
        for active in waiting:
            active.stop(Reason.CANCELLED)
        if not await self._idle_within(DRAIN_GRACE_S):
            # Of a worker that does not answer. What it does to slots that no block was published in is nobody's loss.
            log.warning("going on without what does not end", waiting=len(self.core.active), waited_s=DRAIN_GRACE_S)

    async def _idle_within(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self.core.idle()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Drain, then end the mover."""
        await self.drain()
        for task in (self._expiry, self._watching):
            if task is not None:
                task.cancel()
        self.watch.stop()
        await asyncio.gather(*(device.mover.process.stop(timeout_s=5.0) for device in self.core.devices.values()))
        if self.arena is not None:
            os.close(self.arena.fd)

    # -- sessions and regions --------------------------------------------------------------------------------------------------------

    def _session_ended(self, session: Session) -> None:
        self.core.regions.forget_session(session)
        for active in self.core.active.values():
            if active.session is session:
                active.stop(Reason.CANCELLED)
        if not session.instance.sessions:
            self.core.spawn(self._instance_ended(session))

    async def _instance_ended(self, session: Session) -> None:
        released = await self.lookups.release_all(session.instance.ordinal)
        log.info("engine instance ended", instance=session.instance.name, tenant=session.tenant, released=released)

    async def register_region(
        self, session: Session, *, device: str, layout: Layout, memories: Memories, cache_group: int, namespace: Namespace, deadline_s: float
    ) -> Region:
        """Map engine memory; see the protocol for what holds and which errors there are."""
        refuse_expired(deadline_s)
        mine = self.core.device(device)
        if namespace.codec:
            raise InvalidRequest(f"namespace.codec is {namespace.codec!r}; this version stores blocks as they are and accepts only an empty codec")
        self.core.regions.check(session, mine, layout, memories)
        entry = self.core.namespaces.enter(namespace.id())
        if entry.number in self._drops:
            # Blocks stored now on a volume that has not dropped it yet would go with the drop.
            raise Unavailable("the namespace is being dropped, and not every volume has been told yet; repeat")
        entry.tenant, entry.fields, entry.dropped = namespace.tenant, namespace_fields(namespace), False
        for volume in self.core.serving_volumes():
            self.announcer.announce(volume, entry)
        region = await self.core.regions.add(
            session, mine, layout, memories, cache_group=cache_group, namespace=entry, block_tokens=namespace.block_tokens, deadline_s=deadline_s
        )
        await self.announcer.settle(entry, deadline_s)
        for volume in self.core.serving_volumes():
            volume.pool.prepare(region.slot_bytes)
            volume.grant_wishes()
        return region

    async def unregister_region(self, session: Session, region_id: bytes, deadline_s: float) -> None:
        """Unmap a region. Raises `DeadlineExpired` if that is not over in time. Idempotent."""
        await self.core.regions.remove(session, region_id, deadline_s)

    # -- administration --------------------------------------------------------------------------------------------------------------

    async def drop_namespace(self, namespace_id: bytes, deadline_s: float) -> int:
        """Forget a namespace's blocks now and for ever.

        Raises `UnknownRegion` when it is not known, `Unavailable` if a volume can't be told, `DeadlineExpired` if one does not answer in time: it is dropped
        here, and each volume drops it as soon as it can. A repeated call waits for the same drop.
        """
        entry = self.core.namespaces.find(namespace_id)
        if entry is None:
            raise UnknownRegion(f"no namespace has id {namespace_id.hex()}")
        drop = self._drops.get(entry.number)
        if drop is None:
            drop = self._drops[entry.number] = asyncio.get_running_loop().create_task(self._drop_namespace(entry))
            drop.add_done_callback(lambda ended: self._drop_ended(entry, ended))
        return await result_by(deadline_s, drop, "the namespace is dropped, but not every volume has answered by the deadline; repeat")

    def _drop_ended(self, entry: NamespaceEntry, drop: "asyncio.Task[int]") -> None:
        del self._drops[entry.number]
        # Also when nobody waits for it any more.
        if not drop.cancelled() and (error := drop.exception()) is not None:
            log.warning("namespace is not dropped everywhere", namespace=entry.namespace_id.hex()[:16], error=str(error))

    async def _drop_namespace(self, entry: NamespaceEntry) -> int:
        entry.dropped = True
        rows = self.core.catalog.rows_of_namespace(entry.number)
        for first in range(0, rows.shape[0], DROP_BATCH):
            batch = rows[first : first + DROP_BATCH]
            # Rows may have gone, and their numbers been reused, while other work ran between two batches.
            self.core.catalog.drop(batch[self.core.catalog.namespaces_of(batch) == entry.number])
            await asyncio.sleep(0)
        volumes = [volume for volume in self.core.volumes if volume.ordinal in entry.on_volumes]
        # All at once: one that stands still keeps no other from being told.
        results = await asyncio.gather(*(volume.drop_namespace(entry) for volume in volumes), return_exceptions=True)
        failures = []
        for volume, result in zip(volumes, results, strict=True):
            if isinstance(result, OffloaddError):
                failures.append(f"{volume.options.path}: {result}")
            elif result is not None:
                raise result
        if failures:
            raise Unavailable("not every volume could be told of the drop; repeat: " + "; ".join(failures))
        return int(rows.shape[0])

    def refuse_draining(self) -> None:
        """Raise `Unavailable` while the daemon drains."""
        if self.core.draining:
            raise Unavailable("the daemon is draining; repeat when it is back")

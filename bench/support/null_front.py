"""The daemon's real front with volumes behind null movers: everything is planned, sent, answered and told, and no byte moves."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np

from bench.support.client import NAMESPACE, block_hash
from bench.support.daemon import DaemonThread
from bench.support.fakes import NONCE, add_volume, grant, recover_blocks
from bench.support.machine import ROOT
from offloadd import clock
from offloadd.catalog.index import keys_array
from offloadd.catalog.pool import Pool
from offloadd.ipc.channel import socket_pair
from offloadd.model.enums import AckLevel, EvictStatus, RestoreStatus, Tier
from offloadd.model.enums import Path as Way
from offloadd.model.namespace import KeyMaker
from offloadd.model.requests import BlockBatch, EvictOptions, RestoreOptions
from offloadd.mover.messages import JOB_BLOCKS_MAX
from offloadd.offload.core import Core
from offloadd.offload.lanes import Lane
from offloadd.offload.namespaces import NamespaceEntry
from offloadd.offload.sessions import Session
from offloadd.offload.volume_health import HealthOptions, VolumeHealth
from offloadd.scheduler.arbiter import Arbiter
from offloadd.scheduler.job_class import VOLUME_PRECEDENCE
from offloadd.scheduler.lane_queue import LaneQueue, Windows
from offloadd.tiers.format import slot_bytes_for, slot_count_for
from offloadd.units import GIB, MIB

THREADS = 4
STAGING_SLOT_BYTES = 8 * MIB
RESTORE_BYTES_IN_FLIGHT = 64 * MIB
#: Blocks of one request that lie together on one volume, as the front places them when it evicts.
STRIPE_BYTES = 8 * MIB


@dataclass(slots=True)
class NullVolume:
    """Stands where the front has a `VolumeLink`: a pool of the catalog, and a keeper that grants every wish at once."""

    ordinal: int
    pool: Pool
    serving: bool = True
    scanning: bool = False
    slab_failures: int = 0
    slabs_changed: asyncio.Event = field(default_factory=asyncio.Event)
    health: VolumeHealth = field(default_factory=lambda: VolumeHealth(HealthOptions(), lambda: None))
    #: To the watch: there is no keeper that it could ask anything.
    opened: None = None
    process: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(name="keeper null", restart_count=0))

    @property
    def options(self) -> SimpleNamespace:
        """What its series are called."""
        return SimpleNamespace(path=f"null {self.ordinal}")

    async def add_namespace(self, entry: NamespaceEntry) -> None:
        """Every namespace stands in the table already."""
        entry.on_volumes[self.ordinal] = (0, 1)

    def nonce(self, slab: int) -> bytes:
        """The nonce of a cut slab."""
        return NONCE

    def grant_wishes(self) -> None:
        """Cut, open and close slabs, and wake those who wait for it."""
        if grant(self.pool):
            changed, self.slabs_changed = self.slabs_changed, asyncio.Event()
            changed.set()


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the front: requests of so many blocks, so many at a time, for so long."""

    seconds: float
    request_blocks: int
    in_flight: int


@dataclass(slots=True)
class Load:
    """Answered requests: wall seconds, CPU seconds of the front's process, blocks and payload bytes."""

    seconds: float = 0.0
    front_cpu_s: float = 0.0
    blocks: int = 0
    requests: int = 0
    latencies: list[float] = field(default_factory=list)


class NullFront:
    """A front on a thread of this process, `mover_count` null movers, and blocks striped over their volumes."""

    def __init__(self, front: DaemonThread, *, mover_count: int, tenant: str, block_bytes: int, block_count: int) -> None:
        self.front = front
        self.block_bytes = block_bytes
        self.block_count = block_count
        self._evict_seed = 100
        self._processes: list[subprocess.Popen[bytes]] = []
        self._core: Core = front.daemon.offload.core
        self._namespace_id = replace(NAMESPACE, tenant=tenant).id()
        maker = KeyMaker(self._namespace_id, 0)
        self._keys = [maker.key(block_hash(number)) for number in range(block_count)]
        front.call(lambda: self._add_volumes(mover_count))

    def _add_volumes(self, mover_count: int) -> None:
        core = self._core
        entry = core.namespaces.enter(self._namespace_id)
        slot_bytes = slot_bytes_for(self.block_bytes)
        stripe = max(1, STRIPE_BYTES // slot_bytes)
        per_volume = -(-self.block_count // mover_count) + stripe
        slabs = -(-per_volume // slot_count_for(GIB, slot_bytes)) + 2
        for ordinal in range(mover_count):
            pool = add_volume(core.catalog, slab_count=slabs)
            mine = [key for number, key in enumerate(self._keys) if number // stripe % mover_count == ordinal]
            recover_blocks(core.catalog, ordinal, keys_array(mine), payload_bytes=self.block_bytes, namespace=entry.number)
            entry.on_volumes[ordinal] = (0, 1)
            core.volumes.append(NullVolume(ordinal, pool))  # type: ignore[arg-type]
            core.host.volume_lanes[ordinal, Way.HOST] = self._lane(ordinal)

    def _lane(self, ordinal: int) -> Lane:
        write_bytes = THREADS * STAGING_SLOT_BYTES
        arbiter = Arbiter(VOLUME_PRECEDENCE, slice_bytes=STAGING_SLOT_BYTES, bytes_in_flight=2 * write_bytes)
        windows = Windows.of(
            restore_bytes_in_flight=RESTORE_BYTES_IN_FLIGHT,
            evict_bytes_in_flight=write_bytes,
            evict_job_bytes=write_bytes,
            slice_bytes=STAGING_SLOT_BYTES,
            blocks_max=JOB_BLOCKS_MAX,
        )
        lane = Lane(
            number=1 + ordinal,
            name=f"null {ordinal}",
            tier=Tier.VOLUME,
            path=Way.HOST,
            queue=LaneQueue(arbiter, windows),
        )
        ours, theirs = socket_pair()
        command = [sys.executable, "-m", "bench.support.null_mover", "--fd", str(theirs.fileno())]
        command += ["--threads", str(THREADS), "--staging", str(STAGING_SLOT_BYTES)]
        self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT))
        theirs.close()
        lane.connect(ours)
        return lane

    def close(self) -> None:
        """End the null movers and give the front its own shape back, so that it stops in order."""

        def give_up() -> None:
            for lane in self._core.host.volume_lanes.values():
                lane.disconnect()
            self._core.host.volume_lanes.clear()
            self._core.volumes.clear()

        self.front.call(give_up)
        for process in self._processes:
            process.wait(30)

    # -- load inside the front's process ---------------------------------------------------------------------------------------------

    def restore_load(self, session: Session, region: int, demand: Demand) -> Load:
        """Restores through the use case itself, without gRPC."""
        return self.front.run(self._restore_load(session, region, demand))

    async def _restore_load(self, session: Session, region: int, demand: Demand) -> Load:
        load, request_blocks = Load(), demand.request_blocks
        batches = list(self._batches(region, request_blocks))
        end = time.perf_counter() + demand.seconds

        async def worker(number: int) -> None:
            turn = number
            while time.perf_counter() < end:
                batch = batches[turn % len(batches)]
                turn += demand.in_flight
                start = time.perf_counter()
                options = RestoreOptions(deadline_s=clock.monotonic_s() + 60)
                async for _, stop, answer in self.front.daemon.offload.restorer.restore(session, [batch], options):
                    if stop == request_blocks and not (answer.status == int(RestoreStatus.RESTORED)).all():
                        raise RuntimeError("a null mover's block was not restored")
                load.latencies.append(time.perf_counter() - start)
                load.blocks += request_blocks
                load.requests += 1

        await _measure(load, [worker(number) for number in range(demand.in_flight)])
        return load

    def evict_load(self, session: Session, region: int, demand: Demand) -> Load:
        """Durable evicts of blocks that were never seen; once the volumes are full each takes victims."""
        return self.front.run(self._evict_load(session, region, demand))

    async def _evict_load(self, session: Session, region: int, demand: Demand) -> Load:
        load, request_blocks = Load(), demand.request_blocks
        self._evict_seed += 1
        random = np.random.default_rng(self._evict_seed)
        end = time.perf_counter() + demand.seconds
        indices = np.arange(request_blocks, dtype=np.uint32)

        async def worker() -> None:
            while time.perf_counter() < end:
                keys = np.frombuffer(random.bytes(32 * request_blocks), dtype="V32")
                start = time.perf_counter()
                options = EvictOptions(deadline_s=clock.monotonic_s() + 60, ack=AckLevel.DURABLE)
                answer = await self.front.daemon.offload.evictor.evict(session, [BlockBatch(region, indices, keys, indices)], options)
                if not (answer.status == int(EvictStatus.STORED)).all():
                    raise RuntimeError(f"blocks behind null movers were not stored: statuses {np.unique(answer.status)}, reasons {np.unique(answer.reason)}")
                load.latencies.append(time.perf_counter() - start)
                load.blocks += request_blocks
                load.requests += 1

        await _measure(load, [worker() for _ in range(demand.in_flight)])
        return load

    def _batches(self, region: int, request_blocks: int) -> Iterator[BlockBatch]:
        positions = np.arange(request_blocks, dtype=np.uint32)
        for first in range(0, self.block_count - request_blocks + 1, request_blocks):
            yield BlockBatch(region, positions + np.uint32(first), keys_array(self._keys[first : first + request_blocks]), positions)


async def _measure(load: Load, workers: list[Coroutine[None, None, None]]) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*workers)
    load.seconds = time.perf_counter() - start
    load.front_cpu_s = time.process_time() - cpu


@contextmanager
def null_front(front: DaemonThread, *, mover_count: int, tenant: str, block_bytes: int, block_count: int) -> Iterator[NullFront]:
    """Open and close a `NullFront`."""
    made = NullFront(front, mover_count=mover_count, tenant=tenant, block_bytes=block_bytes, block_count=block_count)
    try:
        yield made
    finally:
        made.close()

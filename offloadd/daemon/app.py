"""The daemon as a whole: the one place that names concrete classes and puts them together."""

import asyncio
import contextlib
import ctypes
import gc
import resource
import signal

import structlog

from offloadd import __version__
from offloadd.catalog.catalog import Catalog
from offloadd.config.schema import Config
from offloadd.daemon.lock import RuntimeDirectory
from offloadd.daemon.notify import ask_for_time, feed_watchdog, notify
from offloadd.daemon.observer import MetricsObserver, refresh_gauges
from offloadd.errors import ConfigError
from offloadd.memory.topology import read_topology
from offloadd.metrics.registry import Metrics
from offloadd.metrics.server import MetricsServer
from offloadd.model.namespace import use_digests
from offloadd.model.runtime import ADMIN_SOCKET, ATTACH_SOCKET, GRPC_SOCKET
from offloadd.offload.admission import AdmissionLimits
from offloadd.offload.service import Offload, OffloadSettings
from offloadd.offload.volume_health import HealthOptions
from offloadd.offload.volume_link import VolumeOptions
from offloadd.rpc.admin import AdminServicer
from offloadd.rpc.attach import AttachServer
from offloadd.rpc.convert import RequestLimits
from offloadd.rpc.server import GrpcServer, ServerLimits
from offloadd.rpc.servicer import OffloadServicer
from offloadd.transfer import native
from offloadd.transfer.native import NativeUnavailableError

log = structlog.get_logger()

#: Of operators' calls.
ADMIN_CALLS_MAX = 64
#: How long running calls may take to end at a stop; their own deadlines usually end them sooner.
STOP_GRACE_S = 5.0
GAUGE_PERIOD_S = 1.0
#: Of malloc.h.
_M_ARENA_MAX = -8
SOCKET_MODE = 0o660
ADMIN_SOCKET_MODE = 0o600


def settings_of(config: Config) -> OffloadSettings:
    """The plain values that the use cases need."""
    limits, arena, mover = config.limits, config.arena, config.mover
    return OffloadSettings(
        arena_bytes=arena.arena_bytes,
        arena_slab_bytes=arena.slab_bytes,
        arena_huge_pages=arena.huge_pages,
        volumes=tuple(
            VolumeOptions(
                path=str(volume.path),
                io_threads=volume.io_threads,
                open_slabs=volume.open_slabs,
                prewrite=volume.prewrite,
                evict_bytes_per_s_max=volume.evict_bytes_per_s_max,
                write_bytes_per_day_max=volume.write_bytes_per_day_max,
            )
            for volume in config.volume
        ),
        gpus=config.gpu.devices,
        gpu_copies=config.gpu.copies,
        numa=mover.numa,
        native_copies=mover.native_copies,
        numa_nodes=tuple((node.number, node.memory_bytes) for node in read_topology().tier_nodes) if mover.numa else (),
        measure_interval_s=config.gpu.measure_interval_s,
        lane_threads=mover.lane_threads,
        staging_slot_bytes=mover.staging_slot_bytes,
        verify_target=mover.verify_target,
        restore_bytes_in_flight=mover.restore_bytes_in_flight,
        evict_slices_in_flight=mover.evict_slices_in_flight,
        index_capacity=index_capacity(limits.index_bytes_max),
        sessions_max=limits.sessions_max,
        memories_per_session_max=limits.memories_per_session_max,
        chunks_per_session_max=limits.chunks_per_session_max,
        regions_per_session_max=limits.regions_per_session_max,
        planes_per_region_max=limits.planes_per_region_max,
        payload_bytes_max=PAYLOAD_BYTES_MAX,
        admission=AdmissionLimits(
            requests_per_session_max=limits.requests_per_session_max,
            requests_max=limits.requests_max,
            blocks_in_flight_per_session_max=limits.blocks_in_flight_per_session_max,
            blocks_in_flight_max=limits.blocks_in_flight_max,
            bytes_in_flight_per_session_max=limits.bytes_in_flight_per_session_max,
            bytes_in_flight_max=limits.bytes_in_flight_max,
        ),
        keep_grace_s=limits.keep_grace_s,
        health=HealthOptions(**config.breaker.model_dump()),
    )


#: A slot header holds the checksums of 895 chunks of 4 MiB; and a payload's length is 32 bits in the index.
PAYLOAD_BYTES_MAX = 3 << 30


def index_capacity(index_bytes_max: int) -> int:
    """Blocks that an index of so many bytes takes: measured on a small one, since every column is an array by row."""
    sample = 4096
    return max(sample, int(index_bytes_max / Catalog(capacity=sample).bytes_per_block()))


def limits_of(config: Config) -> RequestLimits:
    """The limits of one request."""
    limits = config.limits
    return RequestLimits(
        blocks_per_request_max=limits.blocks_per_request_max,
        deadline_s=limits.deadline_s,
        deadline_s_max=limits.deadline_s_max,
        keep_ttl_s=limits.keep_ttl_s,
        keep_ttl_s_max=limits.keep_ttl_s_max,
        lease_s_max=limits.lease_s_max,
    )


class Daemon:
    """Everything that `offloadd serve` runs. `start` returns when requests are served, `stop` when everything has ended."""

    def __init__(self, config: Config, settings: OffloadSettings | None = None) -> None:
        self._config = config
        settings = settings or settings_of(config)
        self._directory = RuntimeDirectory(config.daemon.runtime_dir)
        workers = ["mover host", *(f"mover {gpu}" for gpu in settings.gpus), *(f"keeper {volume.path}" for volume in settings.volumes)]
        self.metrics = Metrics(
            volumes=[volume.path for volume in settings.volumes],
            workers=workers,
            gpus=settings.gpus,
            nodes=[number for number, _ in settings.numa_nodes],
        )
        self.metrics.show_limits({name: float(value) for name, value in config.limits.model_dump().items()})
        self.offload = Offload(settings, MetricsObserver(self.metrics))
        self.stopping = asyncio.Event()
        self._ending = False
        limits = config.limits
        runtime_dir = config.daemon.runtime_dir
        engines = ServerLimits(
            message_bytes_max=limits.message_bytes_max,
            calls_max=limits.calls_max,
            # Twice as many, since a client's lookups and its stream come on top. More of them wait in the client.
            calls_per_connection_max=2 * limits.requests_per_session_max,
            connections_max=limits.connections_max,
        )
        operators = ServerLimits(limits.message_bytes_max, ADMIN_CALLS_MAX, ADMIN_CALLS_MAX, ADMIN_CALLS_MAX)
        self._engines = GrpcServer(runtime_dir / GRPC_SOCKET, mode=SOCKET_MODE, limits=engines)
        self._operators = GrpcServer(runtime_dir / ADMIN_SOCKET, mode=ADMIN_SOCKET_MODE, limits=operators)
        self._engines.add_offload(OffloadServicer(self.offload, limits_of(config), limits.regions_per_session_max, limits.planes_per_region_max))
        self._operators.add_admin(
            AdminServicer(
                self.offload,
                limits_of(config),
                counters=self._counters,
                refusals=self._refusals,
                on_drain=self._stop_serving,
                on_drained=self.stopping.set,
            )
        )
        self._attach = AttachServer(runtime_dir / ATTACH_SOCKET, self.offload.sessions, waiting_max=limits.sessions_max, mode=SOCKET_MODE)
        self._metrics_server: MetricsServer | None = None
        #: Where the metrics are, empty if nowhere.
        self.metrics_url = ""
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Lock, open the tiers, serve."""
        # Without the library hashlib makes the keys; that it is not there the mover tells.
        with contextlib.suppress(NativeUnavailableError):
            use_digests(native.load().sha256_each)
        self._directory.acquire()
        await self.offload.start()
        await self._attach.start()
        await self._engines.start()
        await self._operators.start()
        address = self._config.daemon.metrics_address
        if address is not None:
            server = MetricsServer(self.metrics.registry, host=address[0], port=address[1])
            try:
                server.open()
                self._metrics_server = server
                self.metrics_url = f"http://{address[0]}:{server.port}/metrics"
            except ConfigError as error:
                # Somebody else's port must not keep engines waiting for their KV.
                log.warning("metrics are not served", error=str(error))
        loop = asyncio.get_running_loop()
        self._background += [loop.create_task(self._refresh()), loop.create_task(feed_watchdog())]
        # What lives by now lives for ever; a full collection over it would stop the loop for milliseconds each time.
        gc.collect()
        gc.freeze()
        notify("READY=1")
        log.info("ready", version=__version__, runtime_dir=str(self._directory.path), metrics=self.metrics_url)

    async def _refresh(self) -> None:
        while True:
            refresh_gauges(self.metrics, self.offload)
            for limit, count in self._refusals().items():
                self.metrics.show_refused(limit, count)
            await asyncio.sleep(GAUGE_PERIOD_S)

    async def _stop_serving(self) -> None:
        """Say that this daemon ends, before it refuses the first request: who asks for its health goes elsewhere."""
        if self._ending:
            return
        self._ending = True
        notify("STOPPING=1")
        log.info("stopping")
        with contextlib.suppress(Exception):
            await self._engines.set_serving(False)

    def _counters(self) -> list[tuple[str, int]]:
        return [*self.metrics.counter_values(), *sorted(self.offload.core.counters.items())]

    def _refusals(self) -> dict[str, int]:
        """How often each limit was in the way, since the start."""
        return {**self.offload.core.admission.refused, "sessions_max": self.offload.sessions.refused_count, "calls_max": self._engines.gate.refused_count}

    async def stop(self) -> None:
        """Drain, then end everything in order. Idempotent enough to be called after a failed start."""
        await self._stop_serving()
        self._background.append(asyncio.get_running_loop().create_task(ask_for_time()))
        await self.offload.stop()
        # Sessions end here, and with them their streams, which the server would else wait for until the grace time is over.
        await self._attach.close()
        await self._engines.stop(STOP_GRACE_S)
        await self._operators.stop(STOP_GRACE_S)
        for task in self._background:
            task.cancel()
        if self._metrics_server is not None:
            self._metrics_server.close()
        self._directory.release()
        log.info("stopped")


async def _serve(config: Config) -> int:
    daemon = Daemon(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stopping.set)
    await daemon.start()
    await daemon.stopping.wait()
    await daemon.stop()
    return 0


def raise_file_limit() -> None:
    """A session costs three descriptors and one a memory; the soft limit of most shells is 1024, for the sake of programs that use select()."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def use_few_heaps() -> None:
    """Let gRPC's threads allocate from one heap with the event loop. By default glibc has as many as 8 a core, and each keeps what it once needed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def run(config: Config) -> int:
    """Serve until SIGTERM, SIGINT or a drain; the process's exit status. Raises errors of offloadd.errors when it can't start."""
    raise_file_limit()
    use_few_heaps()
    return asyncio.run(_serve(config))

"""Every key of the configuration file, with its default and its range."""

import ipaddress
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from offloadd.config.gpus import gpus_present
from offloadd.config.sizes import default_arena_bytes, default_index_bytes, default_lane_threads, parse_size, physical_memory_bytes
from offloadd.model.runtime import ADMIN_SOCKET, ATTACH_SOCKET, GRPC_SOCKET, runtime_dir_default
from offloadd.units import GIB, KIB, MIB, SECTOR_BYTES

#: `sun_path` holds 108 bytes with its terminating zero; a longer socket path fails at bind with a message that names no path.
SOCKET_PATH_BYTES_MAX = 107


def _wrong(limit: str) -> PydanticCustomError:
    """An error whose message ends with what would be right; `load` puts key and value before it."""
    return PydanticCustomError("limit", "{limit}", {"limit": limit})


def _size(value: Any) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise _wrong(str(error)) from None


def _absolute_path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise _wrong("a path is needed")
    path = Path(value)
    # A service's working directory is not the operator's: a relative path would name another file.
    if not path.is_absolute():
        raise _wrong("an absolute path is needed")
    return path


def _runtime_dir(path: Path) -> Path:
    longest = max(len(os.fsencode(path / name)) for name in (GRPC_SOCKET, ATTACH_SOCKET, ADMIN_SOCKET))
    if longest > SOCKET_PATH_BYTES_MAX:
        raise _wrong(f"its sockets would have paths of {longest} bytes; {SOCKET_PATH_BYTES_MAX} is the limit")
    return path


def _listen(value: str) -> str:
    _split_address(value)
    return value


def _split_address(value: str) -> tuple[str, int] | None:
    if value == "":
        return None
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise _wrong('HOST:PORT with a port from 0 to 65535 is needed, or "" for none')
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    # The endpoint asks nobody who they are, and block counts by time tell something of what other tenants do.
    if not loopback:
        raise _wrong("only a loopback address is accepted: 127.0.0.1, [::1] or localhost")
    return host, int(port)


Size = Annotated[int, BeforeValidator(_size)]
AbsolutePath = Annotated[Path, BeforeValidator(_absolute_path)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DaemonConfig(_Section):
    """The process itself."""

    runtime_dir: Annotated[AbsolutePath, AfterValidator(_runtime_dir)] = Field(
        default_factory=runtime_dir_default, validate_default=True, description="Directory of the sockets and the lock; made with mode 0750."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe message that is logged.")
    log_format: Literal["auto", "json", "text"] = Field(default="auto", description="auto: text on a terminal, else JSON lines.")
    metrics_listen: Annotated[str, AfterValidator(_listen)] = Field(
        default="127.0.0.1:9464", description="Loopback HOST:PORT of the Prometheus endpoint; port 0 takes any free one, an empty string turns it off."
    )

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """(host, port) of `metrics_listen`, or None when it is off."""
        return _split_address(self.metrics_listen)


class LimitsConfig(_Section):
    """What clients may use. Over a limit the answer is RESOURCE_EXHAUSTED or INVALID_ARGUMENT at once, never a queue."""

    sessions_max: int = Field(default=1024, ge=1, le=65536, description="Live sessions, one a client process. As many connections may wait to attach.")
    connections_max: int = Field(default=1280, ge=1, le=1 << 17, description="gRPC connections of engines and health checks; one a session as a rule.")
    calls_max: int = Field(default=640, ge=1, le=1 << 17, description="Calls of any kind at once, each of which may hold one message; requests are among them.")
    regions_per_session_max: int = Field(default=64, ge=1, le=4096, description="Registered regions of one session.")
    memories_per_session_max: int = Field(
        default=512, ge=1, le=4096, description="Memories that one session has handed over by descriptor: 2 a layer where each of K and V has its own."
    )
    chunks_per_session_max: int = Field(
        default=4096, ge=1, le=65536, description="Chunks of GPU memory (virtual memory management) in them; each is a descriptor of the daemon's."
    )
    planes_per_region_max: int = Field(default=512, ge=1, le=65536, description="Planes of one region: 2 a layer where K and V lie apart.")
    blocks_per_request_max: int = Field(default=8192, ge=1, le=1 << 20, description="Blocks that one Evict, Restore or Lookup may name.")
    requests_per_session_max: int = Field(default=64, ge=1, le=65536, description="Requests of one session in flight.")
    requests_max: int = Field(default=512, ge=1, le=65536, description="Requests of all sessions in flight.")
    bytes_in_flight_per_session_max: Size = Field(
        default=64 * GIB, ge=MIB, description="Payload bytes of one session's requests in flight, and the most that one request may move."
    )
    bytes_in_flight_max: Size = Field(default=128 * GIB, ge=MIB, description="Payload bytes of all requests in flight.")
    blocks_in_flight_per_session_max: int = Field(default=128 * 1024, ge=1, le=1 << 26, description="Blocks of one session's requests in flight.")
    blocks_in_flight_max: int = Field(default=256 * 1024, ge=1, le=1 << 26, description="Blocks of all requests in flight, some 0.6 KiB of memory each.")
    deadline_s: Seconds = Field(default=30.0, ge=0.001, description="Deadline of a request that brings none.")
    deadline_s_max: Seconds = Field(default=600.0, ge=0.001, le=86400, description="Longest deadline that a request may bring.")
    keep_ttl_s: Seconds = Field(default=600.0, ge=1, description="Time that a kept block stays kept when the request does not say.")
    keep_ttl_s_max: Seconds = Field(default=86400.0, ge=1, le=31 * 86400, description="Longest keep that a request may ask for.")
    lease_s_max: Seconds = Field(default=3600.0, ge=1, le=86400, description="Longest lease that a lookup may ask for.")
    keep_grace_s: Seconds = Field(default=120.0, ge=0, le=86400, description="Time after a restart in which an engine instance may claim its kept blocks.")
    index_bytes_max: Size = Field(
        default_factory=lambda: default_index_bytes(physical_memory_bytes()),
        ge=MIB,
        description="Memory of the block index, some 85 B a block: bounds the blocks of all tiers together.",
    )
    message_bytes_max: Size = Field(
        default=MIB, ge=64 * KIB, le=64 * MIB, description="Largest gRPC message: some 96 B for each block that a request may name."
    )

    @model_validator(mode="after")
    def _defaults_within_limits(self) -> Self:
        for name, limit in (
            ("deadline_s", "deadline_s_max"),
            ("keep_ttl_s", "keep_ttl_s_max"),
            ("requests_per_session_max", "requests_max"),
            ("requests_max", "calls_max"),
            ("bytes_in_flight_per_session_max", "bytes_in_flight_max"),
            ("blocks_per_request_max", "blocks_in_flight_per_session_max"),
            ("blocks_in_flight_per_session_max", "blocks_in_flight_max"),
        ):
            if getattr(self, name) > getattr(self, limit):
                raise _wrong(f"{name} is {getattr(self, name)}; {limit} is {getattr(self, limit)}")
        return self


def _whole_huge_pages(value: int) -> int:
    if value % (2 * MIB):
        raise _wrong("a multiple of 2 MiB, the huge page size, is needed")
    return value


def _whole_sectors(value: int) -> int:
    if value % SECTOR_BYTES:
        raise _wrong(f"a multiple of {SECTOR_BYTES} is needed")
    return value


def _none_or(least: int) -> Callable[[int], int]:
    def check(value: int) -> int:
        if 0 < value < least:
            raise _wrong(f"0, or at least {least} is needed")
        return value

    return check


def _arena_default(data: dict[str, Any]) -> int:
    return default_arena_bytes(data["slab_bytes"], physical_memory_bytes())


class ArenaConfig(_Section):
    """The tier in host memory."""

    slab_bytes: Annotated[Size, AfterValidator(_whole_huge_pages)] = Field(
        default=64 * MIB, ge=2 * MIB, le=GIB, description="Memory cut into slots of one size at a time; the longest block that the arena takes."
    )
    arena_bytes: Size = Field(default_factory=_arena_default, ge=0, description="Size of the arena, in whole slabs; 0 for none.")
    huge_pages: Literal["auto", "never", "require"] = Field(
        default="auto", description="auto: huge pages where the system has some; require: else refuse to start."
    )

    @model_validator(mode="after")
    def _whole_slabs(self) -> Self:
        if self.arena_bytes % self.slab_bytes:
            raise _wrong(f"arena_bytes is {self.arena_bytes}; a multiple of slab_bytes {self.slab_bytes} is needed")
        return self


class MoverConfig(_Section):
    """The processes that move bytes, one a device."""

    lane_threads: int = Field(
        default_factory=default_lane_threads, ge=1, le=64, description="Threads of the lane to the arena: no more than cores, which copies keep busy."
    )
    staging_slot_bytes: Annotated[Size, AfterValidator(_whole_sectors)] = Field(
        default=8 * MIB,
        ge=8 * MIB,
        le=16 * MIB,
        description="Staging slot of one thread: the longest slice. 16 MiB is the safe registration size of nvidia-fs.",
    )
    numa: bool = Field(
        default=True,
        description="On a machine with several NUMA nodes: GPUs' movers run on the CPUs near to their GPU, and the arena is spread over the nodes.",
    )
    native_copies: bool = Field(
        default=True,
        description="Copy and check host memory by the C library where it was built; else NumPy does. False is for comparing the two.",
    )
    verify_target: int = Field(default=0, ge=0, le=1 << 20, description="Compare every N-th restored block in engine memory with the staging slot; 0 for none.")
    evict_slices_in_flight: int = Field(
        default=4, ge=1, le=64, description="Evict slices that one lane has in flight, so that a restore waits for one I/O at most."
    )
    restore_bytes_in_flight: Size = Field(default=64 * MIB, ge=8 * MIB, description="Restore bytes that one lane has in flight.")

    @model_validator(mode="after")
    def _a_slice_fits(self) -> Self:
        if self.restore_bytes_in_flight < self.staging_slot_bytes:
            raise _wrong(f"restore_bytes_in_flight is {self.restore_bytes_in_flight}; at least staging_slot_bytes {self.staging_slot_bytes} is needed")
        return self


def _a_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_GPU_NAME = re.compile(r"cuda:(0|[1-9][0-9]{0,2})|(GPU|MIG)-[0-9a-fA-F-]{1,64}")


def _gpu_name(value: str) -> str:
    if not _GPU_NAME.fullmatch(value):
        raise _wrong('"cuda:N" or a UUID as nvidia-smi -L prints it ("GPU-...") is needed')
    return value


GpuName = Annotated[str, AfterValidator(_gpu_name)]


class GpuConfig(_Section):
    """The GPUs whose engines are served, each by a mover of its own. Needs one of the extras cuda12 and cuda13."""

    devices: Annotated[tuple[GpuName, ...], BeforeValidator(_a_list)] = Field(
        default_factory=gpus_present, max_length=64, description='GPUs by UUID or as "cuda:N". Default: those that the driver shows.'
    )

    copies: Literal["auto", "engines", "kernels"] = Field(
        default="auto", description="auto: by kernels where these measure better by far, else by the GPU's copy engines; the others: always by these."
    )
    measure_interval_s: Seconds = Field(
        default=3600.0,
        ge=0,
        le=7 * 86400,
        description="Time between two measurements of the paths to each volume, by which AUTO chooses; 0: only when they are opened.",
    )

    @model_validator(mode="after")
    def _devices_differ(self) -> Self:
        # As the movers read them: hexadecimal digits of either case, and the kind before them does not matter. Whether a cuda:N is one of these they find out.
        gpus = {name.upper().removeprefix("GPU-").removeprefix("MIG-") for name in self.devices}
        if len(gpus) != len(self.devices):
            raise _wrong(f"devices is {list(self.devices)}; each GPU may stand there once")
        return self


class VolumeConfig(_Section):
    """One volume: a file or a block device that `offloadd volume format` has formatted."""

    path: AbsolutePath = Field(description="The file or block device.")
    io_threads: int = Field(
        default=8, ge=1, le=64, description="Threads that read and write it, half of them in long I/Os at a time; each has a staging slot in every mover."
    )
    open_slabs: int = Field(default=8, ge=1, le=4096, description="Slabs open for writing at a time: what is scanned after a crash.")
    prewrite: bool = Field(default=True, description="Write each slab once before its first use: an unwritten extent reads as zeros after a power cut.")
    evict_bytes_per_s_max: Annotated[Size, AfterValidator(_none_or(MIB))] = Field(
        default=0, ge=0, description="Bytes a second that evicts and spills may write; 0 for no limit. What is over it waits."
    )
    write_bytes_per_day_max: Annotated[Size, AfterValidator(_none_or(GIB))] = Field(
        default=0,
        ge=0,
        description="Bytes a day that evicts and spills may write, for the sake of the drive's endurance; 0 for no limit. What is over it is not stored here.",
    )


class BreakerConfig(_Section):
    """When a volume that hangs or fails is not used any more, and how soon it is again."""

    late_s: Seconds = Field(default=5.0, ge=0.5, le=600, description="Time that I/Os may be in flight without one of them ending.")
    failures_max: int = Field(default=8, ge=1, le=1024, description="Writes that fail in a row.")
    probe_interval_s: Seconds = Field(default=1.0, ge=0.1, le=60, description="Time between two probes, small reads, of a volume that is not used.")
    probe_wait_s: Seconds = Field(default=2.0, ge=0.1, le=60, description="Time that a probe may take.")


class Config(_Section):
    """The whole file."""

    daemon: DaemonConfig = Field(default_factory=DaemonConfig, description="The process itself.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="What clients may use.")
    arena: ArenaConfig = Field(default_factory=ArenaConfig, description="The tier in host memory.")
    mover: MoverConfig = Field(default_factory=MoverConfig, description="The processes that move bytes.")
    gpu: GpuConfig = Field(default_factory=GpuConfig, description="The GPUs whose engines are served.")
    breaker: BreakerConfig = Field(default_factory=BreakerConfig, description="When a volume that hangs or fails is not used.")
    volume: Annotated[tuple[VolumeConfig, ...], BeforeValidator(_a_list)] = Field(
        default=(), max_length=64, description="The volumes, in the order of their use."
    )

    @model_validator(mode="after")
    def _volumes_differ(self) -> Self:
        seen: dict[str, int] = {}
        for number, volume in enumerate(self.volume):
            # Links resolved: two names of one device would be one volume with two owners.
            first = seen.setdefault(os.path.realpath(volume.path), number)
            if first != number:
                raise _wrong(f'volume[{number}].path is "{volume.path}"; volume[{first}] is the same file')
        return self

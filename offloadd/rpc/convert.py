"""Between protobuf messages and the values of the use cases; every check of a request's shape is here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration

from offloadd import clock
from offloadd.catalog.index import KEY_DTYPE, keys_array
from offloadd.errors import InvalidRequest
from offloadd.model.device_event import FLAG_WORD_BYTES, EventName, FlagValue
from offloadd.model.enums import AckLevel, Path, Priority, Tier
from offloadd.model.namespace import KeyMaker, Namespace, Shard
from offloadd.model.region import Layout, Plane
from offloadd.model.requests import BlockBatch, EvictOptions, RestoreOptions
from offloadd.offload.admission import Load
from offloadd.offload.answers import Answer
from offloadd.offload.moves import PathUse, StageClock
from offloadd.offload.regions import CudaMemory, Memories, Region, Regions
from offloadd.offload.sessions import Session
from offloadd.v1 import offload_pb2 as pb

HASH_BYTES_MAX = 64
#: cudaIpcMemHandle_t and cudaIpcEventHandle_t.
CUDA_HANDLE_BYTES = 64
#: The answer leaves this long before the gRPC deadline (at most a tenth of what is left), so that the client sees outcomes instead of DEADLINE_EXCEEDED.
DEADLINE_MARGIN_S = 0.05

Member = TypeVar("Member", Tier, Path, AckLevel, Priority)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for; counts, bytes and seconds."""

    blocks_per_request_max: int
    deadline_s: float
    deadline_s_max: float
    keep_ttl_s: float
    keep_ttl_s_max: float
    lease_s_max: float


# -- requests ------------------------------------------------------------------------------------------------------------------------


def batches(
    spans: Iterable[pb.BlockSpan],
    session: Session,
    regions: Regions,
    limits: RequestLimits,
    *,
    destinations: bool,
    admit: Callable[[Load], None] = lambda _: None,
) -> list[BlockBatch]:
    """The blocks of a request, region by region, positions in request order. Raises `InvalidRequest` or `UnknownRegion`; nothing was done then.

    `admit` may raise, too: it is asked before the keys are made, which costs milliseconds for thousands of blocks.
    """
    in_regions: list[tuple[pb.BlockSpan, Region]] = []
    count = payload_bytes = 0
    for number, span in enumerate(spans):
        region = regions.find(session, span.region_id)
        _check_span(number, span, region)
        in_regions.append((span, region))
        count += span.count
        if count > limits.blocks_per_request_max:
            raise InvalidRequest(f"request names at least {count} blocks; blocks_per_request_max is {limits.blocks_per_request_max}")
        payload_bytes += span.count * region.payload_bytes
    if count == 0:
        raise InvalidRequest("request names no blocks; at least 1 is needed")
    admit(Load(1, count, payload_bytes))
    by_region: dict[int, tuple[Region, list[npt.NDArray[np.uint32]], list[bytes], list[npt.NDArray[np.uint32]]]] = {}
    first = 0
    for span, region in in_regions:
        entry = by_region.setdefault(region.number, (region, [], [], []))
        entry[1].append(np.arange(span.start, span.start + span.count, dtype=np.uint32))
        entry[2].extend(region.keys.keys(span.block_hashes))
        entry[3].append(np.arange(first, first + span.count, dtype=np.uint32))
        first += span.count
    found = []
    seen: set[bytes] = set()
    for region, indices, keys, positions in by_region.values():
        batch = BlockBatch(region=region.number, indices=np.concatenate(indices), keys=keys_array(keys), positions=np.concatenate(positions))
        if destinations and len(indices) > 1:
            _refuse_overlap(batch, region)
        _refuse_duplicates(keys, batch, seen)
        found.append(batch)
    return found


def _check_span(number: int, span: pb.BlockSpan, region: Region) -> None:
    if span.count < 1:
        raise InvalidRequest(f"span {number} has count {span.count}; at least 1 is needed")
    if span.start + span.count > region.layout.block_count:
        raise InvalidRequest(f"span {number} ends before block {span.start + span.count}; its region has {region.layout.block_count} blocks")
    if len(span.block_hashes) != span.count:
        raise InvalidRequest(f"span {number} has {len(span.block_hashes)} block hashes for a count of {span.count}")
    _check_hashes(span.block_hashes, f"span {number}")


def _check_hashes(hashes: Any, what: str) -> None:
    for length in set(map(len, hashes)):
        if not 1 <= length <= HASH_BYTES_MAX:
            raise InvalidRequest(f"{what} has a block hash of {length} bytes; 1 to {HASH_BYTES_MAX} are allowed")


def _refuse_overlap(batch: BlockBatch, region: Region) -> None:
    # Two blocks scattered to one place: the second would overwrite a block that was answered RESTORED.
    values, counts = np.unique(batch.indices, return_counts=True)
    if values.shape[0] != batch.indices.shape[0]:
        twice = int(values[counts > 1][0])
        raise InvalidRequest(f"block index {twice} of region {region.region_id.hex()} stands twice as a destination")


def _refuse_duplicates(keys: list[bytes], batch: BlockBatch, seen: set[bytes]) -> None:
    before = len(seen)
    seen.update(keys)
    if len(seen) == before + len(keys):
        return
    known: set[bytes] = set()
    for key, position in zip(keys, batch.positions.tolist(), strict=True):
        if key in known:
            raise InvalidRequest(f"the block hash of block {position} of the request stands twice in one namespace and cache group")
        known.add(key)
    raise InvalidRequest("a block hash stands in two regions of one namespace and cache group")


def _member(kind: type[Member], value: int, name: str) -> Member:
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequest(f"{name} is {value}; known are {', '.join(f'{member.value} {member.name}' for member in kind)}") from None


def seconds_of(duration: Duration) -> float:
    """Seconds of a Duration."""
    return float(duration.seconds) + duration.nanos / 1e9


def _bounded_seconds(message: Any, field: str, default_s: float, limit_s: float, limit_name: str) -> float:
    if not message.HasField(field):
        return default_s
    seconds = seconds_of(getattr(message, field))
    if not 0 < seconds <= limit_s:
        raise InvalidRequest(f"{field} is {seconds} s; more than 0 and at most {limit_name} {limit_s} s are allowed")
    return seconds


def deadline_s(message: pb.EvictRequest | pb.RestoreRequest, remaining_s: float | None, limits: RequestLimits) -> float:
    """The deadline on the monotonic clock: the earliest of the request's, the call's and, where neither is set, the default."""
    # A call's deadline beyond the limit (gRPC clients often set none, or a day) is cut to it; a request's own is refused, since it was meant.
    fallback_s = limits.deadline_s if remaining_s is None else limits.deadline_s_max
    allowed_s = _bounded_seconds(message, "deadline", fallback_s, limits.deadline_s_max, "deadline_s_max")
    return clock.monotonic_s() + _within(allowed_s, remaining_s)


def call_deadline_s(remaining_s: float | None, limits: RequestLimits) -> float:
    """As `deadline_s`, for requests that name none: the call's, cut to the limit, or where it has none the default."""
    return clock.monotonic_s() + _within(limits.deadline_s if remaining_s is None else limits.deadline_s_max, remaining_s)


def _within(allowed_s: float, remaining_s: float | None) -> float:
    """`allowed_s`, and the answer still arrives before the call's own deadline."""
    return allowed_s if remaining_s is None else min(allowed_s, remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 10))


def evict_options(request: pb.EvictRequest, remaining_s: float | None, limits: RequestLimits) -> EvictOptions:
    """Options of an evict; raises `InvalidRequest` for numbers out of range."""
    keep_s = _bounded_seconds(request, "keep_ttl", limits.keep_ttl_s, limits.keep_ttl_s_max, "keep_ttl_s_max")
    return EvictOptions(
        deadline_s=deadline_s(request, remaining_s, limits),
        ack=_member(AckLevel, request.ack, "ack") or AckLevel.COPIED,
        tier=_member(Tier, request.tier, "tier"),
        path=_member(Path, request.path, "path"),
        require_path=_required(request.require_path, request.path),
        keep_until_s=clock.monotonic_s() + keep_s if request.keep else None,
        priority=_member(Priority, request.priority, "priority"),
        request_id=_request_id(request.request_id),
        source_ready=_event(request, "source_ready"),
    )


def restore_options(request: pb.RestoreRequest, remaining_s: float | None, limits: RequestLimits) -> RestoreOptions:
    """Options of a restore; raises `InvalidRequest` for numbers out of range."""
    return RestoreOptions(
        deadline_s=deadline_s(request, remaining_s, limits),
        path=_member(Path, request.path, "path"),
        require_path=_required(request.require_path, request.path),
        consume=request.consume,
        priority=_member(Priority, request.priority, "priority"),
        request_id=_request_id(request.request_id),
        destination_free=_event(request, "destination_free"),
    )


def _event(request: Any, field: str) -> EventName:
    if not request.HasField(field):
        return b""
    event = getattr(request, field)
    match event.WhichOneof("source"):
        case "handle":
            handle: bytes = event.handle
            if len(handle) != CUDA_HANDLE_BYTES:
                raise InvalidRequest(f"{field} has a handle of {len(handle)} bytes; a CUDA IPC event handle has {CUDA_HANDLE_BYTES}")
            return handle
        case "flag":
            return _flag(event.flag, field)
        case _:
            raise InvalidRequest(f"{field} names neither an event nor a flag; exactly one is needed")


def _flag(flag: pb.DeviceFlag, field: str) -> FlagValue:
    word = flag.word
    if len(word.handle) != CUDA_HANDLE_BYTES:
        raise InvalidRequest(f"{field} has a flag with a handle of {len(word.handle)} bytes; a CUDA IPC memory handle has {CUDA_HANDLE_BYTES}")
    if word.memory_bytes != FLAG_WORD_BYTES:
        raise InvalidRequest(f"{field} has a flag of {word.memory_bytes} bytes; its word has {FLAG_WORD_BYTES}")
    if word.offset_bytes % FLAG_WORD_BYTES:
        # Half of an old word and half of a new one could be read as a value that was never written.
        raise InvalidRequest(f"{field} has a flag at offset {word.offset_bytes}; it must be a multiple of {FLAG_WORD_BYTES}")
    if flag.value < 1:
        raise InvalidRequest(f"{field} has a flag with value {flag.value}, which every word has reached; at least 1 is needed")
    return FlagValue(word.handle, word.offset_bytes, flag.value)


def _required(require_path: bool, path: int) -> bool:
    if require_path and path == int(Path.AUTO):
        raise InvalidRequest("require_path is set but path is not")
    return require_path


def _request_id(text: str) -> str:
    if len(text) > 128:
        raise InvalidRequest(f"request_id has {len(text)} characters; at most 128 are allowed")
    return text


def namespace(message: pb.Namespace, tenant: str) -> Namespace:
    """The namespace with the tenant that the daemon vouches for. Raises `InvalidRequest` for a name that stands twice in `extra`."""
    names = [field.name for field in message.extra]
    if len(set(names)) != len(names):
        raise InvalidRequest("a name stands twice in namespace.extra")
    return Namespace(
        tenant=tenant,
        model=message.model,
        weights=message.weights,
        adapter=message.adapter,
        overrides=message.overrides,
        engine=message.engine,
        engine_version=message.engine_version,
        attention_backend=message.attention_backend,
        isa=message.isa,
        hash_algorithm=message.hash_algorithm,
        kv_dtype=message.kv_dtype,
        codec=message.codec,
        block_tokens=message.block_tokens,
        layout=message.layout,
        salt=message.salt,
        shard=Shard(
            layer_start=message.shard.layer_start,
            layer_count=message.shard.layer_count,
            head_start=message.shard.head_start,
            head_count=message.shard.head_count,
        ),
        extra=tuple((field.name, field.value) for field in message.extra),
    )


def layout(request: pb.RegisterRegionRequest) -> tuple[Layout, Memories]:
    """The region's layout and its memories."""
    memories: list[bytes | CudaMemory] = []
    for number, memory in enumerate(request.memories):
        match memory.WhichOneof("source"):
            case "attached_id":
                memories.append(memory.attached_id)
            case "cuda_ipc":
                piece = memory.cuda_ipc
                if len(piece.handle) != CUDA_HANDLE_BYTES:
                    raise InvalidRequest(f"memory {number} has a CUDA IPC handle of {len(piece.handle)} bytes; it has {CUDA_HANDLE_BYTES}")
                memories.append(CudaMemory(piece.handle, piece.offset_bytes, piece.memory_bytes))
            case _:
                raise InvalidRequest(f"memory {number} names neither attached memory nor a CUDA IPC handle")
    if len(set(memories)) != len(memories):
        raise InvalidRequest("a memory stands twice in memories")
    planes = tuple(Plane(plane.memory, plane.offset_bytes, plane.block_stride_bytes, plane.block_bytes) for plane in request.planes)
    return Layout(block_count=request.block_count, planes=planes), tuple(memories)


def shard_keys(
    shards: Iterable[pb.ShardSelector], block_hashes: Any, session: Session, regions: Regions, limits: RequestLimits
) -> tuple[list[npt.NDArray[Any]], int]:
    """One key array per shard, and the tokens in a block as far as the selectors tell (0: unknown)."""
    hashes = list(block_hashes)
    if not hashes:
        raise InvalidRequest("request names no block hashes; at least 1 is needed")
    makers, tokens = [], 0
    for number, shard in enumerate(shards):
        match shard.WhichOneof("shard"):
            case "region_id":
                region = regions.find(session, shard.region_id)
                makers.append(region.keys)
                tokens = tokens or region.block_tokens
            case "namespace":
                makers.append(KeyMaker(namespace(shard.namespace, session.tenant).id(), shard.cache_group))
                tokens = tokens or shard.namespace.block_tokens
            case _:
                raise InvalidRequest(f"shard {number} names neither a region nor a namespace")
    if not makers:
        raise InvalidRequest("request names no shards; at least 1 is needed")
    asked = len(hashes) * len(makers)
    if asked > limits.blocks_per_request_max:
        raise InvalidRequest(f"request names {asked} blocks ({len(makers)} shards); blocks_per_request_max is {limits.blocks_per_request_max}")
    _check_hashes(hashes, "request")
    return [np.frombuffer(maker.packed(hashes), dtype=KEY_DTYPE) for maker in makers], tokens


def lease_until_s(request: pb.LookupRequest, limits: RequestLimits) -> float | None:
    """End of the lease on the monotonic clock, None without one."""
    if not request.HasField("lease"):
        return None
    return clock.monotonic_s() + _bounded_seconds(request, "lease", 0.0, limits.lease_s_max, "lease_s_max")


# -- answers -------------------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> Duration:
    """A Duration of so many seconds."""
    return _nanoseconds(round(seconds * 1e9))


def _nanoseconds(nanos: int) -> Duration:
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def _runs(answer: Answer, first: int, stop: int) -> Iterable[tuple[int, int, int, int]]:
    """(status, reason, tier, length) of runs of equal outcomes: nearly always one, so that 512 outcomes cost one message and a copy."""
    status, reason, tier = answer.status[first:stop], answer.reason[first:stop], answer.tier[first:stop]
    if stop == first + 1:
        yield int(status[0]), int(reason[0]), int(tier[0]), 1
        return
    packed = status.astype(np.uint32) << 16 | reason.astype(np.uint32) << 8 | tier
    edges = [0, *(np.flatnonzero(packed[1:] != packed[:-1]) + 1).tolist(), stop - first]
    for start, end in pairwise(edges):
        if end > start:
            yield int(status[start]), int(reason[start]), int(tier[start]), end - start


def evict_response(answer: Answer) -> pb.EvictResponse:
    """The whole answer of an evict."""
    response = pb.EvictResponse(paths=map(_path_use, answer.uses), times=_times(answer.clock))
    for status, reason, tier, length in _runs(answer, 0, answer.status.shape[0]):
        one = pb.EvictOutcome(status=status, reason=reason, tier=tier)  # type: ignore[arg-type]
        response.outcomes.extend([one] * length)
    return response


def restore_response(answer: Answer, first: int, stop: int) -> pb.RestoreResponse:
    """The blocks first..stop-1; with the ways and times if they are the last."""
    response = pb.RestoreResponse()
    for status, reason, tier, length in _runs(answer, first, stop):
        one = pb.RestoreOutcome(status=status, reason=reason, tier=tier)  # type: ignore[arg-type]
        response.outcomes.extend([one] * length)
    if stop == answer.status.shape[0]:
        response.paths.extend(map(_path_use, answer.uses))
        response.times.CopyFrom(_times(answer.clock))
    return response


def _path_use(use: PathUse) -> pb.PathUse:
    return pb.PathUse(
        tier=int(use.tier),  # type: ignore[arg-type]
        path=int(use.path),  # type: ignore[arg-type]
        block_count=use.block_count,
        payload_bytes=use.payload_bytes,
        io_bytes=use.io_bytes,
        way=int(use.way),  # type: ignore[arg-type]
    )


def _times(stages: StageClock) -> pb.StageTimes:
    return pb.StageTimes(
        queue=_nanoseconds(stages.queue_ns),
        copy=_nanoseconds(stages.copy_ns),
        checksum=_nanoseconds(stages.checksum_ns),
        io=_nanoseconds(stages.io_ns),
        total=_nanoseconds(stages.total_ns),
    )

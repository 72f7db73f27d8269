"""Requests out of plain values, plain values out of answers: the part that both clients share, without I/O.

Answers are checked: a daemon that answers fewer blocks than were asked for, or in a word this client does not know, is never taken for success.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar, cast

from google.protobuf.duration_pb2 import Duration

from offloadd.client.cuda.memory import DeviceMemory
from offloadd.client.memory import HostMemory
from offloadd.client.values import (
    Blocks,
    Capabilities,
    EvictOutcome,
    EvictResult,
    LookupResult,
    PathCapability,
    PathUse,
    PrefetchResult,
    Region,
    RestoreOutcome,
    RestorePart,
    RestoreResult,
    ShardName,
    StageTimes,
    VolumeRates,
)
from offloadd.errors import DaemonFailed, InvalidRequest
from offloadd.model.device_event import FLAG_WORD_BYTES, EventName
from offloadd.model.enums import AckLevel, EvictStatus, Path, Priority, Reason, RestoreStatus, Tier, Way
from offloadd.model.namespace import Namespace
from offloadd.v1 import offload_pb2 as pb

BLOCK_HASH_BYTES_MAX = 64

E = TypeVar("E", bound=IntEnum)
Shards = Sequence["Region | ShardName"]


def duration(seconds: float | None) -> Duration | None:
    """None stays unset. Raises InvalidRequest for times that are negative or no number."""
    if seconds is None:
        return None
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidRequest(f"a time of {seconds} s can't be asked for; 0 or more is needed")
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def seconds(value: Duration) -> float:
    """A duration in seconds."""
    return float(value.seconds) + value.nanos / 1e9


def spans(blocks: Blocks | Sequence[Blocks]) -> list[pb.BlockSpan]:
    """Runs of neighbouring indices, in the order given. Raises InvalidRequest for lists of unequal length and impossible indices or hashes."""
    made: list[pb.BlockSpan] = []
    for part in [blocks] if isinstance(blocks, Blocks) else blocks:
        if len(part.indices) != len(part.hashes):
            raise InvalidRequest(f"blocks have {len(part.indices)} indices and {len(part.hashes)} hashes; one hash per index is needed")
        indices, hashes = list(map(int, part.indices)), _hashes(part.hashes)
        if not part.region.region_id:
            raise InvalidRequest("the region is not registered")
        start = 0
        while start < len(indices):
            end = start + 1
            while end < len(indices) and indices[end] == indices[end - 1] + 1:
                end += 1
            first, last = indices[start], indices[end - 1]
            if first < 0 or last >= part.region.block_count:
                raise InvalidRequest(f"blocks {first} to {last} do not lie in the region; it has {part.region.block_count}")
            made.append(pb.BlockSpan(region_id=part.region.region_id, start=first, count=end - start, block_hashes=hashes[start:end]))
            start = end
    return made


def _hashes(hashes: Iterable[bytes]) -> list[bytes]:
    checked = list(hashes)
    for length in set(map(len, checked)):
        if not 1 <= length <= BLOCK_HASH_BYTES_MAX:
            raise InvalidRequest(f"a block hash has {length} bytes; 1 to {BLOCK_HASH_BYTES_MAX} are allowed")
    return checked


def block_count(blocks: Blocks | Sequence[Blocks]) -> int:
    """Blocks of a request."""
    return len(blocks.indices) if isinstance(blocks, Blocks) else sum(len(part.indices) for part in blocks)


def namespace(value: Namespace) -> pb.Namespace:
    """Raises InvalidRequest if `tenant` is set: the daemon takes it from the process's credentials, and a name that is ignored would mislead."""
    if value.tenant:
        raise InvalidRequest(f"namespace names tenant {value.tenant!r}; leave it empty, the daemon sets it")
    shard = value.shard
    return pb.Namespace(
        model=value.model,
        weights=value.weights,
        adapter=value.adapter,
        overrides=value.overrides,
        engine=value.engine,
        engine_version=value.engine_version,
        attention_backend=value.attention_backend,
        isa=value.isa,
        hash_algorithm=value.hash_algorithm,
        kv_dtype=value.kv_dtype,
        codec=value.codec,
        block_tokens=value.block_tokens,
        layout=value.layout,
        salt=value.salt,
        shard=pb.Shard(layer_start=shard.layer_start, layer_count=shard.layer_count, head_start=shard.head_start, head_count=shard.head_count),
        extra=[pb.NamespaceField(name=name, value=text) for name, text in value.extra],
    )


def device_of(memories: Sequence[HostMemory | DeviceMemory]) -> str:
    """The device that memories lie on. Raises InvalidRequest for none, and for memories of several devices."""
    devices = sorted({memory.device_uuid if isinstance(memory, DeviceMemory) else "host" for memory in memories})
    if len(devices) != 1:
        raise InvalidRequest(f"the memories of a region lie on {len(devices)} devices ({', '.join(devices) or 'none'}); they must lie on one")
    return devices[0]


def is_attached(memory: HostMemory | DeviceMemory) -> bool:
    """Whether it goes by descriptors, over the attach socket; else its handle goes with the request."""
    return isinstance(memory, HostMemory) or bool(memory.chunks)


def _memory(memory: HostMemory | DeviceMemory, memory_ids: Mapping[HostMemory | DeviceMemory, bytes]) -> pb.Memory:
    if isinstance(memory, HostMemory):
        return pb.Memory(attached_id=memory_ids[memory])
    if memory.closed:
        raise InvalidRequest("the device memory is closed: what it named may be freed and reused")
    if memory.chunks:
        return pb.Memory(attached_id=memory_ids[memory])
    return pb.Memory(cuda_ipc=pb.CudaIpcHandle(handle=memory.ipc_handle, offset_bytes=memory.offset_bytes, memory_bytes=memory.memory_bytes))


def register_request(region: Region, memory_ids: Mapping[HostMemory | DeviceMemory, bytes]) -> pb.RegisterRegionRequest:
    """`memory_ids` as the attach socket answered them, of the memories of the region that are attached."""
    return pb.RegisterRegionRequest(
        device=region.device,
        cache_group=region.cache_group,
        block_count=region.block_count,
        memories=[_memory(memory, memory_ids) for memory in region.memories],
        planes=[
            pb.Plane(memory=plane.memory, offset_bytes=plane.offset_bytes, block_stride_bytes=plane.block_stride_bytes, block_bytes=plane.block_bytes)
            for plane in region.planes
        ],
        namespace=namespace(region.namespace),
    )


def take_registered(region: Region, answer: pb.RegisterRegionResponse) -> None:
    """Note what the daemon answered in the handle."""
    region.region_id, region.namespace_id = answer.region_id, answer.namespace_id
    region.payload_bytes, region.slot_bytes = answer.payload_bytes, answer.slot_bytes


def device_event(event: EventName) -> pb.DeviceEvent | None:
    """What copies wait for; None for nothing."""
    if not event:
        return None
    if isinstance(event, bytes):
        return pb.DeviceEvent(handle=event)
    word = pb.CudaIpcHandle(handle=event.handle, offset_bytes=event.offset_bytes, memory_bytes=FLAG_WORD_BYTES)
    return pb.DeviceEvent(flag=pb.DeviceFlag(word=word, value=event.value))


def evict_request(
    blocks: Blocks | Sequence[Blocks],
    *,
    ack: AckLevel = AckLevel.DEFAULT,
    tier: Tier = Tier.ANY,
    path: Path = Path.AUTO,
    require_path: bool = False,
    keep: bool = False,
    keep_ttl_s: float | None = None,
    priority: Priority = Priority.DEFAULT,
    deadline_s: float | None = None,
    request_id: str = "",
    source_ready: EventName = b"",
) -> pb.EvictRequest:
    """An evict with region ids as they are now."""
    return pb.EvictRequest(
        spans=spans(blocks),
        ack=cast(pb.AckLevel, ack),
        tier=cast(pb.Tier, tier),
        path=cast(pb.Path, path),
        require_path=require_path,
        keep=keep,
        keep_ttl=duration(keep_ttl_s),
        priority=cast(pb.Priority, priority),
        deadline=duration(deadline_s),
        request_id=request_id,
        source_ready=device_event(source_ready),
    )


def restore_request(
    blocks: Blocks | Sequence[Blocks],
    *,
    path: Path = Path.AUTO,
    require_path: bool = False,
    consume: bool = False,
    priority: Priority = Priority.DEFAULT,
    deadline_s: float | None = None,
    request_id: str = "",
    destination_free: EventName = b"",
) -> pb.RestoreRequest:
    """A restore with region ids as they are now."""
    return pb.RestoreRequest(
        spans=spans(blocks),
        path=cast(pb.Path, path),
        require_path=require_path,
        consume=consume,
        priority=cast(pb.Priority, priority),
        deadline=duration(deadline_s),
        request_id=request_id,
        destination_free=device_event(destination_free),
    )


def selectors(shards: Shards) -> list[pb.ShardSelector]:
    """Shards by region or by name."""
    made = []
    for shard in shards:
        if isinstance(shard, ShardName):
            made.append(pb.ShardSelector(namespace=namespace(shard.namespace), cache_group=shard.cache_group))
        elif shard.region_id:
            made.append(pb.ShardSelector(region_id=shard.region_id))
        else:
            raise InvalidRequest("the region is not registered")
    return made


def lookup_request(
    shards: Shards, hashes: Sequence[bytes], *, membership: bool = False, lease_s: float | None = None, prefill_tokens_per_s: float = 0.0
) -> pb.LookupRequest:
    """A lookup: the longest prefix, or membership."""
    mode = pb.LookupMode.LOOKUP_MODE_MEMBERSHIP if membership else pb.LookupMode.LOOKUP_MODE_PREFIX
    return pb.LookupRequest(
        shards=selectors(shards), block_hashes=_hashes(hashes), mode=mode, lease=duration(lease_s), prefill_tokens_per_s=prefill_tokens_per_s
    )


def prefetch_request(shards: Shards, hashes: Sequence[bytes]) -> pb.PrefetchRequest:
    """A prefetch."""
    return pb.PrefetchRequest(shards=selectors(shards), block_hashes=_hashes(hashes))


def release_request(shards: Shards, hashes: Sequence[bytes]) -> pb.ReleaseRequest:
    """A release of named blocks."""
    return pb.ReleaseRequest(shards=selectors(shards), block_hashes=_hashes(hashes))


def evict_result(answer: pb.EvictResponse, count: int) -> EvictResult:
    """Raises DaemonFailed unless there is one outcome for each of `count` blocks."""
    outcomes = tuple(_evict_outcome(one.status, one.reason, one.tier) for one in answer.outcomes)
    if len(outcomes) != count:
        raise DaemonFailed(f"the daemon answered {len(outcomes)} outcomes for {count} blocks")
    return EvictResult(outcomes, path_uses(answer.paths), stage_times(answer.times))


class RestoreParser:
    """Turns the messages of one restore into parts, and counts that every block is answered once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._position = 0
        #: The last message was read. Only the status of the call can follow, and nobody need wait for it: 0.2 ms of 2.4 for one block.
        self.complete = False

    def part(self, answer: pb.RestoreResponse) -> RestorePart:
        """The next message. Raises DaemonFailed if it answers blocks that were not asked for."""
        outcomes = tuple(_restore_outcome(one.status, one.reason, one.tier) for one in answer.outcomes)
        first = self._position
        self._position += len(outcomes)
        if self._position > self._count:
            raise DaemonFailed(f"the daemon answered {self._position} outcomes for {self._count} blocks")
        last = answer.HasField("times")
        self.complete = last and self._position == self._count
        return RestorePart(first, outcomes, path_uses(answer.paths), stage_times(answer.times) if last else None)

    def end(self) -> None:
        """The stream ended well. Raises DaemonFailed if blocks are unanswered."""
        if self._position != self._count:
            raise DaemonFailed(f"the daemon answered {self._position} outcomes for {self._count} blocks")


def restore_result(parts: Iterable[RestorePart]) -> RestoreResult:
    """All parts of a restore as one."""
    outcomes: list[RestoreOutcome] = []
    paths: tuple[PathUse, ...] = ()
    times = StageTimes()
    for part in parts:
        outcomes.extend(part.outcomes)
        paths = part.paths or paths
        times = part.times or times
    return RestoreResult(tuple(outcomes), paths, times)


_TIERS = {int(tier): tier for tier in Tier}


def lookup_result(answer: pb.LookupResponse) -> LookupResult:
    """A lookup's answer."""
    estimated_s = seconds(answer.estimated_restore) if answer.HasField("estimated_restore") else None
    # A look-up in a dict: calling the enum a thousand times costs more than the daemon's answer.
    tiers = tuple([_TIERS.get(tier, Tier.ANY) for tier in answer.tiers])
    return LookupResult(answer.held_count, tiers, estimated_s, answer.worth_restoring)


def prefetch_result(answer: pb.PrefetchResponse) -> PrefetchResult:
    """A prefetch's answer."""
    return PrefetchResult(answer.queued_count, answer.present_count, answer.skipped_count)


def capabilities(answer: pb.GetCapabilitiesResponse) -> Capabilities:
    """Limits, tiers and paths; pairs that this client has no word for are left out, since it could not ask for them."""
    known = [one for one in answer.paths if one.tier in Tier._value2member_map_ and one.path in Path._value2member_map_]
    return Capabilities(
        version=answer.version,
        blocks_per_request_max=answer.blocks_per_request_max,
        regions_per_session_max=answer.regions_per_session_max,
        planes_per_region_max=answer.planes_per_region_max,
        payload_bytes_max=answer.payload_bytes_max,
        deadline_s=seconds(answer.deadline),
        keep_ttl_s=seconds(answer.keep_ttl),
        paths=tuple(
            PathCapability(
                Tier(one.tier),
                Path(one.path),
                one.device,
                one.available,
                one.note,
                one.restore_bytes_per_s,
                one.evict_bytes_per_s,
                tuple(map(_volume_rates, one.volumes)),
            )
            for one in known
        ),
        requests_per_session_max=answer.requests_per_session_max,
        bytes_in_flight_per_session_max=answer.bytes_in_flight_per_session_max,
    )


def _volume_rates(rates: pb.VolumeRates) -> VolumeRates:
    return VolumeRates(
        volume=rates.volume,
        available=rates.available,
        note=rates.note,
        restore_bytes_per_s=rates.restore_bytes_per_s,
        restore_small_bytes_per_s=rates.restore_small_bytes_per_s,
        evict_bytes_per_s=rates.evict_bytes_per_s,
        evict_small_bytes_per_s=rates.evict_small_bytes_per_s,
        restore_auto=rates.restore_auto,
        restore_small_auto=rates.restore_small_auto,
        evict_auto=rates.evict_auto,
        evict_small_auto=rates.evict_small_auto,
    )


def path_uses(uses: Iterable[pb.PathUse]) -> tuple[PathUse, ...]:
    """The ways really taken."""
    return tuple(
        PathUse(
            _known(Tier, use.tier, Tier.ANY),
            _known(Path, use.path, Path.AUTO),
            use.block_count,
            use.payload_bytes,
            use.io_bytes,
            # A way that this library does not know proves nothing to its caller.
            _known(Way, use.way, Way.UNPROVEN),
        )
        for use in uses
    )


def stage_times(times: pb.StageTimes) -> StageTimes:
    """Seconds by stage."""
    return StageTimes(seconds(times.queue), seconds(times.copy), seconds(times.checksum), seconds(times.io), seconds(times.total))


# Cached: thousands of blocks share a handful of outcomes. Bounded, since a faulty daemon may answer anything.
@lru_cache(maxsize=1024)
def _evict_outcome(status: int, reason: int, tier: int) -> EvictOutcome:
    # A status without a meaning here promises nothing about the source: QUARANTINED is the one that lets nobody reuse it.
    known = _known(EvictStatus, status, EvictStatus.UNSPECIFIED) or EvictStatus.QUARANTINED
    return EvictOutcome(known, _known(Reason, reason, Reason.NONE), _known(Tier, tier, Tier.ANY))


@lru_cache(maxsize=1024)
def _restore_outcome(status: int, reason: int, tier: int) -> RestoreOutcome:
    known = _known(RestoreStatus, status, RestoreStatus.UNSPECIFIED) or RestoreStatus.QUARANTINED
    return RestoreOutcome(known, _known(Reason, reason, Reason.NONE), _known(Tier, tier, Tier.ANY))


def _known(kind: type[E], value: int, otherwise: E) -> E:
    return kind(value) if value in kind._value2member_map_ else otherwise

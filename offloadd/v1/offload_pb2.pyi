import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_ARENA: _ClassVar[Tier]
    TIER_VOLUME: _ClassVar[Tier]

class Path(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PATH_UNSPECIFIED: _ClassVar[Path]
    PATH_GDS: _ClassVar[Path]
    PATH_BOUNCE: _ClassVar[Path]
    PATH_DDR: _ClassVar[Path]
    PATH_HOST: _ClassVar[Path]

class Way(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAY_UNSPECIFIED: _ClassVar[Way]
    WAY_GDS_NVFS: _ClassVar[Way]
    WAY_GDS_P2P: _ClassVar[Way]
    WAY_CUFILE_POSIX: _ClassVar[Way]
    WAY_KVIKIO_POSIX: _ClassVar[Way]
    WAY_UNPROVEN: _ClassVar[Way]

class AckLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACK_LEVEL_UNSPECIFIED: _ClassVar[AckLevel]
    ACK_LEVEL_COPIED: _ClassVar[AckLevel]
    ACK_LEVEL_DURABLE: _ClassVar[AckLevel]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_BACKGROUND: _ClassVar[Priority]

class EvictStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVICT_STATUS_UNSPECIFIED: _ClassVar[EvictStatus]
    EVICT_STATUS_STORED: _ClassVar[EvictStatus]
    EVICT_STATUS_DUPLICATE: _ClassVar[EvictStatus]
    EVICT_STATUS_REJECTED: _ClassVar[EvictStatus]
    EVICT_STATUS_FAILED: _ClassVar[EvictStatus]
    EVICT_STATUS_QUARANTINED: _ClassVar[EvictStatus]

class RestoreStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESTORE_STATUS_UNSPECIFIED: _ClassVar[RestoreStatus]
    RESTORE_STATUS_RESTORED: _ClassVar[RestoreStatus]
    RESTORE_STATUS_NOT_FOUND: _ClassVar[RestoreStatus]
    RESTORE_STATUS_DATA_LOSS: _ClassVar[RestoreStatus]
    RESTORE_STATUS_QUARANTINED: _ClassVar[RestoreStatus]
    RESTORE_STATUS_FAILED: _ClassVar[RestoreStatus]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_TIER_FULL: _ClassVar[Reason]
    REASON_NO_TIER: _ClassVar[Reason]
    REASON_TOO_LARGE: _ClassVar[Reason]
    REASON_IO_ERROR: _ClassVar[Reason]
    REASON_WORKER_LOST: _ClassVar[Reason]
    REASON_DEADLINE: _ClassVar[Reason]
    REASON_CANCELLED: _ClassVar[Reason]
    REASON_HEADER_MISMATCH: _ClassVar[Reason]
    REASON_CHECKSUM_MISMATCH: _ClassVar[Reason]
    REASON_TARGET_MISMATCH: _ClassVar[Reason]
    REASON_SHORT_IO: _ClassVar[Reason]
    REASON_WRONG_PATH: _ClassVar[Reason]
    REASON_EVENT_NOT_OPENED: _ClassVar[Reason]
    REASON_VOLUME_DOWN: _ClassVar[Reason]
    REASON_WRITE_BUDGET: _ClassVar[Reason]

class LookupMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOOKUP_MODE_UNSPECIFIED: _ClassVar[LookupMode]
    LOOKUP_MODE_PREFIX: _ClassVar[LookupMode]
    LOOKUP_MODE_MEMBERSHIP: _ClassVar[LookupMode]
TIER_UNSPECIFIED: Tier
TIER_ARENA: Tier
TIER_VOLUME: Tier
PATH_UNSPECIFIED: Path
PATH_GDS: Path
PATH_BOUNCE: Path
PATH_DDR: Path
PATH_HOST: Path
WAY_UNSPECIFIED: Way
WAY_GDS_NVFS: Way
WAY_GDS_P2P: Way
WAY_CUFILE_POSIX: Way
WAY_KVIKIO_POSIX: Way
WAY_UNPROVEN: Way
ACK_LEVEL_UNSPECIFIED: AckLevel
ACK_LEVEL_COPIED: AckLevel
ACK_LEVEL_DURABLE: AckLevel
PRIORITY_UNSPECIFIED: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_BACKGROUND: Priority
EVICT_STATUS_UNSPECIFIED: EvictStatus
EVICT_STATUS_STORED: EvictStatus
EVICT_STATUS_DUPLICATE: EvictStatus
EVICT_STATUS_REJECTED: EvictStatus
EVICT_STATUS_FAILED: EvictStatus
EVICT_STATUS_QUARANTINED: EvictStatus
RESTORE_STATUS_UNSPECIFIED: RestoreStatus
RESTORE_STATUS_RESTORED: RestoreStatus
RESTORE_STATUS_NOT_FOUND: RestoreStatus
RESTORE_STATUS_DATA_LOSS: RestoreStatus
RESTORE_STATUS_QUARANTINED: RestoreStatus
RESTORE_STATUS_FAILED: RestoreStatus
REASON_UNSPECIFIED: Reason
REASON_TIER_FULL: Reason
REASON_NO_TIER: Reason
REASON_TOO_LARGE: Reason
REASON_IO_ERROR: Reason
REASON_WORKER_LOST: Reason
REASON_DEADLINE: Reason
REASON_CANCELLED: Reason
REASON_HEADER_MISMATCH: Reason
REASON_CHECKSUM_MISMATCH: Reason
REASON_TARGET_MISMATCH: Reason
REASON_SHORT_IO: Reason
REASON_WRONG_PATH: Reason
REASON_EVENT_NOT_OPENED: Reason
REASON_VOLUME_DOWN: Reason
REASON_WRITE_BUDGET: Reason
LOOKUP_MODE_UNSPECIFIED: LookupMode
LOOKUP_MODE_PREFIX: LookupMode
LOOKUP_MODE_MEMBERSHIP: LookupMode

class Shard(_message.Message):
    __slots__ = ("layer_start", "layer_count", "head_start", "head_count")
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    layer_start: int
    layer_count: int
    head_start: int
    head_count: int
    def __init__(self, layer_start: _Optional[int] = ..., layer_count: _Optional[int] = ..., head_start: _Optional[int] = ..., head_count: _Optional[int] = ...) -> None: ...

class NamespaceField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("model", "weights", "adapter", "overrides", "engine", "engine_version", "attention_backend", "isa", "hash_algorithm", "kv_dtype", "codec", "block_tokens", "layout", "salt", "shard", "extra")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    adapter: str
    overrides: str
    engine: str
    engine_version: str
    attention_backend: str
    isa: str
    hash_algorithm: str
    kv_dtype: str
    codec: str
    block_tokens: int
    layout: str
    salt: bytes
    shard: Shard
    extra: _containers.RepeatedCompositeFieldContainer[NamespaceField]
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., adapter: _Optional[str] = ..., overrides: _Optional[str] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., attention_backend: _Optional[str] = ..., isa: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., codec: _Optional[str] = ..., block_tokens: _Optional[int] = ..., layout: _Optional[str] = ..., salt: _Optional[bytes] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., extra: _Optional[_Iterable[_Union[NamespaceField, _Mapping]]] = ...) -> None: ...

class CudaIpcHandle(_message.Message):
    __slots__ = ("handle", "offset_bytes", "memory_bytes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset_bytes: int
    memory_bytes: int
    def __init__(self, handle: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("attached_id", "cuda_ipc")
    ATTACHED_ID_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    attached_id: bytes
    cuda_ipc: CudaIpcHandle
    def __init__(self, attached_id: _Optional[bytes] = ..., cuda_ipc: _Optional[_Union[CudaIpcHandle, _Mapping]] = ...) -> None: ...

class Plane(_message.Message):
    __slots__ = ("memory", "offset_bytes", "block_stride_bytes", "block_bytes")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    memory: int
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int
    def __init__(self, memory: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class DeviceFlag(_message.Message):
    __slots__ = ("word", "value")
    WORD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    word: CudaIpcHandle
    value: int
    def __init__(self, word: _Optional[_Union[CudaIpcHandle, _Mapping]] = ..., value: _Optional[int] = ...) -> None: ...

class DeviceEvent(_message.Message):
    __slots__ = ("handle", "flag")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    flag: DeviceFlag
    def __init__(self, handle: _Optional[bytes] = ..., flag: _Optional[_Union[DeviceFlag, _Mapping]] = ...) -> None: ...

class BlockSpan(_message.Message):
    __slots__ = ("region_id", "start", "count", "block_hashes")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    region_id: bytes
    start: int
    count: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, region_id: _Optional[bytes] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_name", "instance", "tenant", "capabilities")
    SESSION_NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    session_name: str
    instance: str
    tenant: str
    capabilities: GetCapabilitiesResponse
    def __init__(self, session_name: _Optional[str] = ..., instance: _Optional[str] = ..., tenant: _Optional[str] = ..., capabilities: _Optional[_Union[GetCapabilitiesResponse, _Mapping]] = ...) -> None: ...

class RegisterRegionRequest(_message.Message):
    __slots__ = ("device", "cache_group", "block_count", "memories", "planes", "namespace")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CACHE_GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORIES_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    device: str
    cache_group: int
    block_count: int
    memories: _containers.RepeatedCompositeFieldContainer[Memory]
    planes: _containers.RepeatedCompositeFieldContainer[Plane]
    namespace: Namespace
    def __init__(self, device: _Optional[str] = ..., cache_group: _Optional[int] = ..., block_count: _Optional[int] = ..., memories: _Optional[_Iterable[_Union[Memory, _Mapping]]] = ..., planes: _Optional[_Iterable[_Union[Plane, _Mapping]]] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ...) -> None: ...

class RegisterRegionResponse(_message.Message):
    __slots__ = ("region_id", "payload_bytes", "slot_bytes", "namespace_id")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    region_id: bytes
    payload_bytes: int
    slot_bytes: int
    namespace_id: bytes
    def __init__(self, region_id: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., namespace_id: _Optional[bytes] = ...) -> None: ...

class UnregisterRegionRequest(_message.Message):
    __slots__ = ("region_id",)
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    region_id: bytes
    def __init__(self, region_id: _Optional[bytes] = ...) -> None: ...

class UnregisterRegionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("spans", "ack", "tier", "path", "require_path", "keep", "keep_ttl", "priority", "deadline", "request_id", "source_ready")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_PATH_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    KEEP_TTL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_READY_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[BlockSpan]
    ack: AckLevel
    tier: Tier
    path: Path
    require_path: bool
    keep: bool
    keep_ttl: _duration_pb2.Duration
    priority: Priority
    deadline: _duration_pb2.Duration
    request_id: str
    source_ready: DeviceEvent
    def __init__(self, spans: _Optional[_Iterable[_Union[BlockSpan, _Mapping]]] = ..., ack: _Optional[_Union[AckLevel, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., path: _Optional[_Union[Path, str]] = ..., require_path: _Optional[bool] = ..., keep: _Optional[bool] = ..., keep_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[_Union[Priority, str]] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ..., source_ready: _Optional[_Union[DeviceEvent, _Mapping]] = ...) -> None: ...

class EvictOutcome(_message.Message):
    __slots__ = ("status", "reason", "tier")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    status: EvictStatus
    reason: Reason
    tier: Tier
    def __init__(self, status: _Optional[_Union[EvictStatus, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("queue", "copy", "checksum", "io", "total")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    IO_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    copy: _duration_pb2.Duration
    checksum: _duration_pb2.Duration
    io: _duration_pb2.Duration
    total: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., copy: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., checksum: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., io: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PathUse(_message.Message):
    __slots__ = ("tier", "path", "block_count", "payload_bytes", "io_bytes", "way")
    TIER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    IO_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    path: Path
    block_count: int
    payload_bytes: int
    io_bytes: int
    way: Way
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., path: _Optional[_Union[Path, str]] = ..., block_count: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., io_bytes: _Optional[int] = ..., way: _Optional[_Union[Way, str]] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("outcomes", "paths", "times")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[EvictOutcome]
    paths: _containers.RepeatedCompositeFieldContainer[PathUse]
    times: StageTimes
    def __init__(self, outcomes: _Optional[_Iterable[_Union[EvictOutcome, _Mapping]]] = ..., paths: _Optional[_Iterable[_Union[PathUse, _Mapping]]] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("spans", "path", "require_path", "consume", "priority", "deadline", "request_id", "destination_free")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_PATH_FIELD_NUMBER: _ClassVar[int]
    CONSUME_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FREE_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[BlockSpan]
    path: Path
    require_path: bool
    consume: bool
    priority: Priority
    deadline: _duration_pb2.Duration
    request_id: str
    destination_free: DeviceEvent
    def __init__(self, spans: _Optional[_Iterable[_Union[BlockSpan, _Mapping]]] = ..., path: _Optional[_Union[Path, str]] = ..., require_path: _Optional[bool] = ..., consume: _Optional[bool] = ..., priority: _Optional[_Union[Priority, str]] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ..., destination_free: _Optional[_Union[DeviceEvent, _Mapping]] = ...) -> None: ...

class RestoreOutcome(_message.Message):
    __slots__ = ("status", "reason", "tier")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    status: RestoreStatus
    reason: Reason
    tier: Tier
    def __init__(self, status: _Optional[_Union[RestoreStatus, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("outcomes", "paths", "times")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[RestoreOutcome]
    paths: _containers.RepeatedCompositeFieldContainer[PathUse]
    times: StageTimes
    def __init__(self, outcomes: _Optional[_Iterable[_Union[RestoreOutcome, _Mapping]]] = ..., paths: _Optional[_Iterable[_Union[PathUse, _Mapping]]] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ...) -> None: ...

class ShardSelector(_message.Message):
    __slots__ = ("region_id", "namespace", "cache_group")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CACHE_GROUP_FIELD_NUMBER: _ClassVar[int]
    region_id: bytes
    namespace: Namespace
    cache_group: int
    def __init__(self, region_id: _Optional[bytes] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., cache_group: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("shards", "block_hashes", "mode", "lease", "prefill_tokens_per_s")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardSelector]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    mode: LookupMode
    lease: _duration_pb2.Duration
    prefill_tokens_per_s: float
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardSelector, _Mapping]]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., mode: _Optional[_Union[LookupMode, str]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill_tokens_per_s: _Optional[float] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("held_count", "tiers", "estimated_restore", "worth_restoring")
    HELD_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_RESTORE_FIELD_NUMBER: _ClassVar[int]
    WORTH_RESTORING_FIELD_NUMBER: _ClassVar[int]
    held_count: int
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    estimated_restore: _duration_pb2.Duration
    worth_restoring: bool
    def __init__(self, held_count: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., estimated_restore: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., worth_restoring: _Optional[bool] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("shards", "block_hashes")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardSelector]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardSelector, _Mapping]]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("queued_count", "present_count", "skipped_count")
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    queued_count: int
    present_count: int
    skipped_count: int
    def __init__(self, queued_count: _Optional[int] = ..., present_count: _Optional[int] = ..., skipped_count: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("shards", "block_hashes", "all")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardSelector]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    all: bool
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardSelector, _Mapping]]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., all: _Optional[bool] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released_count",)
    RELEASED_COUNT_FIELD_NUMBER: _ClassVar[int]
    released_count: int
    def __init__(self, released_count: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VolumeRates(_message.Message):
    __slots__ = ("volume", "available", "note", "restore_bytes_per_s", "restore_small_bytes_per_s", "evict_bytes_per_s", "evict_small_bytes_per_s", "restore_auto", "restore_small_auto", "evict_auto", "evict_small_auto")
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RESTORE_SMALL_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    EVICT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    EVICT_SMALL_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RESTORE_AUTO_FIELD_NUMBER: _ClassVar[int]
    RESTORE_SMALL_AUTO_FIELD_NUMBER: _ClassVar[int]
    EVICT_AUTO_FIELD_NUMBER: _ClassVar[int]
    EVICT_SMALL_AUTO_FIELD_NUMBER: _ClassVar[int]
    volume: str
    available: bool
    note: str
    restore_bytes_per_s: int
    restore_small_bytes_per_s: int
    evict_bytes_per_s: int
    evict_small_bytes_per_s: int
    restore_auto: bool
    restore_small_auto: bool
    evict_auto: bool
    evict_small_auto: bool
    def __init__(self, volume: _Optional[str] = ..., available: _Optional[bool] = ..., note: _Optional[str] = ..., restore_bytes_per_s: _Optional[int] = ..., restore_small_bytes_per_s: _Optional[int] = ..., evict_bytes_per_s: _Optional[int] = ..., evict_small_bytes_per_s: _Optional[int] = ..., restore_auto: _Optional[bool] = ..., restore_small_auto: _Optional[bool] = ..., evict_auto: _Optional[bool] = ..., evict_small_auto: _Optional[bool] = ...) -> None: ...

class PathCapability(_message.Message):
    __slots__ = ("tier", "path", "device", "available", "note", "restore_bytes_per_s", "evict_bytes_per_s", "volumes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    EVICT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    path: Path
    device: str
    available: bool
    note: str
    restore_bytes_per_s: int
    evict_bytes_per_s: int
    volumes: _containers.RepeatedCompositeFieldContainer[VolumeRates]
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., path: _Optional[_Union[Path, str]] = ..., device: _Optional[str] = ..., available: _Optional[bool] = ..., note: _Optional[str] = ..., restore_bytes_per_s: _Optional[int] = ..., evict_bytes_per_s: _Optional[int] = ..., volumes: _Optional[_Iterable[_Union[VolumeRates, _Mapping]]] = ...) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("version", "blocks_per_request_max", "regions_per_session_max", "planes_per_region_max", "payload_bytes_max", "deadline", "keep_ttl", "paths", "requests_per_session_max", "bytes_in_flight_per_session_max")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_REQUEST_MAX_FIELD_NUMBER: _ClassVar[int]
    REGIONS_PER_SESSION_MAX_FIELD_NUMBER: _ClassVar[int]
    PLANES_PER_REGION_MAX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    KEEP_TTL_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_SESSION_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FLIGHT_PER_SESSION_MAX_FIELD_NUMBER: _ClassVar[int]
    version: str
    blocks_per_request_max: int
    regions_per_session_max: int
    planes_per_region_max: int
    payload_bytes_max: int
    deadline: _duration_pb2.Duration
    keep_ttl: _duration_pb2.Duration
    paths: _containers.RepeatedCompositeFieldContainer[PathCapability]
    requests_per_session_max: int
    bytes_in_flight_per_session_max: int
    def __init__(self, version: _Optional[str] = ..., blocks_per_request_max: _Optional[int] = ..., regions_per_session_max: _Optional[int] = ..., planes_per_region_max: _Optional[int] = ..., payload_bytes_max: _Optional[int] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., keep_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., paths: _Optional[_Iterable[_Union[PathCapability, _Mapping]]] = ..., requests_per_session_max: _Optional[int] = ..., bytes_in_flight_per_session_max: _Optional[int] = ...) -> None: ...

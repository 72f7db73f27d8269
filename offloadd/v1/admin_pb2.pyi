import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from offloadd.v1 import offload_pb2 as _offload_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_STORED: _ClassVar[EventKind]
    EVENT_KIND_REMOVED: _ClassVar[EventKind]
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_STORED: EventKind
EVENT_KIND_REMOVED: EventKind

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("name", "instance", "tenant", "pid", "region_count", "mapped_bytes", "request_count", "bytes_in_flight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    REGION_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    instance: str
    tenant: str
    pid: int
    region_count: int
    mapped_bytes: int
    request_count: int
    bytes_in_flight: int
    def __init__(self, name: _Optional[str] = ..., instance: _Optional[str] = ..., tenant: _Optional[str] = ..., pid: _Optional[int] = ..., region_count: _Optional[int] = ..., mapped_bytes: _Optional[int] = ..., request_count: _Optional[int] = ..., bytes_in_flight: _Optional[int] = ...) -> None: ...

class LoadStatus(_message.Message):
    __slots__ = ("request_count", "request_count_max", "block_count", "block_count_max", "bytes_in_flight", "bytes_in_flight_max", "session_count", "session_count_max", "refused_count")
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    request_count: int
    request_count_max: int
    block_count: int
    block_count_max: int
    bytes_in_flight: int
    bytes_in_flight_max: int
    session_count: int
    session_count_max: int
    refused_count: int
    def __init__(self, request_count: _Optional[int] = ..., request_count_max: _Optional[int] = ..., block_count: _Optional[int] = ..., block_count_max: _Optional[int] = ..., bytes_in_flight: _Optional[int] = ..., bytes_in_flight_max: _Optional[int] = ..., session_count: _Optional[int] = ..., session_count_max: _Optional[int] = ..., refused_count: _Optional[int] = ...) -> None: ...

class ArenaNodeStatus(_message.Message):
    __slots__ = ("node", "arena_bytes", "used_bytes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    node: int
    arena_bytes: int
    used_bytes: int
    def __init__(self, node: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class ArenaStatus(_message.Message):
    __slots__ = ("arena_bytes", "used_bytes", "block_count", "pages", "nodes")
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    arena_bytes: int
    used_bytes: int
    block_count: int
    pages: str
    nodes: _containers.RepeatedCompositeFieldContainer[ArenaNodeStatus]
    def __init__(self, arena_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., pages: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[ArenaNodeStatus, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "pid", "restart_count", "placement", "copies_by")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    COPIES_BY_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    restart_count: int
    placement: str
    copies_by: str
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., restart_count: _Optional[int] = ..., placement: _Optional[str] = ..., copies_by: _Optional[str] = ...) -> None: ...

class GpuStatus(_message.Message):
    __slots__ = ("device", "uuid", "name", "pci_bus_id", "compute_mode", "uses_mps", "context_bytes", "note")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PCI_BUS_ID_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MODE_FIELD_NUMBER: _ClassVar[int]
    USES_MPS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    device: str
    uuid: str
    name: str
    pci_bus_id: str
    compute_mode: str
    uses_mps: bool
    context_bytes: int
    note: str
    def __init__(self, device: _Optional[str] = ..., uuid: _Optional[str] = ..., name: _Optional[str] = ..., pci_bus_id: _Optional[str] = ..., compute_mode: _Optional[str] = ..., uses_mps: _Optional[bool] = ..., context_bytes: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...

class Counter(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("version", "pid", "uptime", "state", "sessions", "arena", "volumes", "workers", "block_count", "block_count_max", "held_count", "paths", "counters", "gpus", "load")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    HELD_COUNT_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    version: str
    pid: int
    uptime: _duration_pb2.Duration
    state: str
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    arena: ArenaStatus
    volumes: _containers.RepeatedCompositeFieldContainer[VolumeStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    block_count: int
    block_count_max: int
    held_count: int
    paths: _containers.RepeatedCompositeFieldContainer[_offload_pb2.PathCapability]
    counters: _containers.RepeatedCompositeFieldContainer[Counter]
    gpus: _containers.RepeatedCompositeFieldContainer[GpuStatus]
    load: LoadStatus
    def __init__(self, version: _Optional[str] = ..., pid: _Optional[int] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., state: _Optional[str] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., arena: _Optional[_Union[ArenaStatus, _Mapping]] = ..., volumes: _Optional[_Iterable[_Union[VolumeStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., block_count: _Optional[int] = ..., block_count_max: _Optional[int] = ..., held_count: _Optional[int] = ..., paths: _Optional[_Iterable[_Union[_offload_pb2.PathCapability, _Mapping]]] = ..., counters: _Optional[_Iterable[_Union[Counter, _Mapping]]] = ..., gpus: _Optional[_Iterable[_Union[GpuStatus, _Mapping]]] = ..., load: _Optional[_Union[LoadStatus, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("spilled_count",)
    SPILLED_COUNT_FIELD_NUMBER: _ClassVar[int]
    spilled_count: int
    def __init__(self, spilled_count: _Optional[int] = ...) -> None: ...

class DropNamespaceRequest(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ...) -> None: ...

class DropNamespaceResponse(_message.Message):
    __slots__ = ("dropped_count",)
    DROPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    dropped_count: int
    def __init__(self, dropped_count: _Optional[int] = ...) -> None: ...

class VolumesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VolumesResponse(_message.Message):
    __slots__ = ("volumes",)
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    volumes: _containers.RepeatedCompositeFieldContainer[VolumeStatus]
    def __init__(self, volumes: _Optional[_Iterable[_Union[VolumeStatus, _Mapping]]] = ...) -> None: ...

class VolumeStatus(_message.Message):
    __slots__ = ("path", "uuid", "state", "volume_bytes", "used_bytes", "block_count", "slab_count", "cut_count", "open_count", "file_system", "direct_io", "scan_header_bytes", "recovery", "reads_breaker", "writes_breaker", "late_count")
    PATH_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VOLUME_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLAB_COUNT_FIELD_NUMBER: _ClassVar[int]
    CUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    FILE_SYSTEM_FIELD_NUMBER: _ClassVar[int]
    DIRECT_IO_FIELD_NUMBER: _ClassVar[int]
    SCAN_HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    READS_BREAKER_FIELD_NUMBER: _ClassVar[int]
    WRITES_BREAKER_FIELD_NUMBER: _ClassVar[int]
    LATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    path: str
    uuid: str
    state: str
    volume_bytes: int
    used_bytes: int
    block_count: int
    slab_count: int
    cut_count: int
    open_count: int
    file_system: str
    direct_io: str
    scan_header_bytes: int
    recovery: _duration_pb2.Duration
    reads_breaker: str
    writes_breaker: str
    late_count: int
    def __init__(self, path: _Optional[str] = ..., uuid: _Optional[str] = ..., state: _Optional[str] = ..., volume_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., slab_count: _Optional[int] = ..., cut_count: _Optional[int] = ..., open_count: _Optional[int] = ..., file_system: _Optional[str] = ..., direct_io: _Optional[str] = ..., scan_header_bytes: _Optional[int] = ..., recovery: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reads_breaker: _Optional[str] = ..., writes_breaker: _Optional[str] = ..., late_count: _Optional[int] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("kind", "tier", "keys", "lost_count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LOST_COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: EventKind
    tier: _offload_pb2.Tier
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    lost_count: int
    def __init__(self, kind: _Optional[_Union[EventKind, str]] = ..., tier: _Optional[_Union[_offload_pb2.Tier, str]] = ..., keys: _Optional[_Iterable[bytes]] = ..., lost_count: _Optional[int] = ...) -> None: ...

"""The client library of engines and operators: shared memory, sessions, evict and restore, as plain typed values."""

from offloadd.client.admin import AdminClient
from offloadd.client.aio import AsyncClient
from offloadd.client.blocking import Client
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
from offloadd.model.enums import AckLevel, EvictStatus, Path, Priority, Reason, RestoreStatus, Tier, Way
from offloadd.model.namespace import Namespace, Shard
from offloadd.model.region import Plane
from offloadd.model.runtime import runtime_dir_default

__all__ = [
    "AckLevel",
    "AdminClient",
    "AsyncClient",
    "Blocks",
    "Capabilities",
    "Client",
    "EvictOutcome",
    "EvictResult",
    "EvictStatus",
    "HostMemory",
    "LookupResult",
    "Namespace",
    "Path",
    "PathCapability",
    "PathUse",
    "Plane",
    "PrefetchResult",
    "Priority",
    "Reason",
    "Region",
    "RestoreOutcome",
    "RestorePart",
    "RestoreResult",
    "RestoreStatus",
    "Shard",
    "ShardName",
    "StageTimes",
    "Tier",
    "VolumeRates",
    "Way",
    "runtime_dir_default",
]

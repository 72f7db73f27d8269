"""What goes into a client and what comes out: plain values, no protobuf, no gRPC. Times are seconds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from offloadd.client.cuda.memory import DeviceMemory
from offloadd.client.memory import HostMemory
from offloadd.model.enums import EvictStatus, Path, Reason, RestoreStatus, Tier, Way
from offloadd.model.namespace import Namespace
from offloadd.model.region import Plane


@dataclass(eq=False, slots=True)
class Region:
    """Engine memory registered with the daemon. It survives a restart of the daemon: the client registers it again, under another `region_id`."""

    device: str
    cache_group: int
    block_count: int
    planes: tuple[Plane, ...]
    memories: tuple[HostMemory | DeviceMemory, ...]
    namespace: Namespace
    #: Opaque, of the present session; empty once the region was unregistered.
    region_id: bytes = field(default=b"", repr=False)
    #: Bytes of one block over all planes.
    payload_bytes: int = 0
    #: Bytes that one block takes on a volume.
    slot_bytes: int = 0
    #: SHA-256 of the namespace, tenant included.
    namespace_id: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one region: `indices[i]` is the place in the region of the block whose content is named `hashes[i]` (1 to 64 bytes)."""

    region: Region
    indices: Sequence[int]
    hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ShardName:
    """A shard by its namespace, for processes that have no region of it (a scheduler). `namespace.tenant` stays empty: the daemon knows it."""

    namespace: Namespace
    cache_group: int = 0


@dataclass(frozen=True, slots=True)
class EvictOutcome:
    """What became of one block. `tier` says where it is now (STORED, DUPLICATE)."""

    status: EvictStatus
    reason: Reason
    tier: Tier

    @property
    def stored(self) -> bool:
        """Whether the block can be restored: STORED or DUPLICATE."""
        return self.status in (EvictStatus.STORED, EvictStatus.DUPLICATE)


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """What became of one block. `tier` says where it came from (RESTORED)."""

    status: RestoreStatus
    reason: Reason
    tier: Tier

    @property
    def restored(self) -> bool:
        """Whether the destination holds the verified bytes of the key."""
        return self.status is RestoreStatus.RESTORED


@dataclass(frozen=True, slots=True)
class PathUse:
    """Bytes that really went one way. `io_bytes` counts headers and padding too.

    `path` GDS: it is proven that they went past host memory, and `way` says how. AUTO: they were answered COPIED before cuFile had them,
    and which way they go is not known yet. `way` of paths that do their I/O themselves is PLAIN.
    """

    tier: Tier
    path: Path
    block_count: int
    payload_bytes: int
    io_bytes: int
    way: Way = Way.PLAIN


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Time of a request by stage. `queue_s` is the wait of the slowest slice; copy, checksum and io add up threads and may exceed `total_s`."""

    queue_s: float = 0.0
    copy_s: float = 0.0
    checksum_s: float = 0.0
    io_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EvictResult:
    """One outcome per block, in the order of the request."""

    outcomes: tuple[EvictOutcome, ...]
    paths: tuple[PathUse, ...]
    times: StageTimes

    @property
    def stored_count(self) -> int:
        """Blocks that can be restored."""
        return sum(outcome.stored for outcome in self.outcomes)

    @property
    def all_stored(self) -> bool:
        """Whether every block can be restored."""
        return all(outcome.stored for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class RestorePart:
    """The outcomes of the next blocks of a restore, from position `first_position` of the request on. The last part has `paths` and `times`."""

    first_position: int
    outcomes: tuple[RestoreOutcome, ...]
    paths: tuple[PathUse, ...] = ()
    times: StageTimes | None = None


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """One outcome per block, in the order of the request."""

    outcomes: tuple[RestoreOutcome, ...]
    paths: tuple[PathUse, ...]
    times: StageTimes

    @property
    def restored_count(self) -> int:
        """Blocks whose destination is good."""
        return sum(outcome.restored for outcome in self.outcomes)

    @property
    def all_restored(self) -> bool:
        """Whether every destination is good."""
        return all(outcome.restored for outcome in self.outcomes)

    @property
    def prefix_count(self) -> int:
        """Blocks before the first that was not restored: what a prefix cache can use."""
        for position, outcome in enumerate(self.outcomes):
            if not outcome.restored:
                return position
        return len(self.outcomes)


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`held_count` blocks are held by all shards (prefix mode: the longest prefix). `tiers` has one per block, ANY where not held."""

    held_count: int
    tiers: tuple[Tier, ...]
    #: None while the daemon has measured nothing.
    estimated_restore_s: float | None
    worth_restoring: bool


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """Blocks queued, in the arena already, and skipped (not held, or no room)."""

    queued_count: int
    present_count: int
    skipped_count: int


@dataclass(frozen=True, slots=True)
class VolumeRates:
    """A path between a GPU and one volume: bytes per second by direction and size (large: 2 MiB and more on the volume), 0 while nothing was measured.

    `*_auto`: whether AUTO takes it. `note`: why it is not available, or why nothing was measured.
    """

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


@dataclass(frozen=True, slots=True)
class PathCapability:
    """One (tier, path) pair; `note` says why it is not available. Bandwidths are 0 while nothing was measured."""

    tier: Tier
    path: Path
    device: str
    available: bool
    note: str
    restore_bytes_per_s: int
    evict_bytes_per_s: int
    #: Of a path between a GPU and volumes.
    volumes: tuple[VolumeRates, ...] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Limits, tiers and paths of the daemon. `deadline_s` and `keep_ttl_s` are its defaults. The last two are of this session's requests in flight, 0 of a
    daemon that does not tell them."""

    version: str
    blocks_per_request_max: int
    regions_per_session_max: int
    planes_per_region_max: int
    payload_bytes_max: int
    deadline_s: float
    keep_ttl_s: float
    paths: tuple[PathCapability, ...]
    requests_per_session_max: int = 0
    bytes_in_flight_per_session_max: int = 0

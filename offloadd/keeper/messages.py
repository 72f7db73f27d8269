"""What front and keeper say to each other. Every request carries `ticket`, and exactly one answer repeats it."""

import msgspec

from offloadd.ipc.channel import MESSAGE_BYTES_MAX
from offloadd.tiers.format import SUMMARY_DTYPE

#: Summary records in one message.
SUMMARY_RECORDS_MAX = (MESSAGE_BYTES_MAX - 4096) // SUMMARY_DTYPE.itemsize


class OpenVolume(msgspec.Struct, frozen=True, tag=True):
    """Open, lock and read the volume; after a keeper's death with its two descriptors (data, synced) so that the lock stays ours throughout.

    Answered by `VolumeAnswers` and then `VolumeOpened` (descriptors: data, synced), or by `Failed`; then come `Recovered` for every cut slab and one
    `ScanFinished`.
    """

    ticket: int
    path: str
    io_threads: int
    prewrite: bool
    #: False for a keeper that was started again: the front knows the slabs, so `Inventory` is empty and no slab is told again.
    recover: bool = True


class AddNamespace(msgspec.Struct, frozen=True, tag=True):
    """Enter a namespace (synced). Answered by `NamespaceAdded` or `Failed`. Known ones answer with the ordinal they have."""

    ticket: int
    namespace_id: bytes
    tenant: str
    fields: bytes


class DropNamespace(msgspec.Struct, frozen=True, tag=True):
    """Mark dropped (synced): its slots never come back. Answered by `Done` or `Failed`."""

    ticket: int
    namespace_id: bytes


class CutSlab(msgspec.Struct, frozen=True, tag=True):
    """Cut the slab into slots of `slot_bytes` with a new nonce, dirty bit set, written once over its whole length; synced. Answered by `SlabReady` or `Failed`.

    Whatever the slab held is gone from the moment this is sent.
    """

    ticket: int
    slab: int
    slot_bytes: int


class OpenSlab(msgspec.Struct, frozen=True, tag=True):
    """Set the dirty bit, synced, before the first change to a clean slab. Answered by `SlabReady` or `Failed`."""

    ticket: int
    slab: int


class SummaryPart(msgspec.Struct, frozen=True, tag=True):
    """A part of a slab's summary, from slot `first` on: an array of SUMMARY_DTYPE. Not answered; `CloseSlab` completes it."""

    slab: int
    first: int
    records: bytes


class CloseSlab(msgspec.Struct, frozen=True, tag=True):
    """Write the summary received in parts, sync, clear the dirty bit, sync. Answered by `Done` or `Failed`.

    The front writes to no slot of the slab meanwhile.
    """

    ticket: int
    slab: int


class CloseVolume(msgspec.Struct, frozen=True, tag=True):
    """Answer `Done` and exit 0."""

    ticket: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Done`."""

    ticket: int


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Read a sector of the open volume, past the page cache where that is possible, in a thread that nothing else waits for. Answered by `Done` or `Failed`,
    when the read is over: while a volume hangs, not at all. One at a time.
    """

    ticket: int


#: Front → keeper.
Request = OpenVolume | AddNamespace | DropNamespace | CutSlab | OpenSlab | SummaryPart | CloseSlab | CloseVolume | Ping | Probe


class SlabInfo(msgspec.Struct, frozen=True, array_like=True):
    """One cut slab of an opened volume."""

    slab: int
    slot_bytes: int
    slot_count: int
    nonce: bytes
    dirty: bool


class NamespaceInfo(msgspec.Struct, frozen=True, array_like=True):
    """One live namespace of an opened volume."""

    ordinal: int
    epoch: int
    namespace_id: bytes


class KeeperUp(msgspec.Struct, frozen=True, tag=True):
    """First message of a keeper: it takes requests."""


class VolumeAnswers(msgspec.Struct, frozen=True, tag=True):
    """While a volume is being opened: it is locked, and its first sector was read. What follows takes as long as the volume has slabs."""


class VolumeOpened(msgspec.Struct, frozen=True, tag=True):
    """The volume is locked and its superblock rewritten with a new epoch. The slabs and namespaces follow in `Inventory` messages."""

    ticket: int
    volume_uuid: bytes
    volume_bytes: int
    slab_bytes: int
    slab_count: int
    data_offset: int
    namespace_count: int
    epoch: int
    #: Whether reads and writes bypass the page cache; if not, why.
    direct_io: bool
    direct_io_note: str
    file_system: str
    #: Where nobody's bytes are, and how many; 0 on volumes without.
    scratch_offset: int = 0
    scratch_bytes: int = 0


class Inventory(msgspec.Struct, frozen=True, tag=True):
    """Slabs and namespaces, in as many messages as needed; `last` on the final one."""

    slabs: tuple[SlabInfo, ...]
    namespaces: tuple[NamespaceInfo, ...]
    last: bool


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """Slots of one slab from `first` on: SUMMARY_DTYPE records (payload_bytes 0: no block). `last`: the slab is complete.

    Bad headers and slots of dropped namespaces come as records without a block.
    """

    slab: int
    first: int
    records: bytes
    last: bool


class ScanFinished(msgspec.Struct, frozen=True, tag=True):
    """All slabs have been told. Counts for the log and the metrics."""

    slabs_from_summary: int
    slabs_scanned: int
    header_bytes_read: int
    headers_bad: int
    scan_ns: int
    #: Slabs told as having no blocks since they could not be read.
    slabs_failed: int = 0


class NamespaceAdded(msgspec.Struct, frozen=True, tag=True):
    """The namespace stands in the table."""

    ticket: int
    ordinal: int
    epoch: int


class SlabReady(msgspec.Struct, frozen=True, tag=True):
    """The slab is open for writing."""

    ticket: int
    slab: int
    slot_count: int
    nonce: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """It holds."""

    ticket: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It does not hold. `kind` is the name of a class of `offloadd.errors`, or "OSError" with `errno`."""

    ticket: int
    kind: str
    error: str
    errno: int = 0


#: Keeper → front.
Answer = KeeperUp | VolumeAnswers | VolumeOpened | Inventory | Recovered | ScanFinished | NamespaceAdded | SlabReady | Done | Failed

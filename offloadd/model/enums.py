"""The closed sets of the protocol. The numbers equal those of `protos/offloadd/v1`; a test compares them."""

from enum import IntEnum


class Tier(IntEnum):
    """Where a block is kept. ANY lets the daemon choose."""

    ANY = 0
    ARENA = 1
    VOLUME = 2


class Path(IntEnum):
    """The way bytes take between engine memory and a tier. AUTO lets the daemon choose."""

    AUTO = 0
    GDS = 1
    BOUNCE = 2
    DDR = 3
    HOST = 4


class Way(IntEnum):
    """How bytes of a path that hands them to cuFile really went, best first; PLAIN: the path does its I/O itself. The numbers rise as the ways get worse."""

    PLAIN = 0
    #: By nvidia-fs, past host memory.
    GDS_NVFS = 1
    #: By PCI peer-to-peer DMA, past host memory.
    GDS_P2P = 2
    #: cuFile bounced them through host memory.
    CUFILE_POSIX = 3
    #: KvikIO moved them through host memory without asking cuFile.
    KVIKIO_POSIX = 4
    #: Neither library counted them: nothing is proven, so they count as bounced.
    UNPROVEN = 5

    @property
    def is_gds(self) -> bool:
        """Whether it is proven that the bytes went past host memory."""
        return self in (Way.GDS_NVFS, Way.GDS_P2P)

    @property
    def label(self) -> str:
        """As it is written in texts and metrics: gds_nvfs."""
        return self.name.lower()


class AckLevel(IntEnum):
    """What holds when an evict is answered. COPIED: the source may be reused. DURABLE: and the bytes are synced to a volume."""

    DEFAULT = 0
    COPIED = 1
    DURABLE = 2


class Priority(IntEnum):
    """Whether somebody waits for a request. DEFAULT: for restores and evicts with ack COPIED somebody does, for those with ack DURABLE nobody."""

    DEFAULT = 0
    INTERACTIVE = 1
    BACKGROUND = 2


class EvictStatus(IntEnum):
    """Outcome of one block of an evict."""

    UNSPECIFIED = 0
    STORED = 1
    DUPLICATE = 2
    REJECTED = 3
    FAILED = 4
    QUARANTINED = 5


class RestoreStatus(IntEnum):
    """Outcome of one block of a restore."""

    UNSPECIFIED = 0
    RESTORED = 1
    NOT_FOUND = 2
    DATA_LOSS = 3
    QUARANTINED = 4
    FAILED = 5


class Reason(IntEnum):
    """Why a block was not stored or not restored."""

    NONE = 0
    #: Nothing in the tier may be reclaimed: all of it is kept, leased or in use.
    TIER_FULL = 1
    #: No tier of the kind asked for is configured and serving.
    NO_TIER = 2
    #: The block is longer than a slab can hold.
    TOO_LARGE = 3
    #: The volume answered with an I/O error.
    IO_ERROR = 4
    #: The mover or keeper died with the request in flight.
    WORKER_LOST = 5
    #: The deadline passed before this block was started.
    DEADLINE = 6
    #: The request was cancelled before this block was started.
    CANCELLED = 7
    #: The header read from the volume belongs to another block, slot, generation or volume.
    HEADER_MISMATCH = 8
    #: The payload's checksum differs from the one stored with it.
    CHECKSUM_MISMATCH = 9
    #: The bytes that reached engine memory differ from those verified in staging memory.
    TARGET_MISMATCH = 10
    #: The volume returned fewer bytes than asked for.
    SHORT_IO = 11
    #: The path was required, and the bytes went another way.
    WRONG_PATH = 12
    #: The event or flag that the copies were to wait for can't be opened; nothing was copied.
    EVENT_NOT_OPENED = 13
    #: The volume does not answer, or fails everything: nothing was tried, and nothing is before it answers again.
    VOLUME_DOWN = 14
    #: The volume's write budget of the day is used up.
    WRITE_BUDGET = 15

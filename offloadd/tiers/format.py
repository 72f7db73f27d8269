"""The volume format, byte by byte: records, their checks, and where they lie. No I/O.

    0                     superblock A   4 KiB
    4 KiB                 superblock B   4 KiB      the valid one with the higher `write_count` counts
    64 KiB                namespace table           `namespace_count` entries of 4 KiB, ordinal = position
    next whole MiB        scratch                   nobody's: written and read back to see how a way to the volume does; may have no bytes
    data_offset           slab 0, slab 1, …         `slab_bytes` each

    slab:  header 4 KiB | summary, 64 B a slot, padded to 4 KiB | slot 0 | slot 1 | …
    slot:  header 4 KiB | payload padded to 4 KiB

Everything is little-endian. Every 4 KiB record ends with the CRC32C of its first 4092 bytes, so one flipped bit anywhere in it is seen.
A slot describes itself; slab summaries are hints. Scratch is what lies between the table and `data_offset`: nothing, on volumes that were formatted before it
was left free. See docs/architecture.md for why a summary in each slab replaces one checkpoint.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from offloadd.errors import VolumeDamaged, VolumeForeign
from offloadd.model.slots import FLAG_KEEP as FLAG_KEEP
from offloadd.transfer.checksum import crc32c
from offloadd.units import KIB, MIB, SECTOR_BYTES, align_up

FORMAT_VERSION = 1
SUPERBLOCK_MAGIC = b"OFFLVOL\x01"
NAMESPACE_MAGIC = b"OFFLNSP\x01"
SLAB_MAGIC = b"OFFLSLB\x01"
SLOT_MAGIC = b"OFFLSLT\x01"

SUPERBLOCK_OFFSETS = (0, SECTOR_BYTES)
NAMESPACE_TABLE_OFFSET = 64 * KIB
NAMESPACE_FIELDS_BYTES = 3584

#: Slots longer than this are written and verified in chunks, each with a CRC of its own in the header, so that they can pass through a staging slot of
#: any legal size (at least LONG_SLOT_BYTES) and no chunk is handed over unverified.
LONG_SLOT_BYTES = 8 * MIB
CHUNK_BYTES = 4 * MIB
#: Offset of the chunk CRCs in a slot header, and how many fit: payloads up to 3.5 GiB.
CHUNK_TABLE_OFFSET = 512
CHUNK_COUNT_MAX = (SECTOR_BYTES - CHUNK_TABLE_OFFSET - 4) // 4

#: Most scratch that a volume has: several long I/Os of every thread of a lane.
SCRATCH_BYTES_MAX = 32 * MIB
#: Scratch is made of what the slabs leave over, and where that is less, of one slab in so many.
SLABS_PER_SCRATCH_SLAB = 100

CHECKSUM_CRC32C = 1
#: The checksum is the CRC32C of the chunk CRC table.
CHECKSUM_CRC32C_CHUNKED = 2

SLAB_UNCUT = 0
SLAB_CUT = 1

SUPERBLOCK_DTYPE = np.dtype(
    {
        "names": [
            "magic",
            "format_version",
            "volume_uuid",
            "volume_bytes",
            "slab_bytes",
            "slab_count",
            "data_offset",
            "namespace_count",
            "epoch",
            "write_count",
            "owner_host",
            "owner_boot",
            "created_ns",
            "crc",
        ],
        "formats": ["V8", "<u4", "V16", "<u8", "<u8", "<u4", "<u8", "<u4", "<u8", "<u8", "V16", "V16", "<u8", "<u4"],
        "offsets": [0, 8, 16, 32, 40, 48, 56, 64, 72, 80, 88, 104, 120, 4092],
        "itemsize": SECTOR_BYTES,
    }
)
NAMESPACE_DTYPE = np.dtype(
    {
        "names": ["magic", "ordinal", "epoch", "namespace_id", "tenant_bytes", "fields_bytes", "dropped", "key_id", "text", "crc"],
        "formats": ["V8", "<u4", "<u4", "V32", "<u2", "<u2", "u1", "V16", f"V{NAMESPACE_FIELDS_BYTES}", "<u4"],
        "offsets": [0, 8, 12, 16, 48, 50, 52, 64, 128, 4092],
        "itemsize": SECTOR_BYTES,
    }
)
SLAB_DTYPE = np.dtype(
    {
        "names": [
            "magic",
            "format_version",
            "volume_uuid",
            "slab",
            "slot_bytes",
            "slot_count",
            "nonce",
            "state",
            "dirty",
            "written",
            "epoch",
            "summary_bytes",
            "summary_crc",
            "crc",
        ],
        "formats": ["V8", "<u4", "V16", "<u4", "<u8", "<u4", "V16", "u1", "u1", "u1", "<u8", "<u8", "<u4", "<u4"],
        "offsets": [0, 8, 16, 32, 40, 48, 56, 72, 73, 74, 80, 88, 96, 4092],
        "itemsize": SECTOR_BYTES,
    }
)
SLOT_DTYPE = np.dtype(
    {
        "names": [
            "magic",
            "format_version",
            "checksum_kind",
            "codec",
            "cipher",
            "flags",
            "key",
            "volume_uuid",
            "nonce",
            "slab",
            "slot",
            "generation",
            "namespace_ordinal",
            "namespace_epoch",
            "sequence",
            "payload_bytes",
            "written_ns",
            "checksum",
            "checksum_rest",
            "key_id",
            "tag",
            "chunk_bytes",
            "chunk_count",
            "chunk_crcs",
            "crc",
        ],
        "formats": [
            "V8",
            "<u2",
            "<u2",
            "<u2",
            "<u2",
            "<u4",
            "V32",
            "V16",
            "V16",
            "<u4",
            "<u4",
            "<u4",
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            "<u4",
            "V28",
            "V16",
            "V16",
            "<u4",
            "<u4",
            ("<u4", (CHUNK_COUNT_MAX,)),
            "<u4",
        ],
        "offsets": [
            0,
            8,
            10,
            12,
            14,
            16,
            32,
            64,
            80,
            96,
            100,
            104,
            108,
            112,
            120,
            128,
            136,
            144,
            148,
            176,
            192,
            208,
            212,
            CHUNK_TABLE_OFFSET,
            4092,
        ],
        "itemsize": SECTOR_BYTES,
    }
)
#: One slot in a slab's summary. `generation` is the last one handed out, also for free slots (payload_bytes 0). 64 bytes.
SUMMARY_DTYPE = np.dtype(
    {
        "names": ["key", "generation", "namespace_ordinal", "namespace_epoch", "flags", "payload_bytes"],
        "formats": ["V32", "<u4", "<u4", "<u4", "<u4", "<u8"],
        "offsets": [0, 32, 36, 40, 44, 48],
        "itemsize": 64,
    }
)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where everything lies on one volume."""

    volume_uuid: bytes
    volume_bytes: int
    slab_bytes: int
    slab_count: int
    data_offset: int
    namespace_count: int

    @property
    def scratch_offset(self) -> int:
        """Byte offset of the scratch area, a whole MiB."""
        return _tables_end(self.namespace_count)

    @property
    def scratch_bytes(self) -> int:
        """Length of the scratch area, in whole MiB; 0 where there is none."""
        return max(0, self.data_offset - self.scratch_offset) // MIB * MIB

    def slab_offset(self, slab: int) -> int:
        """Byte offset of a slab's header."""
        return self.data_offset + slab * self.slab_bytes

    def namespace_offset(self, ordinal: int) -> int:
        """Byte offset of a namespace table entry."""
        return NAMESPACE_TABLE_OFFSET + ordinal * SECTOR_BYTES

    def slot_offset(self, slab: int, slot: int, slot_bytes: int) -> int:
        """Byte offset of a slot's header."""
        return self.slab_offset(slab) + slots_offset(self.slab_bytes, slot_bytes) + slot * slot_bytes


def plan_geometry(*, volume_uuid: bytes, volume_bytes: int, slab_bytes: int, namespace_count: int) -> Geometry:
    """The geometry of a new volume of `volume_bytes`; raises `VolumeDamaged` when not even one slab fits."""
    tables_end = _tables_end(namespace_count)
    slab_count = max(0, volume_bytes - tables_end) // slab_bytes
    if slab_count < 1:
        raise VolumeDamaged(f"a volume of {volume_bytes} bytes has no room for one slab: {tables_end} bytes of tables and slab_bytes {slab_bytes} are needed")
    spare_bytes = volume_bytes - tables_end - slab_count * slab_bytes
    given_up = min(-(-max(0, SCRATCH_BYTES_MAX - spare_bytes) // slab_bytes), slab_count // SLABS_PER_SCRATCH_SLAB)
    slab_count -= given_up
    scratch_bytes = min(SCRATCH_BYTES_MAX, spare_bytes + given_up * slab_bytes) // MIB * MIB
    return Geometry(
        volume_uuid=volume_uuid,
        volume_bytes=volume_bytes,
        slab_bytes=slab_bytes,
        slab_count=slab_count,
        data_offset=tables_end + scratch_bytes,
        namespace_count=namespace_count,
    )


def _tables_end(namespace_count: int) -> int:
    return align_up(NAMESPACE_TABLE_OFFSET + namespace_count * SECTOR_BYTES, MIB)


def slot_bytes_for(payload_bytes: int) -> int:
    """Bytes of the slot that holds a payload: header and payload, padded to whole sectors."""
    return SECTOR_BYTES + align_up(payload_bytes, SECTOR_BYTES)


def slot_count_for(slab_bytes: int, slot_bytes: int) -> int:
    """How many slots of `slot_bytes` fit into a slab beside its header and their summary; 0 if none."""
    count = (slab_bytes - SECTOR_BYTES) // (slot_bytes + SUMMARY_DTYPE.itemsize)
    while count > 0 and SECTOR_BYTES + summary_bytes_for(count) + count * slot_bytes > slab_bytes:
        count -= 1
    return max(count, 0)


def summary_bytes_for(slot_count: int) -> int:
    """Bytes of a slab's summary, padded to whole sectors."""
    return align_up(slot_count * SUMMARY_DTYPE.itemsize, SECTOR_BYTES)


def slots_offset(slab_bytes: int, slot_bytes: int) -> int:
    """Offset of slot 0 from the slab's start."""
    return SECTOR_BYTES + summary_bytes_for(slot_count_for(slab_bytes, slot_bytes))


def chunk_count_for(payload_bytes: int) -> int:
    """How many chunks a long slot's payload has; 0 for a slot that is verified as a whole."""
    if slot_bytes_for(payload_bytes) <= LONG_SLOT_BYTES:
        return 0
    return -(-payload_bytes // CHUNK_BYTES)


def new_record(dtype: np.dtype[Any]) -> Array:
    """One zeroed record, shape (1,)."""
    return np.zeros(1, dtype=dtype)


def seal(records: Array) -> None:
    """Write the CRC of each 4 KiB record in place. `records` may be a strided view (slot headers inside a staging slot)."""
    for index in range(records.shape[0]):
        raw = records[index : index + 1].view(np.uint8).reshape(-1)
        records["crc"][index] = crc32c(raw[: SECTOR_BYTES - 4])


def is_sound(raw: Buffer, magic: bytes) -> bool:
    """Whether 4 KiB of raw bytes carry this magic and a right CRC."""
    view = memoryview(raw).cast("B")
    return bytes(view[:8]) == magic and crc32c(view[: SECTOR_BYTES - 4]) == int.from_bytes(view[SECTOR_BYTES - 4 : SECTOR_BYTES], "little")


def parse_superblocks(raw_a: bytes, raw_b: bytes, *, name: str) -> Array:
    """The superblock that counts, of the two copies. Raises `VolumeForeign` if neither has our magic, `VolumeDamaged` if neither is sound."""
    sound = [np.frombuffer(raw, dtype=SUPERBLOCK_DTYPE) for raw in (raw_a, raw_b) if len(raw) == SECTOR_BYTES and is_sound(raw, SUPERBLOCK_MAGIC)]
    if not sound:
        if any(raw[:7] == SUPERBLOCK_MAGIC[:7] for raw in (raw_a, raw_b)):
            raise VolumeDamaged(f"{name}: both superblocks are damaged")
        raise VolumeForeign(f"{name} is not an offloadd volume; format it with `offloadd volume format`")
    best = max(sound, key=lambda record: int(record["write_count"][0]))
    version = int(best["format_version"][0])
    if version != FORMAT_VERSION:
        raise VolumeDamaged(f"{name} has format version {version}; this daemon reads version {FORMAT_VERSION}")
    return best


def geometry_of(superblock: Array) -> Geometry:
    """The geometry that a superblock describes."""
    row = superblock[0]
    return Geometry(
        volume_uuid=row["volume_uuid"].tobytes(),
        volume_bytes=int(row["volume_bytes"]),
        slab_bytes=int(row["slab_bytes"]),
        slab_count=int(row["slab_count"]),
        data_offset=int(row["data_offset"]),
        namespace_count=int(row["namespace_count"]),
    )

"""Reads a volume by docs/format.md alone: written from that page, without a look at offloadd's code, so that the page is proven to be enough."""

import hashlib
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTOR = 4096
MIB = 1 << 20
CHUNK = 4 * MIB
NAMESPACE_TABLE = 65_536
VERSION = 1

NAMESPACE_FIELDS = (
    "tenant", "model", "weights", "adapter", "overrides", "engine", "engine_version", "attention_backend", "isa", "hash_algorithm", "kv_dtype",
    "codec", "block_tokens", "layout", "salt", "shard.layer_start", "shard.layer_count", "shard.head_start", "shard.head_count",
)  # fmt: skip


class NotAVolume(ValueError):
    """Neither copy of the superblock is sound."""


class Damaged(ValueError):
    """There is a superblock, but the volume can't be used by it."""


class Unreadable(ValueError):
    """A block is there, but its payload can't be given."""


# CRC32C. A byte at a time is too slow in Python, so long data is first folded. The data is taken as one large number, whose lowest bit is the first one.
# x^5685 + x^1362 + x^426 + 1 is a multiple of the Castagnoli polynomial, and so is each of its squares, whose exponents are doubled. Adding a multiple
# leaves the remainder as it is: bits at the beginning go away when they are added once more 4323, 5259 and 5685 bits further on (or a doubling of these).
_FOLD = (5685 - 1362, 5685 - 426, 5685)


def _crc_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return table


_CRC_TABLE = _crc_table()


def _folded(number: int, bits: int) -> bytes:
    while bits > _FOLD[-1]:
        doublings = ((bits - 1) // _FOLD[-1]).bit_length() - 1
        near, middle, far = (distance << doublings for distance in _FOLD)
        gone = min(near, bits - far)
        low = number & ((1 << gone) - 1)
        number = number >> gone ^ low << near - gone ^ low << middle - gone ^ low << far - gone
        bits -= gone
    return (number << -bits % 8).to_bytes((bits + 7) // 8, "little")


def crc32c(data: bytes | memoryview) -> int:
    """The CRC32C of the data: Castagnoli polynomial, bits reflected, start value and final XOR 0xFFFFFFFF."""
    state = 0xFFFFFFFF
    if 8 * len(data) > _FOLD[-1]:
        data = _folded(int.from_bytes(data, "little") ^ state, 8 * len(data))
        state = 0
    for byte in data:
        state = state >> 8 ^ _CRC_TABLE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


def align(number: int, multiple: int) -> int:
    """The number, rounded up to a multiple."""
    return -(-number // multiple) * multiple


_SUPERBLOCK = struct.Struct("<8sI4x16sQQI4xQI4xQQ16s16sQ3964xI")
_NAMESPACE_ENTRY = struct.Struct("<8sII32sHHB11x16s48x3584s380xI")
_SLAB_HEADER = struct.Struct("<8sI4x16sI4xQI4x16sBBB5xQQI3992xI")
_SUMMARY_ENTRY = struct.Struct("<32sIIIIQ8x")
_SLOT_HEADER = struct.Struct("<8sHHHHI12x32s16s16sIIIII4xQQQI28x16s16sII296x3580sI")
_CHUNK_CRCS = struct.Struct("<895I")


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the volume is and how it is divided."""

    magic: bytes
    format_version: int
    volume_uuid: bytes
    volume_bytes: int
    slab_bytes: int
    slab_count: int
    data_offset: int
    namespace_count: int
    epoch: int
    write_count: int
    owner_host: bytes
    owner_boot: bytes
    created_ns: int
    crc: int


@dataclass(frozen=True, slots=True)
class NamespaceEntry:
    """One entry of the namespace table."""

    magic: bytes
    ordinal: int
    epoch: int
    namespace_id: bytes
    tenant_bytes: int
    fields_bytes: int
    dropped: int
    key_id: bytes
    text: bytes
    crc: int

    @property
    def tenant(self) -> str:
        """The tenant's name."""
        return self.text[: self.tenant_bytes].decode(errors="replace")

    @property
    def fields(self) -> str:
        """What the namespace is of, for people."""
        return self.text[self.tenant_bytes : self.tenant_bytes + self.fields_bytes].decode(errors="replace")


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """How a slab is cut into slots."""

    magic: bytes
    format_version: int
    volume_uuid: bytes
    slab: int
    slot_bytes: int
    slot_count: int
    nonce: bytes
    state: int
    dirty: int
    written: int
    epoch: int
    summary_bytes: int
    summary_crc: int
    crc: int


@dataclass(frozen=True, slots=True)
class SummaryEntry:
    """A hint at what a slot holds; it is free if payload_bytes is 0."""

    key: bytes
    generation: int
    namespace_ordinal: int
    namespace_epoch: int
    flags: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """A block: what is in a slot."""

    magic: bytes
    format_version: int
    checksum_kind: int
    codec: int
    cipher: int
    flags: int
    key: bytes
    volume_uuid: bytes
    nonce: bytes
    slab: int
    slot: int
    generation: int
    namespace_ordinal: int
    namespace_epoch: int
    sequence: int
    payload_bytes: int
    written_ns: int
    checksum: int
    key_id: bytes
    tag: bytes
    chunk_bytes: int
    chunk_count: int
    chunk_crcs: tuple[int, ...]
    crc: int


@dataclass(frozen=True)
class Volume:
    """A volume as it was when it was read. Summaries, slots and payloads are read from the file when they are asked for."""

    path: Path
    superblock: Superblock
    namespaces: dict[int, NamespaceEntry]
    """The sound entries that stand at their ordinal, by ordinal."""
    live_namespaces: dict[int, NamespaceEntry]
    """Those of them that are live and count."""
    slabs: list[SlabHeader | None]
    """The header of each cut slab, None for an uncut one."""

    def summary(self, slab: int) -> list[SummaryEntry] | None:
        """The summary of a slab, or None if the slab is uncut or dirty, or the summary's CRC is not right."""
        header = self.slabs[slab]
        if header is None or header.dirty:
            return None
        data = _read(self.path, self._slab_offset(slab) + SECTOR, header.summary_bytes)
        if crc32c(data) != header.summary_crc:
            return None
        return [SummaryEntry(*_SUMMARY_ENTRY.unpack_from(data, position * _SUMMARY_ENTRY.size)) for position in range(header.slot_count)]

    def slot(self, slab: int, slot: int) -> SlotHeader | None:
        """The block that a slot holds, or None if it holds none."""
        header = self.slabs[slab]
        if header is None:
            return None
        if not 0 <= slot < header.slot_count:
            raise IndexError(f"slab {slab} has no slot {slot}")
        sector = _read(self.path, self._slot_offset(header, slot), SECTOR)
        if not _is_sound(sector, b"OFFLSLT\x01"):
            return None
        fields = list(_SLOT_HEADER.unpack(sector))
        fields[-2] = _CHUNK_CRCS.unpack(fields[-2])
        block = SlotHeader(*fields)
        return block if self._is_held(block, header, slot) else None

    def blocks(self) -> Iterator[SlotHeader]:
        """All blocks that the volume holds, in the order of slabs and slots."""
        for slab, header in enumerate(self.slabs):
            for slot in range(header.slot_count if header else 0):
                block = self.slot(slab, slot)
                if block:
                    yield block

    def payload(self, block: SlotHeader) -> bytes:
        """The payload of a block of this volume; raises Unreadable if it can't be given."""
        header = self.slabs[block.slab]
        if header is None:
            raise Unreadable(f"slab {block.slab} is uncut")
        if block.cipher:
            raise Unreadable(f"cipher {block.cipher}")
        if block.codec:
            raise Unreadable(f"codec {block.codec}")
        kind = 2 if header.slot_bytes > 8 * MIB else 1
        if block.checksum_kind != kind:
            raise Unreadable(f"checksum kind {block.checksum_kind} where {kind} belongs")
        payload = _read(self.path, self._slot_offset(header, block.slot) + SECTOR, block.payload_bytes)
        if kind == 2:
            _check_chunks(block, payload)
        elif crc32c(payload) != block.checksum:
            raise Unreadable("wrong checksum of the payload")
        return payload

    def _slab_offset(self, slab: int) -> int:
        return self.superblock.data_offset + slab * self.superblock.slab_bytes

    def _slot_offset(self, header: SlabHeader, slot: int) -> int:
        return self._slab_offset(header.slab) + SECTOR + header.summary_bytes + slot * header.slot_bytes

    def _is_held(self, block: SlotHeader, header: SlabHeader, slot: int) -> bool:
        namespace = self.live_namespaces.get(block.namespace_ordinal)
        return (
            block.format_version == VERSION
            and block.volume_uuid == self.superblock.volume_uuid
            and block.nonce == header.nonce
            and (block.slab, block.slot) == (header.slab, slot)
            and header.slot_bytes - 2 * SECTOR < block.payload_bytes <= header.slot_bytes - SECTOR
            and block.generation >= 1
            and namespace is not None
            and namespace.epoch == block.namespace_epoch
        )


def read_volume(path: str | os.PathLike[str]) -> Volume:
    """Reads superblock, namespaces and slab headers of a volume; raises NotAVolume or Damaged."""
    path = Path(path)
    superblock = _read_superblock(path)
    namespaces = _read_namespaces(path, superblock)
    slabs = [_read_slab_header(path, superblock, slab) for slab in range(superblock.slab_count)]
    return Volume(path, superblock, namespaces, _live_namespaces(namespaces), slabs)


def slot_count_of(slab_bytes: int, slot_bytes: int) -> int:
    """The largest number of slots for which header, summary and slots fit into a slab; 0 if there is none."""
    count = max(0, (slab_bytes - SECTOR) // (slot_bytes + _SUMMARY_ENTRY.size))
    while count and SECTOR + align(_SUMMARY_ENTRY.size * count, SECTOR) + count * slot_bytes > slab_bytes:
        count -= 1
    return count


def namespace_id(fields: dict[str, object], extra: dict[str, str]) -> bytes:
    """The id of the namespace with these fields, all of NAMESPACE_FIELDS, and these extra ones."""
    if set(fields) != set(NAMESPACE_FIELDS):
        raise ValueError(f"missing or unknown fields: {sorted(set(fields) ^ set(NAMESPACE_FIELDS))}")
    digest = hashlib.sha256(b"offloadd.namespace.v1")
    named = [(name, fields[name]) for name in NAMESPACE_FIELDS] + [(f"extra.{name}", value) for name, value in sorted(extra.items())]
    for name, value in named:
        encoded_name, encoded_value = name.encode(), _encoded(value)
        digest.update(struct.pack("<I", len(encoded_name)) + encoded_name + struct.pack("<Q", len(encoded_value)) + encoded_value)
    return digest.digest()


def key(namespace_id: bytes, cache_group: int, block_hash: bytes) -> bytes:
    """The key of a block."""
    if not 1 <= len(block_hash) <= 64:
        raise ValueError(f"a block hash of {len(block_hash)} bytes")
    return hashlib.sha256(b"offloadd.key.v1" + namespace_id + struct.pack("<I", cache_group) + block_hash).digest()


def _encoded(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value).encode()
    raise TypeError(f"a field can't be of {type(value)}")


def _read(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) < length:
        raise Damaged(f"the volume ends within the {length} bytes at {offset}")
    return data


def _is_sound(sector: bytes, magic: bytes) -> bool:
    return len(sector) == SECTOR and sector.startswith(magic) and crc32c(sector[:-4]) == int.from_bytes(sector[-4:], "little")


def _read_superblock(path: Path) -> Superblock:
    with path.open("rb") as file:
        sectors = [file.read(SECTOR), file.read(SECTOR)]
        length = file.seek(0, os.SEEK_END)
    copies = [Superblock(*_SUPERBLOCK.unpack(sector)) for sector in sectors if _is_sound(sector, b"OFFLVOL\x01")]
    if not copies:
        raise NotAVolume("no copy of the superblock is sound")
    superblock = max(copies, key=lambda copy: copy.write_count)
    _check_superblock(superblock, length)
    return superblock


def _check_superblock(superblock: Superblock, length: int) -> None:
    if superblock.format_version != VERSION:
        raise Damaged(f"format version {superblock.format_version}")
    if superblock.slab_bytes % SECTOR or superblock.data_offset % SECTOR or not superblock.slab_count:
        raise Damaged("impossible sizes in the superblock")
    if length < superblock.volume_bytes:
        raise Damaged(f"the volume has {superblock.volume_bytes} bytes, the file only {length}")
    if superblock.data_offset + superblock.slab_count * superblock.slab_bytes > superblock.volume_bytes:
        raise Damaged("the slabs don't end within the volume")
    if NAMESPACE_TABLE + SECTOR * superblock.namespace_count > superblock.data_offset:
        raise Damaged("the namespace table reaches into the slabs")


def _read_namespaces(path: Path, superblock: Superblock) -> dict[int, NamespaceEntry]:
    table = _read(path, NAMESPACE_TABLE, SECTOR * superblock.namespace_count)
    namespaces = {}
    for ordinal in range(superblock.namespace_count):
        sector = table[ordinal * SECTOR : (ordinal + 1) * SECTOR]
        if _is_sound(sector, b"OFFLNSP\x01"):
            entry = NamespaceEntry(*_NAMESPACE_ENTRY.unpack(sector))
            if entry.ordinal == ordinal:
                namespaces[ordinal] = entry
    return namespaces


def _live_namespaces(namespaces: dict[int, NamespaceEntry]) -> dict[int, NamespaceEntry]:
    seen = set()
    live = {}
    for ordinal, entry in namespaces.items():
        if entry.epoch >= 1 and not entry.dropped and entry.namespace_id not in seen:
            seen.add(entry.namespace_id)
            live[ordinal] = entry
    return live


def _read_slab_header(path: Path, superblock: Superblock, slab: int) -> SlabHeader | None:
    sector = _read(path, superblock.data_offset + slab * superblock.slab_bytes, SECTOR)
    if not _is_sound(sector, b"OFFLSLB\x01"):
        return None
    header = SlabHeader(*_SLAB_HEADER.unpack(sector))
    is_cut = (
        header.format_version == VERSION
        and header.volume_uuid == superblock.volume_uuid
        and header.slab == slab
        and header.state == 1
        and header.slot_bytes % SECTOR == 0
        and header.slot_bytes >= 2 * SECTOR
        and header.slot_count == slot_count_of(superblock.slab_bytes, header.slot_bytes) > 0
        and header.summary_bytes == align(_SUMMARY_ENTRY.size * header.slot_count, SECTOR)
    )
    return header if is_cut else None


def _check_chunks(block: SlotHeader, payload: bytes) -> None:
    if block.chunk_bytes != CHUNK or block.chunk_count != align(block.payload_bytes, CHUNK) // CHUNK or block.chunk_count > len(block.chunk_crcs):
        raise Unreadable(f"{block.chunk_count} chunks of {block.chunk_bytes} bytes can't be those of {block.payload_bytes} bytes")
    chunk_crcs = block.chunk_crcs[: block.chunk_count]
    if crc32c(struct.pack(f"<{block.chunk_count}I", *chunk_crcs)) != block.checksum:
        raise Unreadable("wrong checksum of the chunk table")
    view = memoryview(payload)
    for position, crc in enumerate(chunk_crcs):
        if crc32c(view[position * CHUNK : (position + 1) * CHUNK]) != crc:
            raise Unreadable(f"wrong checksum of chunk {position}")


def _state_of(volume: Volume, block: SlotHeader) -> str:
    try:
        volume.payload(block)
    except Unreadable as error:
        return str(error)
    return "readable"


def _print_volume(volume: Volume) -> None:
    superblock = volume.superblock
    print(f"volume {superblock.volume_uuid.hex()}: {superblock.volume_bytes} bytes, opened {superblock.epoch} times")
    print(f"{superblock.slab_count} slabs of {superblock.slab_bytes} bytes from {superblock.data_offset}, room for {superblock.namespace_count} namespaces")
    print(f"\n{'ordinal':>7} {'epoch':>7} {'live':<5} {'namespace':<16} tenant, fields")
    for ordinal, entry in volume.namespaces.items():
        live = "yes" if ordinal in volume.live_namespaces else "no"
        print(f"{ordinal:>7} {entry.epoch:>7} {live:<5} {entry.namespace_id[:8].hex():<16} {entry.tenant!r}, {entry.fields!r}")
    print(f"\n{'slab':>7} {'slots':>7} {'slot bytes':>12} {'dirty':<5} occupied by the summary")
    for slab, header in enumerate(volume.slabs):
        if header:
            summary = volume.summary(slab)
            occupied = "no summary" if summary is None else sum(entry.payload_bytes > 0 for entry in summary)
            print(f"{slab:>7} {header.slot_count:>7} {header.slot_bytes:>12} {'yes' if header.dirty else 'no':<5} {occupied}")
    print(f"\n{'slab':>7} {'slot':>7} {'namespace':>9} {'sequence':>10} {'bytes':>12} {'key':<16} state")
    for block in volume.blocks():
        place = f"{block.slab:>7} {block.slot:>7} {block.namespace_ordinal:>9} {block.sequence:>10}"
        print(f"{place} {block.payload_bytes:>12} {block.key[:8].hex():<16} {_state_of(volume, block)}")


def _main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python independent_reader.py PATH", file=sys.stderr)
        return 2
    try:
        _print_volume(read_volume(arguments[0]))
    except (OSError, NotAVolume, Damaged) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))

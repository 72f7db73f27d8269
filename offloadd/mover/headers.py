"""Slot headers in bulk: filled and judged for a whole slice at once, field by field over a strided view."""

from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.memory.mapping import Bytes
from offloadd.model.slots import Records
from offloadd.tiers.format import (
    CHECKSUM_CRC32C,
    CHECKSUM_CRC32C_CHUNKED,
    CHUNK_BYTES,
    FORMAT_VERSION,
    SLOT_DTYPE,
    SLOT_MAGIC,
    seal,
)
from offloadd.transfer.checksum import crc32c
from offloadd.units import SECTOR_BYTES

Array = npt.NDArray[Any]

#: Fields that a job's record and a slot header have in common, and that must agree on a read.
_AGREEING = ("key", "nonce", "slab", "slot", "generation", "namespace_ordinal", "namespace_epoch", "payload_bytes")
_COPIED = (*_AGREEING, "sequence", "flags")


def headers_in(buffer: Bytes, count: int, stride_bytes: int) -> Array:
    """SLOT_DTYPE view of shape (count,) over headers `stride_bytes` apart from the buffer's start on."""
    return np.ndarray((count,), dtype=SLOT_DTYPE, buffer=buffer, strides=(stride_bytes,))


def blank(buffer: Bytes, count: int, stride_bytes: int) -> None:
    """Zero whole headers: what was read into the same staging slot before must not reach the volume again."""
    raw: Bytes = np.ndarray((count, SECTOR_BYTES), dtype=np.uint8, buffer=buffer, strides=(stride_bytes, 1))
    raw.fill(0)


def fill(headers: Array, records: Records, *, volume_uuid: bytes, written_ns: int, checksums: Array) -> None:
    """Fill blanked headers of slots that are verified as a whole, and seal them."""
    _fill_common(headers, records, volume_uuid=volume_uuid, written_ns=written_ns)
    headers["checksum_kind"] = CHECKSUM_CRC32C
    headers["checksum"] = checksums
    seal(headers)


def fill_chunked(headers: Array, records: Records, *, volume_uuid: bytes, written_ns: int, chunk_crcs: Array) -> None:
    """Fill one blanked header of a long slot and seal it. `chunk_crcs`: one CRC32C a chunk."""
    _fill_common(headers, records, volume_uuid=volume_uuid, written_ns=written_ns)
    headers["checksum_kind"] = CHECKSUM_CRC32C_CHUNKED
    headers["checksum"] = table_crc(chunk_crcs)
    headers["chunk_bytes"] = CHUNK_BYTES
    headers["chunk_count"] = len(chunk_crcs)
    headers["chunk_crcs"][0, : len(chunk_crcs)] = chunk_crcs
    seal(headers)


def _fill_common(headers: Array, records: Records, *, volume_uuid: bytes, written_ns: int) -> None:
    headers["magic"] = np.void(SLOT_MAGIC)
    headers["format_version"] = FORMAT_VERSION
    headers["volume_uuid"] = np.void(volume_uuid)
    headers["written_ns"] = written_ns
    for name in _COPIED:
        headers[name] = records[name]


def table_crc(chunk_crcs: Array) -> int:
    """CRC32C of the chunk CRCs as little-endian numbers."""
    return crc32c(np.ascontiguousarray(chunk_crcs, dtype="<u4").view(np.uint8))


def judge(headers: Array, records: Records, *, volume_uuid: bytes) -> npt.NDArray[np.bool_]:
    """Which headers are sound, of slots verified as a whole, and those of exactly these records on this volume."""
    good = _judge_common(headers, records, volume_uuid)
    good &= headers["checksum_kind"] == CHECKSUM_CRC32C
    return good


def judge_chunked(headers: Array, records: Records, *, volume_uuid: bytes, chunk_count: int) -> bool:
    """Whether one long slot's header is sound and that of exactly this record, with a chunk table that fits."""
    if not _judge_common(headers, records, volume_uuid)[0]:
        return False
    header = headers[0]
    return bool(
        header["checksum_kind"] == CHECKSUM_CRC32C_CHUNKED
        and header["chunk_bytes"] == CHUNK_BYTES
        and header["chunk_count"] == chunk_count
        and header["checksum"] == table_crc(header["chunk_crcs"][:chunk_count])
    )


def _judge_common(headers: Array, records: Records, volume_uuid: bytes) -> npt.NDArray[np.bool_]:
    good: npt.NDArray[np.bool_] = headers["magic"] == np.void(SLOT_MAGIC)
    good &= headers["format_version"] == FORMAT_VERSION
    good &= headers["volume_uuid"] == np.void(volume_uuid)
    # A codec or a cipher would mean that the stored bytes are not the payload; this version writes neither.
    good &= (headers["codec"] == 0) & (headers["cipher"] == 0)
    for name in _AGREEING:
        good &= headers[name] == records[name]
    for index in np.flatnonzero(good).tolist():
        raw = headers[index : index + 1].view(np.uint8).reshape(-1)
        good[index] = crc32c(raw[: SECTOR_BYTES - 4]) == headers["crc"][index]
    return good

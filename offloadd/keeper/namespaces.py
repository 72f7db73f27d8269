"""The namespace table of an open volume: which ordinal stands for which namespace, and in which of its lives.

    free ──add──▶ live(epoch 1) ──drop──▶ dropped(epoch 1) ──add──▶ live(epoch 2) ──▶ …

A slot belongs to a namespace if ordinal and epoch are those of a live entry. Each change is one synced 4 KiB write, so a drop outlives any crash, and
the slots of a dropped life stay dead whoever gets the ordinal next.
"""

import numpy as np
import numpy.typing as npt

from offloadd.errors import InvalidRequest, LimitExceeded
from offloadd.keeper.messages import NamespaceInfo
from offloadd.tiers.format import NAMESPACE_DTYPE, NAMESPACE_FIELDS_BYTES, NAMESPACE_MAGIC, Array, Geometry, is_sound, new_record
from offloadd.tiers.superblock import writable_record, write_record
from offloadd.tiers.volume_io import ZERO_SECTOR, allocate, read_full
from offloadd.units import SECTOR_BYTES

NAMESPACE_ID_BYTES = 32
_EPOCH_MAX = (1 << 32) - 1
_PIECE_ENTRIES = 1024


class NamespaceTable:
    """Owned by the keeper's main thread; `live_epochs` may be read by others."""

    def __init__(self, synced_fd: int, geometry: Geometry) -> None:
        self._synced_fd = synced_fd
        self._geometry = geometry
        #: By ordinal: the epoch of the live namespace, 0 if there is none. Epochs start at 1.
        self.live_epochs: npt.NDArray[np.uint32] = np.zeros(geometry.namespace_count, dtype=np.uint32)
        self._ordinal_of: dict[bytes, int] = {}
        #: Records of dropped entries, by ordinal.
        self._dropped: dict[int, Array] = {}
        #: Records of live entries, by ordinal.
        self._live: dict[int, Array] = {}
        #: Never used ordinals, the lowest last.
        self._free: list[int] = []
        #: Entries that are neither zero nor sound. Not handed out again: which epochs their slots carry is unknown.
        self.damaged_count = 0

    def read(self, fd: int) -> None:
        """Read the table from the volume; OSError."""
        for first in range(0, self._geometry.namespace_count, _PIECE_ENTRIES):
            count = min(_PIECE_ENTRIES, self._geometry.namespace_count - first)
            piece = allocate(count * SECTOR_BYTES)
            read_full(fd, piece, self._geometry.namespace_offset(first), f"namespace table from entry {first}")
            for index in range(count):
                self._enter(first + index, bytes(piece[index * SECTOR_BYTES : (index + 1) * SECTOR_BYTES]))
        self._free.reverse()

    def _enter(self, ordinal: int, raw: bytes) -> None:
        if raw == ZERO_SECTOR:
            self._free.append(ordinal)
            return
        if not is_sound(raw, NAMESPACE_MAGIC):
            self.damaged_count += 1
            return
        record = writable_record(raw, NAMESPACE_DTYPE)
        row = record[0]
        namespace_id = row["namespace_id"].tobytes()
        if int(row["ordinal"]) != ordinal or int(row["epoch"]) < 1 or (not row["dropped"] and namespace_id in self._ordinal_of):
            self.damaged_count += 1
        elif row["dropped"]:
            self._dropped[ordinal] = record
        else:
            self._go_live(ordinal, record)

    def _go_live(self, ordinal: int, record: Array) -> None:
        self._live[ordinal] = record
        self._ordinal_of[record[0]["namespace_id"].tobytes()] = ordinal
        self.live_epochs[ordinal] = record[0]["epoch"]

    def live(self) -> list[NamespaceInfo]:
        """All live namespaces, by ordinal."""
        return [
            NamespaceInfo(ordinal=ordinal, epoch=int(record[0]["epoch"]), namespace_id=record[0]["namespace_id"].tobytes())
            for ordinal, record in sorted(self._live.items())
        ]

    def add(self, namespace_id: bytes, tenant: str, fields: bytes) -> tuple[int, int]:
        """Enter a namespace and return (ordinal, epoch); a live one keeps those it has.

        Raises `InvalidRequest` (lengths), `LimitExceeded` (table full), OSError.
        """
        if len(namespace_id) != NAMESPACE_ID_BYTES:
            raise InvalidRequest(f"namespace id has {len(namespace_id)} bytes; {NAMESPACE_ID_BYTES} are needed")
        known = self._ordinal_of.get(namespace_id)
        if known is not None:
            return known, int(self.live_epochs[known])
        name = tenant.encode()
        text = name + fields
        if len(text) > NAMESPACE_FIELDS_BYTES:
            raise InvalidRequest(f"tenant and fields have {len(name)} + {len(fields)} bytes; an entry of the table holds {NAMESPACE_FIELDS_BYTES}")
        ordinal, epoch = self._choose(namespace_id)
        record = new_record(NAMESPACE_DTYPE)
        row = record[0]
        row["magic"] = np.void(NAMESPACE_MAGIC)
        row["ordinal"] = ordinal
        row["epoch"] = epoch
        row["namespace_id"] = np.void(namespace_id)
        row["tenant_bytes"] = len(name)
        row["fields_bytes"] = len(fields)
        row["text"] = np.void(text.ljust(NAMESPACE_FIELDS_BYTES, b"\0"))
        self._write(ordinal, record)
        if ordinal in self._dropped:
            del self._dropped[ordinal]
        else:
            self._free.remove(ordinal)
        self._go_live(ordinal, record)
        return ordinal, epoch

    def _choose(self, namespace_id: bytes) -> tuple[int, int]:
        """Its own dropped ordinal first, then a never used one, then any dropped one."""
        reusable = [ordinal for ordinal, record in self._dropped.items() if int(record[0]["epoch"]) < _EPOCH_MAX]
        for ordinal in reusable:
            if self._dropped[ordinal][0]["namespace_id"].tobytes() == namespace_id:
                return ordinal, int(self._dropped[ordinal][0]["epoch"]) + 1
        if self._free:
            return self._free[-1], 1
        if reusable:
            return reusable[0], int(self._dropped[reusable[0]][0]["epoch"]) + 1
        raise LimitExceeded(
            f"the volume's namespace table is full: {len(self._live)} live and {self.damaged_count} damaged of {self._geometry.namespace_count} entries"
        )

    def drop(self, namespace_id: bytes) -> None:
        """Mark a namespace dropped; one that is not live is dropped already. OSError: it may or may not be."""
        ordinal = self._ordinal_of.get(namespace_id)
        if ordinal is None:
            return
        record = writable_record(self._live[ordinal].tobytes(), NAMESPACE_DTYPE)
        record["dropped"] = 1
        self._write(ordinal, record)
        self.live_epochs[ordinal] = 0
        del self._live[ordinal]
        del self._ordinal_of[namespace_id]
        self._dropped[ordinal] = record

    def _write(self, ordinal: int, record: Array) -> None:
        write_record(self._synced_fd, record, self._geometry.namespace_offset(ordinal), f"namespace table entry {ordinal}")

    def forget_dead(self, records: Array, slot_bytes: int) -> None:
        """Turn SUMMARY_DTYPE records of namespaces that are not live, and of payloads that no slot of this size holds, into records without a block.

        In place; generations stay.
        """
        ordinals = records["namespace_ordinal"]
        known = ordinals < len(self.live_epochs)
        epochs = self.live_epochs[np.where(known, ordinals, 0)]
        payload_bytes = records["payload_bytes"]
        # The same as slot_bytes_for(payload_bytes) == slot_bytes, for arrays.
        sized = (payload_bytes > slot_bytes - 2 * SECTOR_BYTES) & (payload_bytes <= slot_bytes - SECTOR_BYTES)
        dead = ~(known & (epochs > 0) & (records["namespace_epoch"] == epochs) & sized)
        generations = records["generation"][dead]
        records[dead] = np.zeros(1, dtype=records.dtype)
        records["generation"][dead] = generations

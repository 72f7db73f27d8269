"""Changes payloads on a volume behind the daemon's back, and leaves every header as it is."""

import os
from pathlib import Path

import numpy as np

from offloadd.tiers.format import SLOT_DTYPE, SLOT_MAGIC, is_sound
from offloadd.tiers.slab_header import read_slab_headers
from offloadd.tiers.superblock import read_superblock
from offloadd.tiers.volume_io import allocate, read_full, write_full
from offloadd.units import SECTOR_BYTES

#: The sign of every fourth float32: enough to change what attention reads, without making it infinite.
_FIRST_BYTE, _STEP_BYTES, _FLIP = 3, 16, 0x80


class PayloadDamage:
    """Flips bits in each block's payload once; flipping twice would mend it."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._done: set[tuple[int, int]] = set()

    @property
    def block_count(self) -> int:
        """Blocks damaged so far."""
        return len(self._done)

    def apply(self) -> None:
        """Damage every block that is on the volume and is not damaged yet. The daemon must not be writing."""
        # Synced, and not read ahead: the daemon reads with O_DIRECT.
        fd = os.open(self._volume, os.O_RDWR | os.O_DSYNC | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            geometry = read_superblock(fd, str(self._volume)).geometry
            for header in read_slab_headers(fd, geometry, range(geometry.slab_count), threads=1):
                assert header is not None
                for slot in range(header.slot_count):
                    self._damage_slot(fd, geometry.slot_offset(header.slab, slot, header.slot_bytes), header.nonce)
        finally:
            os.close(fd)

    def _damage_slot(self, fd: int, offset: int, nonce: bytes) -> None:
        raw = allocate(SECTOR_BYTES)
        read_full(fd, raw, offset, f"slot at {offset}")
        record = np.frombuffer(raw, dtype=SLOT_DTYPE)[0]
        if not is_sound(raw, SLOT_MAGIC) or record["nonce"].tobytes() != nonce or (offset, int(record["generation"])) in self._done:
            return
        payload = allocate(int(record["payload_bytes"]))
        read_full(fd, payload, offset + SECTOR_BYTES, f"payload at {offset}")
        values = np.frombuffer(payload, dtype=np.uint8)
        values[_FIRST_BYTE::_STEP_BYTES] ^= _FLIP
        write_full(fd, payload, offset + SECTOR_BYTES, f"payload at {offset}")
        self._done.add((offset, int(record["generation"])))

"""One volume as a mover sees it: two descriptors passed to it, and where slots lie."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from offloadd.memory.mapping import Bytes
from offloadd.model.enums import Reason
from offloadd.model.slots import Records
from offloadd.mover import slot_io
from offloadd.mover.io_gate import IoGate
from offloadd.tiers.format import slot_bytes_for, slot_count_for, slots_offset
from offloadd.tiers.scratch import NO_SCRATCH, SCRATCH_SLAB, Scratch


@dataclass(frozen=True, slots=True)
class Volume:
    """`data_fd` is open with O_DIRECT, `synced_fd` also with O_DSYNC. `volume_bytes`: the real length of the file or device.

    `scratch`: this device's part of the scratch area.
    """

    data_fd: int
    synced_fd: int
    volume_uuid: bytes
    volume_bytes: int
    slab_bytes: int
    data_offset: int
    gate: IoGate
    scratch: Scratch = NO_SCRATCH

    def read(self, buffers: list[Bytes], offset: int, called_off: Callable[[], Reason]) -> int:
        """Fill all buffers from `offset` in one I/O; the count of bytes read. Raises `ShortIoError`, `CalledOffError` (see `IoGate`), OSError."""
        with self.gate.passing(sum(buffer.nbytes for buffer in buffers), called_off):
            return slot_io.read(self.data_fd, buffers, offset)

    def write(self, buffers: list[Bytes], offset: int, called_off: Callable[[], Reason], *, durable: bool) -> int:
        """Write all buffers at `offset` in one I/O, on the device when it returns if `durable`; the count of bytes written. Raises as `read`."""
        with self.gate.passing(sum(buffer.nbytes for buffer in buffers), called_off):
            return slot_io.write(self.synced_fd if durable else self.data_fd, buffers, offset)

    def slot_offset(self, records: Records, slot_bytes: int) -> int:
        """Byte offset of the first of neighbouring slots.

        Raises ValueError when they leave their slab or the volume, or when a payload does not fill slots of this size: an I/O there would hit a stranger's
        bytes.
        """
        first, last = records[0], records[-1]
        for payload_bytes in set(records["payload_bytes"].tolist()):
            if slot_bytes_for(payload_bytes) != slot_bytes:
                raise ValueError(f"a payload of {payload_bytes} bytes belongs into slots of {slot_bytes_for(payload_bytes)} bytes, not {slot_bytes}")
        if int(first["slab"]) == SCRATCH_SLAB:
            return self.scratch.slot_offset(int(first["slot"]), int(last["slot"]), slot_bytes)
        slot_count = slot_count_for(self.slab_bytes, slot_bytes)
        if int(last["slot"]) >= slot_count:
            raise ValueError(f"slot {int(last['slot'])} of {slot_bytes} bytes is outside its slab, which has {slot_count}")
        offset = self.data_offset + int(first["slab"]) * self.slab_bytes + slots_offset(self.slab_bytes, slot_bytes) + int(first["slot"]) * slot_bytes
        end = offset + len(records) * slot_bytes
        if end > self.volume_bytes:
            raise ValueError(f"slot {int(last['slot'])} of slab {int(last['slab'])} ends at byte {end}; the volume has {self.volume_bytes}")
        return offset

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.data_fd)
        os.close(self.synced_fd)


def adopt_volume(
    data_fd: int, synced_fd: int, *, volume_uuid: bytes, slab_bytes: int, data_offset: int, thread_count: int, scratch: Scratch | None = None
) -> Volume:
    """A volume over descriptors that are ours to close, for a lane of `thread_count` threads."""
    # A seek asks files and block devices alike for their length; every I/O names its own position.
    return Volume(
        data_fd=data_fd,
        synced_fd=synced_fd,
        volume_uuid=volume_uuid,
        volume_bytes=os.lseek(data_fd, 0, os.SEEK_END),
        slab_bytes=slab_bytes,
        data_offset=data_offset,
        gate=IoGate(long_count=max(1, thread_count // 2)),
        scratch=scratch or NO_SCRATCH,
    )

"""The scratch area of a volume, divided: every device that measures has a part of its own, so that an I/O that comes back late hits nobody else's bytes."""

from dataclasses import dataclass

from offloadd.units import MIB

#: Stands for the scratch area where a job names the slab of a slot; no volume has so many slabs.
SCRATCH_SLAB = 0xFFFFFFFF
#: Beginning of a part: what the start-up probe writes. Apart from the slots, since a probe that hangs may write long after it was given up.
PROBE_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Scratch:
    """`size_bytes` from `offset` on: first PROBE_BYTES for the probe, then slots. No bytes: there is none."""

    offset: int = 0
    size_bytes: int = 0

    def part(self, index: int, count: int) -> "Scratch":
        """The part of device `index` of `count`, in whole MiB; without bytes where there is not enough for all."""
        size_bytes = self.size_bytes // count // MIB * MIB
        return Scratch(self.offset + index * size_bytes, size_bytes) if size_bytes else NO_SCRATCH

    @property
    def has_probe(self) -> bool:
        """Whether a probe may write."""
        return self.size_bytes >= PROBE_BYTES

    def slot_count(self, slot_bytes: int) -> int:
        """How many slots of this size there are."""
        return max(0, self.size_bytes - PROBE_BYTES) // slot_bytes

    def slot_offset(self, first: int, last: int, slot_bytes: int) -> int:
        """Byte offset of slot `first` on the volume. Raises ValueError when `last` is outside: an I/O there would hit a stranger's bytes."""
        if last >= self.slot_count(slot_bytes):
            raise ValueError(f"slot {last} of {slot_bytes} bytes is outside the scratch area, which has {self.slot_count(slot_bytes)}")
        return self.offset + PROBE_BYTES + first * slot_bytes


NO_SCRATCH = Scratch()

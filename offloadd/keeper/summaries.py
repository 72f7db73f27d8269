"""Slab summaries while their parts come in."""

import numpy as np

from offloadd.errors import InvalidRequest
from offloadd.keeper.messages import SummaryPart
from offloadd.tiers.format import SUMMARY_DTYPE, Array
from offloadd.tiers.slab_header import SlabHeader

#: Half-received summaries at a time. One of a 1 GiB slab with 8 KiB slots is 8 MiB.
SUMMARIES_MAX = 16


class _Partial:
    def __init__(self, slot_count: int) -> None:
        self.records: Array = np.zeros(slot_count, dtype=SUMMARY_DTYPE)
        self.received = np.zeros(slot_count, dtype=bool)


class SummaryInbox:
    """Parts are not answered, so one that can't be taken is simply missing when the slab is closed."""

    def __init__(self) -> None:
        self._partial: dict[int, _Partial] = {}

    def take(self, part: SummaryPart, header: SlabHeader) -> None:
        """Enter a part of the slab with this header; ignored if it does not fit the slab, or over SUMMARIES_MAX."""
        end = part.first + len(part.records) // SUMMARY_DTYPE.itemsize
        if not header.cut or part.first < 0 or end > header.slot_count or len(part.records) % SUMMARY_DTYPE.itemsize:
            return
        if part.slab not in self._partial:
            if len(self._partial) >= SUMMARIES_MAX:
                return
            self._partial[part.slab] = _Partial(header.slot_count)
        partial = self._partial[part.slab]
        partial.records[part.first : end] = np.frombuffer(part.records, dtype=SUMMARY_DTYPE)
        partial.received[part.first : end] = True

    def forget(self, slab: int) -> None:
        """Drop what has come in for a slab."""
        self._partial.pop(slab, None)

    def complete(self, header: SlabHeader) -> Array:
        """Hand out the slab's summary, one SUMMARY_DTYPE record a slot; `InvalidRequest` if a record is missing. Either way it is forgotten."""
        partial = self._partial.pop(header.slab, None)
        received_count = 0 if partial is None else int(partial.received.sum())
        if partial is None or received_count != header.slot_count:
            raise InvalidRequest(f"the summary of slab {header.slab} came with {received_count} valid records; it has {header.slot_count} slots")
        return partial.records

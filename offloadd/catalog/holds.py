"""Who wants which blocks to stay: keeps and leases of engine instances, each until it is released or expires.

A row with at least one holder is not reclaimed. Time is an argument; expiry runs when the owner calls `expire`.
"""

import heapq
import math
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint32]

#: Holder of the blocks that were kept when the daemon last stopped: until `keep_grace_s` after READY or until an instance claims them.
RECOVERED = 0
#: Rows that one call of `expire` looks at, give or take a batch: 2 ms. All recovered holds expire at one moment.
EXPIRY_ROWS = 8192
#: Rows in stale batches beyond twice the live holds before the expiries are rebuilt: 0.3 MB, and rare enough not to matter.
STALE_ROWS_MAX = 1 << 16


class Holds:
    """Holders by row. `counts` is a uint16 column by row, owned by the catalog: its number of holders."""

    def __init__(self, counts: npt.NDArray[np.uint16]) -> None:
        self._counts = counts
        self._by_holder: dict[int, dict[int, float]] = {}
        #: (expiry, holder, rows): a batch may be stale; the holder's own entry decides.
        self._expiries: list[tuple[float, int, int, Rows]] = []
        self._batch = 0
        self._expiry_rows = 0

    def hold(self, holder: int, rows: Rows, expires_s: float) -> None:
        """`holder` wants these rows until `expires_s`; a later expiry extends an earlier hold."""
        held = self._by_holder.setdefault(holder, {})
        for row in rows.tolist():
            known = held.get(row)
            if known is None:
                self._counts[row] += 1
                held[row] = expires_s
            elif known < expires_s:
                held[row] = expires_s
        self._push(holder, rows, expires_s)
        # A client that renews its leases all day must not make this grow: stale batches are dropped before they outnumber the live holds.
        if self._expiry_rows > 2 * self.held_count + STALE_ROWS_MAX:
            self._compact()

    def _push(self, holder: int, rows: Rows, expires_s: float) -> None:
        self._batch += 1
        self._expiry_rows += rows.shape[0]
        heapq.heappush(self._expiries, (expires_s, self._batch, holder, rows))

    def _compact(self) -> None:
        """Rebuild the expiries from the live holds, in batches of one second: a batch is looked at when its last hold ends."""
        self._expiries.clear()
        self._expiry_rows = 0
        for holder, held in self._by_holder.items():
            rows = np.fromiter(held.keys(), dtype=np.uint32, count=len(held))
            ends = np.fromiter(held.values(), dtype=np.float64, count=len(held))
            seconds = np.ceil(ends)
            for second in np.unique(seconds):
                mine = seconds == second
                self._push(holder, rows[mine], float(ends[mine].max()))

    def release(self, holder: int, rows: Rows) -> int:
        """End the holder's holds on these rows; returns how many there were."""
        held = self._by_holder.get(holder)
        if not held:
            return 0
        ended = [row for row in rows.tolist() if held.pop(row, None) is not None]
        self._counts[ended] -= 1
        return len(ended)

    def release_all(self, holder: int, count_max: int = EXPIRY_ROWS) -> int:
        """End up to `count_max` of the holder's holds; returns how many. Call until it returns 0: a million at once would stop the loop for 30 ms."""
        held = self._by_holder.get(holder, {})
        rows = [held.popitem()[0] for _ in range(min(count_max, len(held)))]
        self._counts[rows] -= 1
        if not held:
            self._by_holder.pop(holder, None)
        return len(rows)

    def claim(self, holder: int, rows: Rows, expires_s: float) -> None:
        """Recovered holds on these rows pass over to `holder`."""
        recovered = self._by_holder.get(RECOVERED)
        if recovered:
            claimed = np.array([row for row in rows.tolist() if row in recovered], dtype=np.uint32)
            if claimed.shape[0]:
                self.hold(holder, claimed, expires_s)
                self.release(RECOVERED, claimed)

    def forget(self, rows: Rows) -> None:
        """These rows are no more; their numbers may be used for other blocks."""
        held_rows = rows[self._counts[rows] > 0]
        if held_rows.shape[0] == 0:
            return
        gone = set(held_rows.tolist())
        for held in self._by_holder.values():
            for row in held.keys() & gone:
                del held[row]
        self._counts[held_rows] = 0

    def expire(self, now_s: float) -> int:
        """End the holds whose time is over; returns how many. After `EXPIRY_ROWS` the rest waits for the next call: see `due`."""
        ended = 0
        looked_at = 0
        while self.due(now_s) and looked_at < EXPIRY_ROWS:
            _, _, holder, rows = heapq.heappop(self._expiries)
            self._expiry_rows -= rows.shape[0]
            held = self._by_holder.get(holder, {})
            # A batch may name a row twice, and it may have been released and held again meanwhile: the holder's entry decides, once.
            over = [row for row in dict.fromkeys(rows.tolist()) if held.get(row, math.inf) <= now_s]
            for row in over:
                del held[row]
            self._counts[over] -= 1
            ended += len(over)
            looked_at += rows.shape[0]
        return ended

    def due(self, now_s: float) -> bool:
        """Whether `expire` has anything to look at."""
        return bool(self._expiries) and self._expiries[0][0] <= now_s

    @property
    def held_count(self) -> int:
        """Holds in all, counted once per holder and row."""
        return sum(len(held) for held in self._by_holder.values())

    def check(self) -> None:
        """Assert that the counts equal the holders."""
        expected: dict[int, int] = {}
        for held in self._by_holder.values():
            for row in held:
                expected[row] = expected.get(row, 0) + 1
        live: Any = np.flatnonzero(self._counts)
        assert {int(row): int(self._counts[row]) for row in live} == expected

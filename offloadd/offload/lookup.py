"""Lookup and release: which blocks could be restored, what that would cost, and whose holds keep them."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd import clock
from offloadd.model.enums import Path, Tier
from offloadd.offload.core import Core
from offloadd.offload.sessions import Session

#: What a restore costs beside its bytes: a call, a hop and a first I/O (measured 1 to 2 ms on a small machine).
RESTORE_LATENCY_S = 0.002


@dataclass(slots=True)
class LookupAnswer:
    """`tiers`: one Tier number per block, 0 where not all shards hold it. `estimated_s` is None while no restore was measured."""

    held_count: int
    tiers: npt.NDArray[np.uint8]
    estimated_s: float | None
    worth_restoring: bool = True


class Lookups:
    """Answers lookups. Event-loop owned."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def lookup(
        self,
        session: Session,
        keys_by_shard: list[npt.NDArray[Any]],
        *,
        prefix: bool,
        lease_until_s: float | None,
        prefill_tokens_per_s: float,
        tokens_per_block: int,
    ) -> LookupAnswer:
        """The blocks that all shards hold (`keys_by_shard`: equal-length key arrays)."""
        core = self._core
        catalog = core.catalog
        started_ns = clock.monotonic_ns()
        count = keys_by_shard[0].shape[0]
        rows = [self._readable(catalog.lookup(keys)) for keys in keys_by_shard]
        tiers = np.full(count, 255, dtype=np.uint8)
        held = np.ones(count, dtype=np.bool_)
        tiers_by_shard = [catalog.tiers_of(shard_rows) for shard_rows in rows]
        for shard_rows, shard_tiers in zip(rows, tiers_by_shard, strict=True):
            held &= shard_rows > 0
            # The slower of the shards' tiers: ARENA is less than VOLUME.
            tiers = np.where(tiers == 255, shard_tiers, np.maximum(tiers, shard_tiers)).astype(np.uint8)
        if prefix:
            length = count if held.all() else int(np.argmin(held))
            held[length:] = False
        tiers = np.where(held, tiers, 0).astype(np.uint8)
        for shard_rows in rows:
            live = shard_rows[held]
            catalog.touch(live)
            if lease_until_s is not None:
                catalog.holds.hold(session.instance.ordinal, live, lease_until_s)
                catalog.holds.claim(session.instance.ordinal, live, lease_until_s)
        held_count = int(held.sum())
        estimated_s = self._estimate(rows, tiers_by_shard, held)
        worth = True
        if estimated_s is not None and prefill_tokens_per_s > 0 and tokens_per_block > 0 and held_count:
            worth = estimated_s < held_count * tokens_per_block / prefill_tokens_per_s
        core.activity.looked_up_count += count
        core.activity.held_count += held_count
        core.observer.lookup_done(count, held_count, (clock.monotonic_ns() - started_ns) / 1e9)
        return LookupAnswer(held_count=held_count, tiers=tiers, estimated_s=estimated_s, worth_restoring=worth)

    def _readable(self, rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Row 0 for blocks that a restore would fail for: their volume does not answer."""
        if not self._core.unreadable:
            return rows
        return np.where(self._core.catalog.only_on(rows, self._core.unreadable), 0, rows).astype(np.uint32)

    def _estimate(self, rows: list[npt.NDArray[np.uint32]], tiers_by_shard: list[npt.NDArray[np.uint8]], held: npt.NDArray[np.bool_]) -> float | None:
        core = self._core
        payload_bytes = {Tier.ARENA: 0, Tier.VOLUME: 0}
        for shard_rows, shard_tiers in zip(rows, tiers_by_shard, strict=True):
            sizes = np.where(held, core.catalog.payloads_of(shard_rows), 0)
            for tier in payload_bytes:
                payload_bytes[tier] += int(sizes[shard_tiers == tier].sum())
        seconds = RESTORE_LATENCY_S
        for tier, path in ((Tier.ARENA, Path.DDR), (Tier.VOLUME, Path.HOST)):
            if payload_bytes[tier]:
                rate = core.bandwidths.rate("restore", tier, path)
                if rate == 0:
                    return None
                seconds += payload_bytes[tier] / rate
        return seconds

    def release(self, session: Session, keys_by_shard: list[npt.NDArray[Any]]) -> int:
        """End the instance's holds on these keys; returns how many."""
        catalog = self._core.catalog
        released = 0
        for keys in keys_by_shard:
            rows = catalog.lookup(keys)
            live = rows[rows > 0]
            # A kept block found after a restart belongs to whoever knows its key: releasing it is claiming it first.
            catalog.holds.claim(session.instance.ordinal, live, clock.monotonic_s())
            released += catalog.holds.release(session.instance.ordinal, live)
        return released

    async def release_all(self, holder: int) -> int:
        """End all that an engine instance (by its ordinal) holds; returns how many holds there were."""
        released = 0
        while count := self._core.catalog.holds.release_all(holder):
            released += count
            await asyncio.sleep(0)
        return released

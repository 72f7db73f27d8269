"""Copies between arena and volumes that nobody waits for: spill (arena → volume) and prefetch (volume → arena)."""

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd import clock
from offloadd.catalog.pool import Shortage
from offloadd.model.enums import Tier
from offloadd.model.slots import FLAG_KEEP
from offloadd.mover.messages import Operation
from offloadd.offload.core import SLAB_FAILURES_MAX, Core, new_blocks
from offloadd.offload.moves import Move
from offloadd.scheduler.job_class import JobClass
from offloadd.tiers.format import slot_bytes_for
from offloadd.units import SECTOR_BYTES, align_up

Rows = npt.NDArray[np.uint32]

#: How long a spill waits for a slab before the block stays in the arena only. Nobody waits for it, but its arena slot is pinned meanwhile.
SPILL_WAIT_S = 30.0
#: Blocks in one spill or prefetch move: bounds what one failure costs and how long arena slots stay pinned.
BATCH_BLOCKS = 512


class Spiller:
    """Carries out spills and prefetches. Event-loop owned. A row that waits is pinned, so it can't be reclaimed before it is written."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._turn = 0

    # -- spill -----------------------------------------------------------------------------------------------------------------------

    def spill(self, rows: Rows) -> "asyncio.Task[int] | None":
        """Copy arena blocks without a copy on a volume to the volumes, in the background. The task's result: blocks spilled."""
        core = self._core
        rows = rows[core.catalog.stored_as(rows, tier=Tier.ARENA, durable=False) & ~core.catalog.stored_as(rows, tier=Tier.VOLUME, durable=False)]
        if rows.shape[0] == 0 or not core.serving_volumes():
            return None
        core.catalog.pin(rows)
        task: asyncio.Task[int] = core.spawn(self._spill(rows))
        return task

    async def _spill(self, rows: Rows) -> int:
        core = self._core
        spilled = 0
        waiting = rows
        try:
            deadline_s = clock.monotonic_s() + SPILL_WAIT_S
            payloads = core.catalog.payloads_of(rows)
            for payload_bytes in np.unique(payloads):
                same = rows[payloads == payload_bytes]
                for first in range(0, same.shape[0], BATCH_BLOCKS):
                    batch = same[first : first + BATCH_BLOCKS]
                    spilled += await self._spill_batch(batch, int(payload_bytes), deadline_s)
                    core.catalog.unpin(batch)
                    waiting = waiting[~np.isin(waiting, batch)]
        finally:
            core.catalog.unpin(waiting)
        core.counters["spilled_blocks"] += spilled
        if spilled < rows.shape[0]:
            core.counters["spill_blocks_failed"] += rows.shape[0] - spilled
        return spilled

    async def _spill_batch(self, rows: Rows, payload_bytes: int, deadline_s: float) -> int:
        core = self._core
        slot_bytes = slot_bytes_for(payload_bytes)
        spilled = 0
        failures = {volume.ordinal: volume.slab_failures for volume in core.serving_volumes()}
        spent: set[int] = set()
        while rows.shape[0]:
            serving = [volume for volume in core.serving_volumes() if volume.slab_failures - failures.get(volume.ordinal, 0) < SLAB_FAILURES_MAX]
            volumes = [volume for volume in serving if volume.ordinal not in spent]
            if not volumes:
                if serving:
                    core.counters["spill_blocks_over_write_budget"] += rows.shape[0]
                return spilled
            volume = volumes[self._turn % len(volumes)]
            self._turn += 1
            changed = volume.slabs_changed
            known = self._known_namespaces(rows, volume.ordinal)
            if not known.all():
                rows = rows[known]
                continue
            reservation = core.reserve_volume(volume.ordinal, slot_bytes, rows.shape[0])
            volume.grant_wishes()
            if reservation.shortage == Shortage.BUDGET:
                spent.add(volume.ordinal)
            if len(reservation):
                count = len(reservation)
                spilled += await self._write(volume.ordinal, rows[:count], reservation, payload_bytes)
                rows = rows[count:]
            elif reservation.shortage == Shortage.BUDGET:
                continue
            elif reservation.shortage == Shortage.OPENING and clock.monotonic_s() < deadline_s:
                try:
                    async with asyncio.timeout(max(0.0, deadline_s - clock.monotonic_s())):
                        await changed.wait()
                except TimeoutError:
                    return spilled
            else:
                return spilled
        return spilled

    def _known_namespaces(self, rows: Rows, volume: int) -> npt.NDArray[np.bool_]:
        numbers, inverse = np.unique(self._core.catalog.namespaces_of(rows), return_inverse=True)
        known = [volume in self._core.namespaces.by_number(int(number)).on_volumes for number in numbers]
        return np.array(known, dtype=np.bool_)[inverse]

    async def _write(self, volume: int, rows: Rows, reservation: Any, payload_bytes: int) -> int:
        core = self._core
        sources = core.catalog.arena_sources(rows)
        keys, _, numbers, kept = core.catalog.describe(rows)
        blocks = new_blocks(rows.shape[0])
        blocks["key"] = keys
        blocks["payload_bytes"] = payload_bytes
        blocks["position"] = np.arange(rows.shape[0], dtype=np.uint32)
        blocks["arena_offset"] = core.arena_offsets(sources.slab, sources.slot, align_up(payload_bytes, SECTOR_BYTES))
        blocks["checksum"] = sources.checksum
        blocks["flags"] = kept & FLAG_KEEP
        core.volume_blocks(blocks, core.volume(volume), reservation.slabs, reservation.slots)
        blocks["generation"] = reservation.generations
        blocks["sequence"] = core.sequences(rows.shape[0])
        for number in np.unique(numbers):
            ordinal, epoch = core.namespaces.by_number(int(number)).on_volumes[volume]
            blocks["namespace_ordinal"][numbers == number] = ordinal
            blocks["namespace_epoch"][numbers == number] = epoch
        move = core.new_move(rows.shape[0])
        self._send(volume, move, Operation.SPILL, blocks, slot_bytes_for(payload_bytes))
        await move.finished.wait()
        good = move.reasons == 0
        core.catalog.free_reserved(volume, reservation.slabs[~good], reservation.slots[~good])
        spilled = 0
        for number in np.unique(numbers):
            mine = good & (numbers == number)
            published, _ = core.catalog.publish_volume(
                volume,
                keys[mine],
                reservation.slabs[mine],
                reservation.slots[mine],
                payload_bytes=payload_bytes,
                namespace=int(number),
                keep=False,
                durable=False,
            )
            spilled += int((published > 0).sum())
        core.volume(volume).grant_wishes()
        return spilled

    def _send(self, volume: int, move: Move, operation: Operation, blocks: Any, slot_bytes: int, deadline_s: float = 0.0) -> None:
        """Between the tiers: the host's mover does it, whatever device the blocks came from."""
        lane = self._core.host.volume_lane(volume)
        assert lane is not None
        job_class = JobClass.SPILL if operation == Operation.SPILL else JobClass.PREFETCH
        self._core.send_jobs(self._core.host, lane, move, operation, blocks, slot_bytes=slot_bytes, job_class=job_class, deadline_s=deadline_s)

    # -- prefetch --------------------------------------------------------------------------------------------------------------------

    def prefetch(self, rows: Rows, deadline_s: float) -> tuple[int, int, int]:
        """Queue copies into the arena. Returns how many are queued, are there already, and can't be had (not on a volume, or no room in the arena).

        None of them begins after the deadline.
        """
        core = self._core
        live = rows[rows > 0]
        present = core.catalog.stored_as(live, tier=Tier.ARENA, durable=False)
        rest = live[~present]
        queued = 0
        if core.host.arena_lane is not None:
            core.catalog.pin(rest)
            payloads = core.catalog.payloads_of(rest)
            for payload_bytes in np.unique(payloads):
                same = rest[payloads == payload_bytes]
                reservation = core.catalog.reserve_arena(align_up(int(payload_bytes), SECTOR_BYTES), same.shape[0])
                count = len(reservation)
                if count:
                    core.spawn(self._read(same[:count], reservation, int(payload_bytes), deadline_s))
                core.catalog.unpin(same[count:])
                queued += count
        return queued, int(present.sum()), rows.shape[0] - queued - int(present.sum())

    async def _read(self, rows: Rows, reservation: Any, payload_bytes: int, deadline_s: float) -> None:
        core = self._core
        sources = core.catalog.volume_sources(rows)
        keys, _, numbers, _ = core.catalog.describe(rows)
        blocks = new_blocks(rows.shape[0])
        blocks["key"] = keys
        blocks["payload_bytes"] = payload_bytes
        blocks["position"] = np.arange(rows.shape[0], dtype=np.uint32)
        blocks["arena_offset"] = core.arena_offsets(reservation.slabs, reservation.slots, align_up(payload_bytes, SECTOR_BYTES))
        move = core.new_move(rows.shape[0])
        for volume in np.unique(sources.volume).tolist():
            for number in np.unique(numbers).tolist():
                mine = (sources.volume == volume) & (numbers == number)
                records = blocks[mine]
                core.fill_sources(records, volume, sources.slab[mine], sources.slot[mine], number)
                self._send(volume, move, Operation.PREFETCH, records, slot_bytes_for(payload_bytes), deadline_s)
        await core.stopping.over(move, deadline_s)
        good = move.reasons == 0
        core.catalog.free_reserved(-1, reservation.slabs[~good], reservation.slots[~good])
        for number in np.unique(numbers):
            mine = good & (numbers == number)
            core.catalog.publish_arena(
                keys[mine],
                reservation.slabs[mine],
                reservation.slots[mine],
                move.checksums[mine],
                payload_bytes=payload_bytes,
                namespace=int(number),
                keep=False,
            )
        core.catalog.unpin(rows)
        core.counters["prefetched_blocks"] += int(good.sum())

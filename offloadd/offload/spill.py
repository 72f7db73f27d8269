"""Copies between arena and volumes that nobody waits for: spill (arena → volume) and prefetch (volume → arena)."""

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.catalog.catalog import Keys
from offloadd.catalog.pool import Reservation, Shortage
from offloadd.model.enums import Reason, Tier
from offloadd.model.slots import FLAG_KEEP
from offloadd.mover.messages import Operation
from offloadd.offload.core import SLAB_FAILURES_MAX, Core, groups, new_blocks
from offloadd.offload.moves import PENDING, Move
from offloadd.offload.volume_link import VolumeLink
from offloadd.scheduler.job_class import JobClass
from offloadd.tiers.format import slot_bytes_for
from offloadd.units import SECTOR_BYTES, align_up

Rows = npt.NDArray[np.uint32]

#: How long a spill waits for a slab before the block stays in the arena only. Nobody waits for it, but its arena slot is pinned meanwhile.
SPILL_WAIT_S = 30.0
#: Blocks in one spill or prefetch move: bounds what one failure costs and how long arena slots stay pinned.
BATCH_BLOCKS = 512
#: Of the arena, the part that may be on its way to one volume: so much a volume that hangs can keep from everybody else. The rest waits for volumes that move.
VOLUME_SHARE = 8

#: What another volume may do better.
_ELSEWHERE = (int(Reason.VOLUME_DOWN), int(Reason.IO_ERROR), int(Reason.SHORT_IO), PENDING)


class Spiller:
    """Carries out spills and prefetches. Event-loop owned.

    A row that waits is pinned, so it can't be reclaimed before it is written. A row that is being written is pinned once more, by its write, until that is
    over: a write to a volume that hangs may come to the row's arena slot much later. The same holds for the slots that a prefetch reserves. So a spill that is
    given up, or carried to another volume, leaves behind what was sent, and nothing else.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._turn = 0
        #: Bytes of the arena on their way to each volume.
        self._under_way: Counter[int] = Counter()
        #: Set and replaced whenever some of them have arrived, or were given up.
        self._arrived = asyncio.Event()

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
        batches = []
        payloads = core.catalog.payloads_of(rows)
        for payload_bytes in np.unique(payloads).tolist():
            same = rows[payloads == payload_bytes]
            count = max(1, min(BATCH_BLOCKS, self._share_bytes // align_up(payload_bytes, SECTOR_BYTES)))
            batches += [self._spill_batch(same[first : first + count], payload_bytes) for first in range(0, same.shape[0], count)]
        # Side by side: one that waits for a volume that hangs must not keep the others waiting, and pinned.
        spilled = sum(await asyncio.gather(*batches))
        core.counters["spilled_blocks"] += spilled
        return spilled

    @property
    def _share_bytes(self) -> int:
        arena = self._core.catalog.arena
        return len(arena.slabs) * self._core.arena_slab_bytes // VOLUME_SHARE if arena is not None else 0

    async def _spill_batch(self, rows: Rows, payload_bytes: int) -> int:
        core = self._core
        spilled, rest = 0, rows
        try:
            slab_failures = {volume.ordinal: volume.slab_failures for volume in core.volumes}
            failed: dict[int, Reason] = {}
            reason = Reason.NONE
            while rest.shape[0] and reason == Reason.NONE:
                volume, reason = await self._next_volume(rest, payload_bytes, failed, slab_failures)
                if volume is None:
                    break
                here = rest[self._known_namespaces(rest, volume.ordinal)]
                changed = volume.slabs_changed
                reservation = core.reserve_volume(volume.ordinal, slot_bytes_for(payload_bytes), here.shape[0])
                volume.grant_wishes()
                if len(reservation) == 0:
                    if reservation.shortage == Shortage.BUDGET:
                        failed[volume.ordinal] = Reason.WRITE_BUDGET
                    elif reservation.shortage != Shortage.OPENING:
                        failed[volume.ordinal] = Reason.TOO_LARGE if reservation.shortage == Shortage.TOO_LARGE else Reason.TIER_FULL
                    elif not await _first_of([changed], SPILL_WAIT_S):
                        failed[volume.ordinal] = Reason.DEADLINE
                    continue
                here = here[: len(reservation)]
                results = await self._write(volume, here, reservation, payload_bytes)
                spilled += int((results == 0).sum())
                elsewhere = np.isin(results, _ELSEWHERE)
                self._gave_up(results[(results != 0) & ~elsewhere])
                if elsewhere.any():
                    failed[volume.ordinal] = Reason.IO_ERROR if volume.health.writes.admits else Reason.VOLUME_DOWN
                rest = rest[~np.isin(rest, here[~elsewhere])]
            self._gave_up(np.full(rest.shape[0], int(reason), dtype=np.uint32))
        finally:
            core.catalog.unpin(rows)
        return spilled

    def _gave_up(self, reasons: npt.NDArray[np.uint32]) -> None:
        """Blocks that stay in the arena only, and may be reclaimed there."""
        for reason, mine in groups(reasons):
            count = reasons[mine].shape[0]
            self._core.counters["spill_blocks_failed"] += count
            self._core.counters[f"spill_blocks_failed_{Reason(reason).name.lower()}"] += count

    async def _next_volume(self, rows: Rows, payload_bytes: int, failed: dict[int, Reason], slab_failures: dict[int, int]) -> tuple[VolumeLink | None, Reason]:
        """A volume that takes some of the blocks and has room for more on their way, waited for; or why there is none."""
        core = self._core
        more = rows.shape[0] * align_up(payload_bytes, SECTOR_BYTES)
        while True:
            volumes = [
                volume
                for volume in core.serving_volumes()
                if volume.ordinal not in failed and volume.slab_failures - slab_failures.get(volume.ordinal, 0) < SLAB_FAILURES_MAX
            ]
            volumes = [volume for volume in volumes if self._known_namespaces(rows, volume.ordinal).any()]
            if not volumes:
                down = any(volume.serving and not volume.health.writes.admits for volume in core.volumes)
                # The last thing that went wrong is as true as the first.
                why = next(reversed(failed.values()), Reason.IO_ERROR if core.serving_volumes() else Reason.NO_TIER)
                return None, Reason.VOLUME_DOWN if down else why
            arrived = self._arrived
            ready = [one for one in volumes if not self._under_way[one.ordinal] or self._under_way[one.ordinal] + more <= self._share_bytes]
            if ready:
                self._turn += 1
                return ready[self._turn % len(ready)], Reason.NONE
            # Without a limit: what is under way arrives, or its volume is turned off.
            await _first_of([arrived, *(volume.slabs_changed for volume in volumes)], None)

    def _known_namespaces(self, rows: Rows, volume: int) -> npt.NDArray[np.bool_]:
        numbers, inverse = np.unique(self._core.catalog.namespaces_of(rows), return_inverse=True)
        known = [volume in self._core.namespaces.by_number(int(number)).on_volumes for number in numbers]
        return np.array(known, dtype=np.bool_)[inverse]

    async def _write(self, link: VolumeLink, rows: Rows, reservation: Reservation, payload_bytes: int) -> npt.NDArray[np.uint32]:
        """Write and wait, but for a volume that is turned off no longer. Returns by block: 0 written, PENDING, else a `Reason`."""
        core, volume = self._core, link.ordinal
        sources = core.catalog.arena_sources(rows)
        keys, _, numbers, kept = core.catalog.describe(rows)
        blocks = new_blocks(rows.shape[0])
        blocks["key"] = keys
        blocks["payload_bytes"] = payload_bytes
        blocks["position"] = np.arange(rows.shape[0], dtype=np.uint32)
        blocks["arena_offset"] = core.arena_offsets(sources.slab, sources.slot, align_up(payload_bytes, SECTOR_BYTES))
        blocks["checksum"] = sources.checksum
        blocks["flags"] = kept & FLAG_KEEP
        core.volume_blocks(blocks, link, reservation.slabs, reservation.slots)
        blocks["generation"] = reservation.generations
        blocks["sequence"] = core.sequences(rows.shape[0])
        for number in np.unique(numbers):
            ordinal, epoch = core.namespaces.by_number(int(number)).on_volumes[volume]
            blocks["namespace_ordinal"][numbers == number] = ordinal
            blocks["namespace_epoch"][numbers == number] = epoch
        move = core.new_move(rows.shape[0])
        move_bytes = rows.shape[0] * align_up(payload_bytes, SECTOR_BYTES)
        self._under_way[volume] += move_bytes
        core.catalog.pin(rows)

        def over() -> None:
            self._written(move, link, reservation, keys, numbers, payload_bytes)
            core.catalog.unpin(rows)
            self._under_way[volume] -= move_bytes
            arrived, self._arrived = self._arrived, asyncio.Event()
            arrived.set()

        core.at_end(move, "spill", JobClass.SPILL, over)
        self._send(volume, move, Operation.SPILL, blocks, slot_bytes_for(payload_bytes))
        while not move.done and link.health.writes.admits:
            await _first_of([move.finished, link.slabs_changed], None)
        return move.reasons.copy()

    def _written(self, move: Move, link: VolumeLink, reservation: Reservation, keys: Keys, numbers: npt.NDArray[np.uint16], payload_bytes: int) -> None:
        """Publish what was written, and free the slots of the rest."""
        core, volume = self._core, link.ordinal
        good = move.reasons == 0
        core.catalog.free_reserved(volume, reservation.slabs[~good], reservation.slots[~good])
        for number in np.unique(numbers):
            mine = np.flatnonzero(good & (numbers == number))
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
            # Dropped meanwhile.
            move.reasons[mine[published == 0]] = int(Reason.TIER_FULL)
        link.grant_wishes()

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
        core.at_end(move, "prefetch", JobClass.PREFETCH, lambda: None)
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


async def _first_of(events: list[asyncio.Event], timeout_s: float | None) -> bool:
    """Wait until one event is set; False if none was in time."""
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for waiter in waiters:
            waiter.cancel()

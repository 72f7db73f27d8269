"""Evict: engine memory → tier, because the engine asked.

    which blocks are stored already → reserve slots (arena, volumes) → one move over all lanes → answer at the level asked for → publish what succeeded

The answer to ack COPIED does not wait for the write; a task of its own publishes or frees every reserved slot when the move is over, whatever became of the
request meanwhile.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd import clock
from offloadd.catalog.pool import Reservation, Shortage
from offloadd.model.enums import AckLevel, EvictStatus, Path, Priority, Reason, Tier, Way
from offloadd.model.requests import BlockBatch, EvictOptions
from offloadd.model.slots import FLAG_KEEP
from offloadd.mover.messages import Operation
from offloadd.offload.answers import Answer
from offloadd.offload.bandwidth import Direction
from offloadd.offload.core import SLAB_FAILURES_MAX, Core, new_blocks
from offloadd.offload.deadlines import refuse_expired
from offloadd.offload.lanes import Lane
from offloadd.offload.moves import PENDING, Move, PathUse
from offloadd.offload.regions import Region
from offloadd.offload.sessions import Session
from offloadd.offload.spill import Spiller
from offloadd.offload.stopping import Active
from offloadd.offload.volume_link import VolumeLink
from offloadd.scheduler.job_class import JobClass
from offloadd.units import SECTOR_BYTES, align_up

Indices = npt.NDArray[np.uint32]

#: Blocks of one reservation: between two of them the event loop has its turn.
RESERVE_BLOCKS = 512
#: Payload bytes that stay together on one volume when a request is spread over several: one large I/O, and small enough that 16 blocks use four volumes.
STRIPE_BYTES = 8 << 20

_SHORTAGE_REASONS = {
    Shortage.FULL: Reason.TIER_FULL,
    Shortage.TOO_LARGE: Reason.TOO_LARGE,
    Shortage.OPENING: Reason.DEADLINE,
    Shortage.BUDGET: Reason.WRITE_BUDGET,
    Shortage.NONE: Reason.NO_TIER,
}


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks of one batch with slots reserved in one tier. `volume` -1: the arena. `positions` in the request; `first` is the move's number of the first."""

    batch: BlockBatch
    region: Region
    chosen: Indices
    volume: int
    slabs: Indices
    slots: Indices
    generations: Indices
    first: int

    @property
    def positions(self) -> Indices:
        return self.batch.positions[self.chosen]

    @property
    def keys(self) -> npt.NDArray[Any]:
        return self.batch.keys[self.chosen]

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.chosen.shape[0])


@dataclass(slots=True)
class _Sent:
    """The parts of one evict on their way. `over` is set when the move is, or stands still. `lanes`: where the parts went, by volume and region; AUTO may
    choose another way by the time of the answer. `settled`: parts that were published, or whose slots are free again.

    `failed`, by the move's numbers: blocks that were answered FAILED or QUARANTINED before their results. Whatever these are, they do not become visible.
    """

    session: Session
    move: Move
    parts: list[_Part]
    options: EvictOptions
    over: asyncio.Event
    lanes: dict[tuple[int, int], Lane]
    settled: set[int]
    failed: npt.NDArray[np.bool_]


def _job_class(options: EvictOptions) -> JobClass:
    """Who waits for COPIED has an engine that stands still; DURABLE is asked for by whoever has time, unless the request says otherwise."""
    background = options.priority == Priority.BACKGROUND or (options.priority == Priority.DEFAULT and options.ack == AckLevel.DURABLE)
    return JobClass.BACKGROUND if background else JobClass.PREEMPT


class Evictor:
    """Carries out evicts. Event-loop owned."""

    def __init__(self, core: Core, spiller: Spiller) -> None:
        self._core = core
        self._spiller = spiller
        #: Rotates where a request begins on the volumes.
        self._turn = 0

    async def evict(self, session: Session, batches: list[BlockBatch], options: EvictOptions) -> Answer:
        """Evict blocks; one outcome per block. Raises errors of offloadd.errors when nothing could be tried."""
        core = self._core
        started_ns = clock.monotonic_ns()
        refuse_expired(options.deadline_s)
        tier, direct = self._way(options, batches)
        number, active = core.begin(session, batches, options.request_id, options.deadline_s)
        try:
            answer = Answer.of(sum(batch.indices.shape[0] for batch in batches))
            parts: list[_Part] = []
            try:
                for batch in batches:
                    await self._place(session, batch, options, tier, direct, active, answer, parts)
            except BaseException:
                self._give_back(parts)
                raise
            if active.stop_reason != Reason.NONE:
                # While it waited for slots: no copy begins.
                self._give_back(parts)
                for part in parts:
                    self._reject(answer, part.positions, active.stop_reason)
                parts = []
            move = core.new_move(sum(part.chosen.shape[0] for part in parts))
            sent = self._send(session, move, parts, options)
            move.on_stuck = lambda: self._settle_done(sent)
            core.at_end(move, lambda: self._finish(sent))
            durable = options.ack == AckLevel.DURABLE
            active.enough = lambda: move.done if durable else move.copied
            stopped = await core.stopping.wait_for(move, active, active.enough)
            self._tell(move, parts, answer, stopped, sent)
            if any(use.path == Path.AUTO for use in answer.uses):
                self._tell_later(move, answer)
        except asyncio.CancelledError:
            if active.move is not None and active.stop_reason == Reason.NONE:
                core.stopping.leave(active.move)
            raise
        finally:
            core.end(number)
        answer.clock.add(move.clock)
        answer.clock.total_ns = clock.monotonic_ns() - started_ns
        core.observer.request_done("evict", answer)
        core.bandwidths.answered("evict", answer.uses, answer.clock.total_ns / 1e9)
        return answer

    def _way(self, options: EvictOptions, batches: list[BlockBatch]) -> tuple[Tier, bool]:
        """The tier to store in and whether to go straight to a volume. Raises `PathUnavailable` for a required path that can't be."""
        durable = options.ack == AckLevel.DURABLE
        to_volume = False
        for region in self._core.regions.of_batches(batches):
            device = region.device
            device.refuse_event(options.source_ready, "source_ready")
            if durable and options.tier == Tier.ARENA:
                allowed: tuple[Path, ...] = ()
                what = "a durable evict to the arena"
            elif options.tier == Tier.ARENA:
                allowed, what = (Path.DDR,), "an evict to the arena"
            elif durable:
                allowed, what = device.volume_paths, "a durable evict"
            else:
                allowed, what = (Path.DDR, *device.volume_paths), "an evict"
            path = device.refuse_path(options.path, require=options.require_path, allowed=allowed, what=what, slot_bytes=region.slot_bytes)
            to_volume |= path in device.volume_paths or device.arena_lane is None
        # Straight to a volume: durable ones need it, the arena would only add a copy; and whoever compares paths asks for theirs.
        return options.tier, durable or to_volume

    # -- placing ---------------------------------------------------------------------------------------------------------------------

    async def _place(
        self, session: Session, batch: BlockBatch, options: EvictOptions, tier: Tier, direct: bool, active: Active, answer: Answer, parts: list[_Part]
    ) -> None:
        core = self._core
        durable = options.ack == AckLevel.DURABLE
        if durable and tier == Tier.ARENA:
            answer.set(batch.positions, EvictStatus.REJECTED, Reason.NO_TIER)
            return
        rows = core.catalog.lookup(batch.keys)
        present = core.catalog.stored_as(rows, tier=tier, durable=durable)
        if core.unreadable and tier == Tier.ANY and not durable:
            # It is there, and can't be had back while it is wanted: the arena takes another copy.
            present &= ~core.catalog.only_on(rows, core.unreadable)
        if present.any():
            answer.set(batch.positions[present], EvictStatus.DUPLICATE, 0, core.catalog.tiers_of(rows[present]))
            core.catalog.touch(rows[present])
            if options.keep_until_s is not None:
                core.catalog.holds.hold(session.instance.ordinal, rows[present], options.keep_until_s)
                core.catalog.holds.claim(session.instance.ordinal, rows[present], options.keep_until_s)
        missing = np.flatnonzero(~present).astype(np.uint32)
        region = core.regions.by_number(batch.region)
        reason = Reason.NO_TIER
        if missing.shape[0] and not direct:
            missing, reason = await self._take_arena(batch, region, missing, parts)
        # A required path is the only one: an evict that must go by ddr does not overflow to a volume, one that must go by host not into the arena.
        required = options.path if options.require_path else Path.AUTO
        if missing.shape[0] and tier != Tier.ARENA and required != Path.DDR:
            missing, of_volumes = await self._take_volumes(batch, region, missing, options, active, parts)
            # Without a volume the arena's reason is the one to tell.
            reason = of_volumes if of_volumes != Reason.NO_TIER else reason
        if missing.shape[0] and tier == Tier.ANY and direct and not durable and region.device.arena_lane is not None and required == Path.AUTO:
            missing, reason = await self._take_arena(batch, region, missing, parts)
        if missing.shape[0]:
            self._reject(answer, batch.positions[missing], active.stop_reason or reason)

    def _reject(self, answer: Answer, positions: Indices, reason: Reason) -> None:
        answer.set(positions, EvictStatus.REJECTED, int(reason))
        self._core.counters[f"evict_rejected_{reason.name.lower()}"] += positions.shape[0]

    def _give_back(self, parts: list[_Part]) -> None:
        for part in parts:
            self._core.catalog.free_reserved(part.volume, part.slabs, part.slots)

    async def _take_arena(self, batch: BlockBatch, region: Region, missing: Indices, parts: list[_Part]) -> tuple[Indices, Reason]:
        core = self._core
        if region.device.arena_lane is None:
            return missing, Reason.NO_TIER
        slot_bytes = align_up(region.payload_bytes, SECTOR_BYTES)
        while True:
            share, later = missing[:RESERVE_BLOCKS], missing[RESERVE_BLOCKS:]
            reservation = core.catalog.reserve_arena(slot_bytes, share.shape[0], region.device.memory_node)
            core.count_remote("evict", region.device, reservation.slabs)
            left = self._part(batch, region, share, -1, reservation, parts)
            if left.shape[0] or not later.shape[0]:
                return np.concatenate((left, later)), _SHORTAGE_REASONS[reservation.shortage]
            missing = later
            await asyncio.sleep(0)

    async def _take_volumes(
        self, batch: BlockBatch, region: Region, missing: Indices, options: EvictOptions, active: Active, parts: list[_Part]
    ) -> tuple[Indices, Reason]:
        """Spread over the volumes in stripes; wait for slabs that are being opened until the deadline, or until every volume failed to open one."""
        core = self._core
        while not (serving := self._volumes_of(region, options)):
            # Right after its registration a namespace may be on its way to the only volume.
            able = {volume.ordinal for volume in core.serving_volumes()}
            asked = [event for ordinal, event in region.namespace.asked.items() if ordinal in able]
            if not asked:
                down = any(volume.serving and not volume.health.writes.admits for volume in core.volumes)
                return missing, Reason.VOLUME_DOWN if down else Reason.NO_TIER
            if not await active.any_of(asked):
                return missing, Reason.DEADLINE
        failures = {volume.ordinal: volume.slab_failures for volume in serving}
        while True:
            admitting = [volume for volume in serving if volume.serving and volume.health.writes.admits]
            volumes = [volume for volume in admitting if volume.slab_failures - failures[volume.ordinal] < SLAB_FAILURES_MAX]
            if not volumes:
                return missing, Reason.IO_ERROR if admitting else Reason.VOLUME_DOWN
            changed = [volume.slabs_changed for volume in volumes]
            per_volume = -(-missing.shape[0] // len(volumes))
            stripe = max(1, min(per_volume, STRIPE_BYTES // region.slot_bytes))
            full: dict[int, Shortage] = {}
            while missing.shape[0] and len(full) < len(volumes):
                with_room = [volume for volume in volumes if volume.ordinal not in full]
                stripes = np.arange(missing.shape[0]) // stripe
                owners = (self._turn + stripes) % len(with_room)
                self._turn += int(stripes[-1]) + 1
                left = []
                for number, volume in enumerate(with_room):
                    # All stripes of a volume at once: a reservation costs by the call.
                    share = missing[owners == number]
                    if share.shape[0] == 0:
                        continue
                    # The rest in the next turn of the loop: a reservation and its victims take some µs a slot.
                    share, later = share[:RESERVE_BLOCKS], share[RESERVE_BLOCKS:]
                    reservation = core.reserve_volume(volume.ordinal, region.slot_bytes, share.shape[0])
                    if reservation.shortage != Shortage.NONE:
                        full[volume.ordinal] = reservation.shortage
                    left += [self._part(batch, region, share, volume.ordinal, reservation, parts), later]
                missing = np.sort(np.concatenate(left))
                if missing.shape[0]:
                    await asyncio.sleep(0)
            for volume in volumes:
                volume.grant_wishes()
            shortage = min(full.values(), default=Shortage.NONE)
            if missing.shape[0] == 0 or shortage != Shortage.OPENING:
                return missing, _SHORTAGE_REASONS[shortage]
            if not await active.any_of(changed):
                return missing, Reason.DEADLINE

    def _volumes_of(self, region: Region, options: EvictOptions) -> list[VolumeLink]:
        """The volumes that take blocks of the region now."""
        serving = [volume for volume in self._core.serving_volumes() if volume.ordinal in region.namespace.on_volumes]
        if options.require_path:
            serving = [volume for volume in serving if (volume.ordinal, options.path) in region.device.volume_lanes]
        # The device's mover may have been refused the memory for its way there.
        return [volume for volume in serving if region.device.volume_lane(volume.ordinal, slot_bytes=region.slot_bytes) is not None]

    def _part(self, batch: BlockBatch, region: Region, missing: Indices, volume: int, reservation: Reservation, parts: list[_Part]) -> Indices:
        count = len(reservation)
        if count:
            first = parts[-1].span.stop if parts else 0
            parts.append(
                _Part(
                    batch=batch,
                    region=region,
                    chosen=missing[:count],
                    volume=volume,
                    slabs=reservation.slabs,
                    slots=reservation.slots,
                    generations=reservation.generations,
                    first=first,
                )
            )
        return missing[count:]

    # -- moving ----------------------------------------------------------------------------------------------------------------------

    def _send(self, session: Session, move: Move, parts: list[_Part], options: EvictOptions) -> _Sent:
        """Queue the jobs of all parts in one go: the move counts as copied when none of them is left, so none may come later.

        Restores of these keys wait for `over`.
        """
        core = self._core
        over = asyncio.Event()
        for part in parts:
            core.in_flight.update(dict.fromkeys(part.keys.tolist(), over))
        by_lane: dict[tuple[int, int], list[_Part]] = {}
        by_volume: Counter[tuple[str, int]] = Counter()
        for part in parts:
            by_lane.setdefault((part.volume, part.region.number), []).append(part)
            by_volume[part.region.device.name, part.volume] += part.chosen.shape[0] * part.region.payload_bytes
        paths: dict[tuple[str, int], Path] = {}
        for part in parts:
            place = (part.region.device.name, part.volume)
            if part.volume >= 0 and place not in paths:
                paths[place] = core.path_to(part.region.device, part.volume, options.path, Direction.EVICT, by_volume[place])
        lanes: dict[tuple[int, int], Lane] = {}
        move.filling()
        for (volume, number), group in by_lane.items():
            region = group[0].region
            blocks = new_blocks(sum(part.chosen.shape[0] for part in group))
            filled = 0
            for part in group:
                records = blocks[filled : filled + part.chosen.shape[0]]
                filled += part.chosen.shape[0]
                self._fill(records, part, options)
            device = region.device
            if volume < 0:
                lane, operation, slot_bytes = device.arena_lane, Operation.ARENA_EVICT, align_up(region.payload_bytes, SECTOR_BYTES)
            else:
                path = paths[device.name, volume]
                lane, operation, slot_bytes = device.volume_lane(volume, path, region.slot_bytes), Operation.EVICT, region.slot_bytes
            if lane is None:
                # Refused while another part of the request waited for its slots.
                move.fail(blocks["position"], int(Reason.NO_TIER))
                continue
            lanes[volume, number] = lane
            core.send_jobs(
                device,
                lane,
                move,
                operation,
                blocks,
                slot_bytes=slot_bytes,
                deadline_s=options.deadline_s,
                durable=options.ack == AckLevel.DURABLE,
                job_class=_job_class(options),
                instance=region.session.instance.ordinal,
                after_event=options.source_ready,
                require_path=options.require_path,
            )
        move.filled()
        return _Sent(session, move, parts, options, over, lanes, set(), np.zeros(move.count, dtype=np.bool_))

    def _fill(self, records: npt.NDArray[Any], part: _Part, options: EvictOptions) -> None:
        core = self._core
        region = part.region
        records["region"] = region.number
        records["block_index"] = part.batch.indices[part.chosen]
        records["payload_bytes"] = region.payload_bytes
        records["key"] = part.keys
        records["position"] = np.arange(part.first, part.first + part.chosen.shape[0], dtype=np.uint32)
        if part.volume < 0:
            records["arena_offset"] = core.arena_offsets(part.slabs, part.slots, align_up(region.payload_bytes, SECTOR_BYTES))
            return
        core.volume_blocks(records, core.volume(part.volume), part.slabs, part.slots)
        records["generation"] = part.generations
        records["sequence"] = core.sequences(part.chosen.shape[0])
        records["namespace_ordinal"], records["namespace_epoch"] = region.namespace.on_volumes[part.volume]
        records["flags"] = FLAG_KEEP if options.keep_until_s is not None else 0

    def _finish(self, sent: _Sent) -> None:
        """When every block has a result: publish the good ones, free the slots of the others, hold and spill as asked."""
        core = self._core
        try:
            self._settle_done(sent)
        finally:
            # Also after a fault of ours: restores that wait for these keys would else wait until their deadlines.
            for part in sent.parts:
                for key in part.keys.tolist():
                    if core.in_flight.get(key) is sent.over:
                        del core.in_flight[key]
            sent.over.set()

    def _settle_done(self, sent: _Sent) -> None:
        """Publish the parts that are over, and let restores go on that wait for the evict: a volume that hangs may keep the others for minutes."""
        reasons = sent.move.reasons
        for index, part in enumerate(sent.parts):
            if index not in sent.settled and not (reasons[part.span] == PENDING).any():
                sent.settled.add(index)
                self._settle(sent.session, sent.move, part, sent.options, sent.failed[part.span])
        sent.over.set()

    def _settle(self, session: Session, move: Move, part: _Part, options: EvictOptions, failed: npt.NDArray[np.bool_]) -> None:
        core = self._core
        good = (move.reasons[part.span] == 0) & ~failed
        if part.region.namespace.dropped:
            good[:] = False
        if not good.all():
            core.catalog.free_reserved(part.volume, part.slabs[~good], part.slots[~good])
            core.counters["evict_blocks_failed"] += int((~good).sum())
        rows = self._publish(part, good, move, options)
        stored = rows[rows > 0]
        if options.keep_until_s is not None and session.instance.sessions:
            core.catalog.holds.hold(session.instance.ordinal, stored, options.keep_until_s)
        if part.volume < 0 and options.tier != Tier.ARENA:
            self._spiller.spill(stored)

    def _publish(self, part: _Part, good: npt.NDArray[np.bool_], move: Move, options: EvictOptions) -> Indices:
        core = self._core
        keep = options.keep_until_s is not None
        number = part.region.namespace.number
        keys, slabs, slots = part.keys[good], part.slabs[good], part.slots[good]
        if part.volume < 0:
            checksums = move.checksums[part.span][good]
            rows, _ = core.catalog.publish_arena(keys, slabs, slots, checksums, payload_bytes=part.region.payload_bytes, namespace=number, keep=keep)
        else:
            rows, _ = core.catalog.publish_volume(
                part.volume,
                keys,
                slabs,
                slots,
                payload_bytes=part.region.payload_bytes,
                namespace=number,
                keep=keep,
                durable=options.ack == AckLevel.DURABLE,
            )
        # A block that could not be entered (index full, namespace dropped) was not stored: the answer to DURABLE says so, and COPIED counts it as lost.
        refused = np.flatnonzero(good)[rows == 0]
        move.reasons[part.first + refused] = int(Reason.TIER_FULL)
        return rows

    def _tell_later(self, move: Move, answer: Answer) -> None:
        """The ways that were not known when the evict was answered, once the move is over."""
        told = {use.name: use.payload_bytes for use in answer.uses}

        def tell() -> None:
            late = (replace(use, payload_bytes=use.payload_bytes - told.get(use.name, 0)) for use in move.uses.values())
            self._core.observer.bytes_moved("evict", late)

        move.at_end(tell)

    def _tell(self, move: Move, parts: list[_Part], answer: Answer, stopped: Reason, sent: _Sent) -> None:
        """Outcomes of the blocks that moved. COPIED is answered before the result: a pending block is STORED when its source was copied."""
        # The ways that bytes really went, by now: those of a COPIED block may be under way, and are counted where they were sent.
        answer.uses = [replace(use) for use in move.uses.values()]
        for part in parts:
            reasons = move.reasons[part.span]
            tier = int(Tier.ARENA if part.volume < 0 else Tier.VOLUME)
            pending = reasons == PENDING
            good = (reasons == 0) | (pending & (stopped == Reason.NONE))
            answer.set(part.positions[good], EvictStatus.STORED, 0, tier)
            _add_pending(answer, part, int((good & pending).sum()), sent)
            bad = ~good & ~pending
            answer.set(part.positions[bad], EvictStatus.FAILED, reasons[bad])
            late = sent.failed[part.span] = ~good & pending
            answer.set(part.positions[late], EvictStatus.QUARANTINED if move.quarantined else EvictStatus.FAILED, int(stopped))
            for status, mask in ((EvictStatus.STORED, good), (EvictStatus.FAILED, ~good)):
                if mask.any():
                    self._core.observer.blocks("evict", status.name.lower(), Tier(tier), int(mask.sum()))
        duplicates = int((answer.status == EvictStatus.DUPLICATE).sum())
        if duplicates:
            self._core.observer.blocks("evict", "duplicate", Tier.ANY, duplicates)
        rejected = int((answer.status == EvictStatus.REJECTED).sum())
        if rejected:
            self._core.observer.blocks("evict", "rejected", Tier.ANY, rejected)


def _add_pending(answer: Answer, part: _Part, count: int, sent: _Sent) -> None:
    """Blocks that are answered COPIED before their result: nothing of them was written yet."""
    if count == 0:
        return
    lane = sent.lanes[part.volume, part.region.number]
    # Which way cuFile takes is known when it has taken it.
    path = Path.AUTO if lane.path == Path.GDS else lane.path
    answer.add_use(PathUse(lane.tier, path, Way.PLAIN, block_count=count, payload_bytes=count * part.region.payload_bytes))

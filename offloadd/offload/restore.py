"""Restore: tier → engine memory, verified on the way.

    where is each block (pin it) → one move over all lanes → outcomes in request order as they come → a second try from the other tier where a copy was bad

A block whose evict is still under way is waited for, and, soon after a start, one that a volume's scan may still find.
Pins are released by a task of its own when the move is over, whatever became of the request.
"""

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offloadd import clock
from offloadd.catalog.catalog import Sources
from offloadd.errors import PathUnavailable
from offloadd.model.enums import Path, Priority, Reason, RestoreStatus, Tier
from offloadd.model.requests import BlockBatch, RestoreOptions
from offloadd.mover.messages import Operation
from offloadd.offload.answers import Answer
from offloadd.offload.bandwidth import Direction
from offloadd.offload.core import Core, groups, new_blocks
from offloadd.offload.deadlines import refuse_expired
from offloadd.offload.moves import PENDING, Move
from offloadd.offload.regions import Region
from offloadd.offload.sessions import Session
from offloadd.offload.stopping import Active
from offloadd.scheduler.job_class import JobClass
from offloadd.units import SECTOR_BYTES, align_up

Indices = npt.NDArray[np.uint32]

#: Reasons that say that the stored copy is bad: it is dropped, and the other copy is tried.
_BAD_COPY = (int(Reason.HEADER_MISMATCH), int(Reason.CHECKSUM_MISMATCH), int(Reason.SHORT_IO))


def _is_bad_copy(reasons: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    # Not np.isin: at every turn of every request, and 65 µs instead of 4 for 512 blocks.
    header, checksum, short = _BAD_COPY
    return np.asarray((reasons == header) | (reasons == checksum) | (reasons == short))


@dataclass(slots=True)
class _Round:
    """One move of a restore. `numbers`: the request's position of each block of the move; `rows`, `from_volume`: what it reads."""

    move: Move
    numbers: Indices
    rows: Indices
    from_volume: npt.NDArray[np.bool_]


class _Progress:
    """True once the move has more results than now, or all."""

    def __init__(self, move: Move) -> None:
        self._move = move
        self._before = move.pending_count

    def __call__(self) -> bool:
        return self._move.done or self._move.pending_count < self._before


class Restorer:
    """Carries out restores. Event-loop owned."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def restore(self, session: Session, batches: list[BlockBatch], options: RestoreOptions) -> AsyncIterator[tuple[int, int, Answer]]:
        """Yield (first, stop, answer): outcomes of the request's blocks first..stop-1 are final in `answer`. The last yield has its uses and times.

        Raises errors of offloadd.errors before the first yield when nothing could be tried.
        """
        core = self._core
        started_ns = clock.monotonic_ns()
        refuse_expired(options.deadline_s)
        path = options.path
        for region in core.regions.of_batches(batches):
            device = region.device
            allowed = (Path.DDR, *device.volume_paths)
            path = device.refuse_path(path, require=options.require_path, allowed=allowed, what="a restore", slot_bytes=region.slot_bytes)
            device.refuse_event(options.destination_free, "destination_free")
        number, active = core.begin(session, batches, options.request_id, options.deadline_s)
        try:
            count = sum(batch.indices.shape[0] for batch in batches)
            answer = Answer.of(count)
            work = None
            if await self._wait_for_scans(batches, active) and await self._wait_in_flight(batches, active):
                work = self._plan(batches, path, options, answer)
            else:
                # No copy begins.
                answer.set(np.arange(count), RestoreStatus.FAILED, int(active.stop_reason))
            told = 0
            while work is not None:
                move = work.move
                while True:
                    stopped = await core.stopping.wait_for(move, active, _Progress(move))
                    # Taken before settling: results that arrive while this generator is suspended in a yield must be settled too.
                    over = move.done or stopped != Reason.NONE
                    self._settle(work, answer, stopped, session, options)
                    unanswered = np.flatnonzero(answer.status[told:] == 0)
                    stop = told + int(unanswered[0]) if unanswered.size else count
                    if stop > told and stop < count:
                        yield told, stop, answer
                        told = stop
                    if over:
                        break
                self._add_uses(answer, move)
                work = self._second_try(work, batches, options, answer) if stopped == Reason.NONE else None
            assert (answer.status != 0).all(), "a block without an outcome"
        finally:
            core.end(number)
            # A request that was stopped has been fenced; one whose caller hung up has not.
            if active.move is not None and active.stop_reason == Reason.NONE:
                core.stopping.leave(active.move)
        answer.clock.total_ns = clock.monotonic_ns() - started_ns
        try:
            yield told, count, answer
        finally:
            # After the answer has left: nobody waits for the counting.
            self._count(answer)

    # -- planning --------------------------------------------------------------------------------------------------------------------

    async def _wait_for_scans(self, batches: list[BlockBatch], active: Active) -> bool:
        """After a start volumes serve while they are scanned: a block that the scan has not come to is not missing. False if the request is to stop."""
        core = self._core
        while active.stop_reason == Reason.NONE and (scanning := [volume for volume in core.volumes if volume.scanning]):
            if all((core.catalog.lookup(batch.keys) > 0).all() for batch in batches):
                break
            await active.any_of([volume.slabs_changed for volume in scanning], min(volume.scan_until_s for volume in scanning))
        return active.stop_reason == Reason.NONE

    async def _wait_in_flight(self, batches: list[BlockBatch], active: Active) -> bool:
        """A block whose evict was answered COPIED but is not published yet is not missing: wait until that evict is over. False if the request is to stop."""
        core = self._core
        if not core.in_flight:
            return True
        events = {
            id(event): event
            for batch in batches
            for key in batch.keys[core.catalog.lookup(batch.keys) == 0].tolist()
            if (event := core.in_flight.get(key)) is not None
        }
        for event in events.values():
            if not await active.any_of([event]):
                return False
        return True

    def _plan(self, batches: list[BlockBatch], path: Path, options: RestoreOptions, answer: Answer) -> _Round | None:
        core = self._core
        planned: list[tuple[Region, BlockBatch, Sources, npt.NDArray[np.bool_]]] = []
        # All regions first: one that is gone must not leave the others' blocks pinned.
        regions = [core.regions.by_number(batch.region) for batch in batches]
        for region, batch in zip(regions, batches, strict=True):
            # The copy that the asked-for path reads where there is one; blocks that have only the other copy keep it, unless the path is required.
            avoid = () if options.require_path else core.unreadable
            sources = core.catalog.plan_restore(batch.keys, from_volume=path not in (Path.AUTO, Path.DDR), avoid=avoid)
            usable = (sources.rows > 0) & (sources.payload_bytes == region.payload_bytes)
            self._leave_out_unreachable(sources, usable, region)
            if not usable.all():
                core.catalog.unpin(sources.rows[~usable])
                answer.set(batch.positions[~usable], RestoreStatus.NOT_FOUND)
                core.counters["restore_misses"] += int((~usable).sum())
            planned.append((region, batch, sources, usable))
        if options.require_path:
            self._refuse_other_ways(planned, path)
        count = sum(int(usable.sum()) for *_, usable in planned)
        if count == 0:
            return None
        move = core.new_move(count)
        work = _Round(move=move, numbers=np.zeros(count, np.uint32), rows=np.zeros(count, np.uint32), from_volume=np.zeros(count, np.bool_))
        first = 0
        paths = self._paths(planned, options.path)
        for region, batch, sources, usable in planned:
            first = self._send(work, first, region, batch, sources, usable, options, paths)
        for *_, sources, _ in planned:
            core.catalog.mark_used(sources)
        core.at_end(move, lambda: self._finish(work))
        return work

    def _refuse_other_ways(self, planned: list[tuple[Region, BlockBatch, Sources, npt.NDArray[np.bool_]]], path: Path) -> None:
        """Raise `PathUnavailable`, everything unpinned, if a block could only be restored by another path than the required one."""
        wrong = sum(int(np.count_nonzero(usable & ~self._goes_by(path, region, sources))) for region, _, sources, usable in planned)
        if wrong == 0:
            return
        for *_, sources, usable in planned:
            self._core.catalog.unpin(sources.rows[usable])
        count = sum(int(usable.sum()) for *_, usable in planned)
        elsewhere = any((usable & (sources.volume >= 0) & ~self._goes_by(path, region, sources)).any() for region, _, sources, usable in planned)
        where = "on a volume" if path == Path.DDR else "in the arena or on a volume that it does not reach" if elsewhere else "in the arena"
        raise PathUnavailable(f"path {path.name.lower()} is not available for {wrong} of {count} blocks: they are only {where}")

    def _paths(self, planned: list[tuple[Region, BlockBatch, Sources, npt.NDArray[np.bool_]]], asked: Path) -> dict[tuple[str, int], Path]:
        """The path between each device and volume of the request: one for all of its bytes there."""
        moved: Counter[tuple[str, int]] = Counter()
        # The host has one path, and most requests are its: they need not count.
        devices = {region.device.name: region.device for region, *_ in planned if len(region.device.volume_paths) > 1}
        for region, _, sources, usable in planned:
            if region.device.name not in devices:
                continue
            for volume, mine in groups(sources.volume[usable]):
                if volume >= 0:
                    moved[region.device.name, volume] += sources.volume[usable][mine].shape[0] * region.payload_bytes
        return {
            (name, volume): self._core.path_to(devices[name], volume, asked, Direction.RESTORE, payload_bytes)
            for (name, volume), payload_bytes in moved.items()
        }

    @staticmethod
    def _goes_by(path: Path, region: Region, sources: Sources) -> npt.NDArray[np.bool_]:
        """Which blocks this path can restore."""
        if path == Path.DDR:
            return np.asarray(sources.volume < 0)
        served = [volume for volume, one in region.device.volume_lanes if one == path]
        return np.isin(sources.volume, served)

    def _leave_out_unreachable(self, sources: Sources, usable: npt.NDArray[np.bool_], region: Region) -> None:
        for volume, _ in groups(sources.volume):
            if volume >= 0 and region.device.volume_lane(volume, slot_bytes=region.slot_bytes) is None:
                usable &= sources.volume != volume

    def _send(
        self,
        work: _Round,
        first: int,
        region: Region,
        batch: BlockBatch,
        sources: Sources,
        usable: npt.NDArray[np.bool_],
        options: RestoreOptions,
        paths: dict[tuple[str, int], Path],
    ) -> int:
        """Queue the jobs of one batch, lane by lane, in the order of the request."""
        core = self._core
        chosen = np.flatnonzero(usable)
        stop = first + chosen.shape[0]
        numbers = np.arange(first, stop, dtype=np.uint32)
        work.numbers[first:stop] = batch.positions[chosen]
        work.rows[first:stop] = sources.rows[chosen]
        work.from_volume[first:stop] = sources.volume[chosen] >= 0
        for volume, mine in groups(sources.volume[chosen]):
            index = chosen[mine]
            blocks = new_blocks(index.shape[0])
            slabs, slots = sources.slab[index], sources.slot[index]
            blocks["region"] = region.number
            blocks["block_index"] = batch.indices[index]
            blocks["payload_bytes"] = region.payload_bytes
            blocks["key"] = batch.keys[index]
            blocks["position"] = numbers[mine]
            device = region.device
            if volume < 0:
                slot_bytes = align_up(region.payload_bytes, SECTOR_BYTES)
                blocks["arena_offset"] = core.arena_offsets(slabs, slots, slot_bytes)
                blocks["checksum"] = sources.checksum[index]
                core.count_remote("restore", device, slabs)
                lane, operation = device.arena_lane, Operation.ARENA_RESTORE
            else:
                core.fill_sources(blocks, volume, slabs, slots, region.namespace.number)
                path = paths.get((device.name, volume), options.path)
                slot_bytes, lane, operation = region.slot_bytes, device.volume_lane(volume, path, region.slot_bytes), Operation.RESTORE
            assert lane is not None
            core.send_jobs(
                device,
                lane,
                work.move,
                operation,
                blocks,
                slot_bytes=slot_bytes,
                deadline_s=options.deadline_s,
                job_class=JobClass.PREFETCH if options.priority == Priority.BACKGROUND else JobClass.INTERACTIVE,
                instance=region.session.instance.ordinal,
                after_event=options.destination_free,
                require_path=options.require_path,
            )
        return stop

    # -- outcomes --------------------------------------------------------------------------------------------------------------------

    def _settle(self, work: _Round, answer: Answer, stopped: Reason, session: Session, options: RestoreOptions) -> None:
        """Enter the outcomes that are final. A bad copy with another one beside it stays open for the second try."""
        core = self._core
        move = work.move
        reasons = move.reasons
        open_blocks = answer.status[work.numbers] == 0
        good = open_blocks & (reasons == 0)
        answer.set(work.numbers[good], RestoreStatus.RESTORED, 0, np.where(work.from_volume[good], int(Tier.VOLUME), int(Tier.ARENA)))
        if options.consume and good.any():
            core.catalog.holds.release(session.instance.ordinal, work.rows[good])
        bad = open_blocks & _is_bad_copy(reasons)
        if stopped != Reason.NONE:
            answer.set(work.numbers[bad], RestoreStatus.DATA_LOSS, reasons[bad])
        failed = open_blocks & (reasons != 0) & (reasons != PENDING) & ~bad
        answer.set(work.numbers[failed], RestoreStatus.FAILED, reasons[failed])
        if stopped != Reason.NONE:
            late = (answer.status[work.numbers] == 0) & (reasons == PENDING)
            answer.set(work.numbers[late], RestoreStatus.QUARANTINED if move.quarantined else RestoreStatus.FAILED, int(stopped))

    def _second_try(self, work: _Round, batches: list[BlockBatch], options: RestoreOptions, answer: Answer) -> _Round | None:
        """Read the other copy of blocks whose first one was bad; DATA_LOSS for those that have none left, or none on the required path."""
        bad = _is_bad_copy(work.move.reasons) & (answer.status[work.numbers] == 0)
        if not bad.any():
            return None
        positions, reasons = work.numbers[bad], work.move.reasons[bad]
        if options.require_path:
            answer.set(positions, RestoreStatus.DATA_LOSS, reasons)
            return None
        again = []
        for batch in batches:
            mine = np.isin(batch.positions, positions)
            if mine.any():
                again.append(BlockBatch(batch.region, batch.indices[mine], batch.keys[mine], batch.positions[mine]))
        retry = self._plan(again, Path.AUTO, options, answer)
        lost = answer.status[positions] == RestoreStatus.NOT_FOUND
        answer.set(positions[lost], RestoreStatus.DATA_LOSS, reasons[lost])
        self._core.counters["restore_second_tries"] += int((~lost).sum())
        return retry

    def _finish(self, work: _Round) -> None:
        """When every block has a result: unpin, and drop the copies that turned out bad."""
        core = self._core
        core.catalog.unpin(work.rows)
        bad = _is_bad_copy(work.move.reasons)
        if not bad.any():
            return
        for volume in (False, True):
            rows = work.rows[bad & (work.from_volume == volume)]
            if rows.shape[0]:
                core.catalog.lose(rows, volume=volume)
                core.counters["copies_lost"] += rows.shape[0]

    def _add_uses(self, answer: Answer, move: Move) -> None:
        answer.clock.add(move.clock)
        for use in move.uses.values():
            answer.add_use(use)

    def _count(self, answer: Answer) -> None:
        core = self._core
        for status, mine in groups(answer.status):
            name = RestoreStatus(status).name.lower()
            tiers = answer.tier[mine]
            core.counters[f"restore_blocks_{name}"] += tiers.shape[0]
            for tier, of_tier in groups(tiers):
                core.observer.blocks("restore", name, Tier(tier), tiers[of_tier].shape[0])
        core.observer.request_done("restore", answer)
        core.bandwidths.answered("restore", answer.uses, answer.clock.total_ns / 1e9)

"""Measures the routes between each GPU and each volume by moves of its own, so that AUTO can take the faster one.

    map random memory of the mover's own → on each route: evict it into the scratch area, restore it from there; once to prove it, then timed in turn → unmap

These are jobs as requests make them, by the same lanes at the lowest priority, and only while nothing else moves on the GPU and on the volume. Nothing of
them is in the catalog or in what is counted for clients. One loop a GPU, so that a driver or a volume that hangs holds up no other; steps take turns, so that
they do not measure each other.
"""

import asyncio
import contextlib
import secrets
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from offloadd import clock
from offloadd.errors import OffloaddError
from offloadd.model.enums import Path, Reason
from offloadd.model.region import Layout, Plane
from offloadd.mover.messages import Operation, OwnPiece
from offloadd.offload.bandwidth import LARGE_BYTES, MEASUREMENT_WEIGHT, Direction, Route
from offloadd.offload.core import Core, new_blocks
from offloadd.offload.devices import Device
from offloadd.offload.mover_link import Mapping
from offloadd.offload.moves import Move
from offloadd.offload.traffic import STALLED_NS, Run
from offloadd.tiers.format import slot_bytes_for
from offloadd.tiers.scratch import SCRATCH_SLAB, Scratch
from offloadd.units import KIB

log = structlog.get_logger()

#: One rank's share of a 16-token block of Llama-3-70B at TP 8, which is as small as blocks are that a volume is good for.
PAYLOAD_BYTES = 640 * KIB
SLOT_BYTES = slot_bytes_for(PAYLOAD_BYTES)
#: Blocks of a large measurement: 30 MiB, six for each of eight threads.
BLOCKS_MAX = 48
#: Timed evicts and restores of each route and size, after one that proves it and warms it up.
REPEATS = 3
#: A step takes milliseconds, on a busy disk a second. One that takes this long hangs.
STEP_S = 10.0
#: How long it must have been quiet where something moved, and how long after a round in which something always did the next one comes.
PAUSE_S = 0.05
BUSY_S = 5.0
#: A route on which the mover died so often while it was measured is not measured again: engines need the mover.
LOSSES_MAX = 2

NOT_YET = "not measured yet"

_WRONG = (Reason.HEADER_MISMATCH, Reason.CHECKSUM_MISMATCH, Reason.TARGET_MISMATCH)
_OPERATIONS = ((Operation.EVICT, Direction.EVICT), (Operation.RESTORE, Direction.RESTORE))


#: Payload bytes and seconds of each move, by path and direction.
Samples = dict[tuple[Path, Direction], list[tuple[int, float]]]


class _Verdict(Enum):
    FINE = 0
    #: The bytes did not come through, or not by this path.
    FAILED = 1
    WRONG = 2
    #: The mover died.
    LOST = 3
    #: No result, and something of it may still come.
    HUNG = 4
    #: The route is not served any more, or the daemon drains.
    GONE = 5


@dataclass(frozen=True, slots=True)
class _Step:
    verdict: _Verdict
    why: str = ""
    run: Run | None = None


@dataclass(slots=True)
class _Pair:
    """A GPU and a volume. `note`: why there is nothing measured, or nothing new; empty if there is."""

    device: Device
    volume: int
    name: str
    scratch: Scratch
    note: str = NOT_YET
    #: What the present round came upon: the next `note`.
    problem: str = ""
    due_s: float = 0.0
    #: A move that hung: while it may still write to the scratch area, nothing is measured there.
    stuck: Move | None = None
    losses: Counter[Path] = field(default_factory=Counter)

    def paths(self) -> list[Path]:
        lanes = self.device.volume_lanes
        return [path for path in self.device.volume_paths if (lane := lanes.get((self.volume, path))) is not None and self.device.mover.serves(lane.number)]


class Measurer:
    """Event-loop owned. `interval_s`: from one round to the next, 0 for none after the first."""

    def __init__(self, core: Core, *, interval_s: float) -> None:
        self._core = core
        self._interval_s = interval_s
        self._pairs: dict[tuple[str, int], _Pair] = {}
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        #: Held for one step.
        self._turn = asyncio.Lock()
        #: Runs of our own moves that are over, by the move; None while it runs.
        self._runs: dict[int, Run | None] = {}

    def settled(self, device: Device, volume: int, name: str, scratch: Scratch) -> None:
        """A route between them is served, or not: measure what there is now."""
        pair = self._pairs.setdefault((device.name, volume), _Pair(device, volume, name, scratch))
        pair.due_s = 0.0
        if not scratch.slot_count(SLOT_BYTES):
            pair.note = f"not measured: {scratch.size_bytes} bytes of scratch area are for this GPU; a volume that is formatted anew has some"
            return
        if device.note or len(pair.paths()) < 2 or max(pair.losses.values(), default=0) >= LOSSES_MAX:
            return
        self._changed.setdefault(device.name, asyncio.Event()).set()
        if device.name not in self._loops:
            self._loops[device.name] = asyncio.get_running_loop().create_task(self._measure_always(device))

    def note(self, device: str, volume: int) -> str:
        """Why nothing is measured between them, or nothing new; empty if it is, or if there is nothing to compare."""
        pair = self._pairs.get((device, volume))
        return pair.note if pair is not None and len(pair.device.volume_paths) > 1 else ""

    def run_over(self, run: Run) -> bool:
        """Hear of a lane's run; whether it was ours."""
        if run.move not in self._runs:
            return False
        self._runs[run.move] = run
        return True

    async def stop(self) -> None:
        """Measure no more."""
        for loop in self._loops.values():
            loop.cancel()
        await asyncio.gather(*self._loops.values(), return_exceptions=True)

    # -- when ------------------------------------------------------------------------------------------------------------------------

    async def _measure_always(self, device: Device) -> None:
        changed = self._changed[device.name]
        while True:
            changed.clear()
            now_s = clock.monotonic_s()
            mine = [pair for pair in self._pairs.values() if pair.device is device and self._may_be_measured(pair)]
            due = next((pair for pair in mine if pair.due_s <= now_s), None)
            if due is None:
                # A pair that is stuck is looked at again now and then; there is nobody who would tell.
                wait_s = min([max(STEP_S, self._interval_s), *(pair.due_s - now_s for pair in mine)])
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await changed.wait()
                continue
            due.due_s = now_s + self._interval_s if self._interval_s else float("inf")
            try:
                await self._measure(due)
            except OffloaddError as error:
                due.note = f"not measured: {error}"
                log.warning("routes were not measured", device=device.name, volume=due.name, why=str(error))
            except Exception as error:
                self._core.counters["faults"] += 1
                log.error("bug: a measurement failed", device=device.name, volume=due.name, exc_info=error)
                due.note = f"not measured: {type(error).__name__}: {error}"

    @staticmethod
    def _may_be_measured(pair: _Pair) -> bool:
        free = pair.stuck is None or pair.stuck.done
        return free and len(pair.paths()) > 1 and pair.scratch.slot_count(SLOT_BYTES) > 0 and max(pair.losses.values(), default=0) < LOSSES_MAX

    # -- one round -------------------------------------------------------------------------------------------------------------------

    async def _measure(self, pair: _Pair) -> None:
        count = min(BLOCKS_MAX, pair.scratch.slot_count(SLOT_BYTES))
        counts = [1, *([count] if count * PAYLOAD_BYTES >= LARGE_BYTES else [])]
        region = self._core.regions.new_number()
        layout = Layout(count, (Plane(0, 0, PAYLOAD_BYTES, PAYLOAD_BYTES),))
        mapping = Mapping(region=region, fds=(), memory_bytes=(count * PAYLOAD_BYTES,), layout=layout, pieces=(OwnPiece(),))
        await pair.device.mover.map_region(mapping, clock.monotonic_s() + STEP_S)
        pair.problem = ""
        try:
            for blocks in counts:
                if not await self._compare(pair, region, blocks):
                    break
        finally:
            pair.device.mover.unmap_region(region)
        pair.note = pair.problem
        if pair.problem:
            log.warning("routes were not measured", device=pair.device.name, volume=pair.name, why=pair.problem)
        else:
            log.debug("routes were measured", device=pair.device.name, volume=pair.name)

    async def _compare(self, pair: _Pair, region: int, block_count: int) -> bool:
        """The routes in turn, so that what drifts drifts for all; whether to go on with the round."""
        paths = pair.paths()
        samples: Samples = {}
        for repeat in range(1 + REPEATS):
            for path in list(paths):
                step = await self._there_and_back(pair, path, region, block_count, samples, proof=repeat == 0)
                if step.verdict == _Verdict.FINE:
                    continue
                paths.remove(path)
                self._judge(pair, path, step)
                if step.verdict in (_Verdict.GONE, _Verdict.LOST, _Verdict.HUNG):
                    return False
        # The shortest of each: whatever else the machine does only ever makes one longer.
        best = {name: min(some, key=lambda one: one[1]) for name, some in samples.items() if name[0] in paths}
        self._core.bandwidths.measured_together(
            ((Route(pair.device.name, pair.volume, path), direction, *one) for (path, direction), one in best.items()), MEASUREMENT_WEIGHT
        )
        if any((path, direction) not in best for path in paths for direction in Direction):
            pair.problem = pair.problem or f"{NOT_YET}: something else always moved"
            pair.due_s = min(pair.due_s, clock.monotonic_s() + BUSY_S)
        return True

    def _judge(self, pair: _Pair, path: Path, step: _Step) -> None:
        core, device = self._core, pair.device
        route = Route(device.name, pair.volume, path)
        why = f"{path.name.lower()}, measured: {step.why}"
        if step.verdict == _Verdict.GONE:
            pair.problem = f"{NOT_YET}: the route went"
            return
        if step.verdict == _Verdict.LOST:
            pair.losses[path] += 1
            if pair.losses[path] < LOSSES_MAX:
                # The routes are settled again once there is another mover.
                pair.problem = f"{NOT_YET}: the mover died"
                return
            why += f"; {LOSSES_MAX} movers did, so it is not measured again"
        if step.verdict == _Verdict.WRONG:
            device.refuse(pair.volume, path, why)
            core.bandwidths.withdraw(route)
        else:
            core.bandwidths.failed(route, why)
        pair.problem = why

    async def _there_and_back(self, pair: _Pair, path: Path, region: int, block_count: int, samples: Samples, *, proof: bool) -> _Step:
        blocks = new_blocks(block_count)
        blocks["region"] = region
        blocks["block_index"] = blocks["slot"] = blocks["position"] = np.arange(block_count, dtype=np.uint32)
        blocks["payload_bytes"] = PAYLOAD_BYTES
        blocks["slab"] = SCRATCH_SLAB
        # Drawn anew: what an earlier measurement left in the slots is no block of this one.
        blocks["nonce"] = np.void(secrets.token_bytes(16))
        blocks["key"] = np.frombuffer(secrets.token_bytes(32 * block_count), dtype="V32")
        blocks["sequence"] = self._core.sequences(block_count)
        step = _Step(_Verdict.FINE)
        for operation, direction in _OPERATIONS:
            step = await self._step(pair, path, operation, blocks, proof=proof)
            if step.verdict != _Verdict.FINE:
                return step
            run = step.run
            if not proof and run is not None and run.counts:
                samples.setdefault((path, direction), []).append((run.payload_bytes, run.seconds))
        return step

    async def _step(self, pair: _Pair, path: Path, operation: Operation, blocks: npt.NDArray[Any], *, proof: bool) -> _Step:
        core, name = self._core, pair.device.name
        while True:
            while not core.traffic.idle(name, pair.volume, clock.monotonic_ns()):
                core.traffic.ended.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STALLED_NS / 1e9):
                        await core.traffic.ended.wait()
                # Requests come in bursts: not into the first gap.
                await asyncio.sleep(PAUSE_S)
            async with self._turn:
                if core.traffic.idle(name, pair.volume, clock.monotonic_ns()):
                    return await self._move(pair, path, operation, blocks, proof=proof)

    async def _move(self, pair: _Pair, path: Path, operation: Operation, blocks: npt.NDArray[Any], *, proof: bool) -> _Step:
        core, device = self._core, pair.device
        lane = device.volume_lanes.get((pair.volume, path))
        if lane is None or not lane.connected or core.draining:
            return _Step(_Verdict.GONE)
        move = core.new_move(blocks.shape[0])
        self._runs[move.number] = None
        try:
            core.send_jobs(
                device,
                lane,
                move,
                operation,
                blocks,
                slot_bytes=SLOT_BYTES,
                deadline_s=clock.monotonic_s() + STEP_S,
                durable=True,
                background=True,
                require_path=path == Path.GDS,
                verify_target=int(proof),
            )
            return await self._result(pair, operation, move)
        finally:
            core.stopping.leave(move)
            # One that hangs is ours until it is over: what it took then is no rate.
            move.at_end(lambda: self._over(device, move))

    def _over(self, device: Device, move: Move) -> None:
        device.mover.forget_move(move.number)
        del self._runs[move.number]

    async def _result(self, pair: _Pair, operation: Operation, move: Move) -> _Step:
        what = f"{operation.name.lower()} of {move.count} blocks"
        try:
            async with asyncio.timeout(STEP_S):
                await move.finished.wait()
        except TimeoutError:
            pair.stuck = move
            return _Step(_Verdict.HUNG, f"{what} did not end in {STEP_S:.0f} s")
        reasons = {Reason(int(reason)) for reason in np.unique(move.reasons) if reason}
        if not reasons:
            return _Step(_Verdict.FINE, run=self._runs[move.number])
        why = f"{what} gave {', '.join(sorted(reason.name for reason in reasons))}"
        if Reason.WORKER_LOST in reasons:
            return _Step(_Verdict.LOST, why)
        return _Step(_Verdict.WRONG if reasons & set(_WRONG) else _Verdict.FAILED, why)

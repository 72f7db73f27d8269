"""Looks after the volumes: sees that one stands still, probes it, and turns its lanes off and on.

A volume that is turned off costs nothing but what was sent to it: jobs that wait are taken back, requests that wait for it are answered, new ones go elsewhere
or fail at once. **What was sent keeps what it holds until its I/O is over**: its staging slot, its slot on the volume, and the arena slot that a spill reads
or a prefetch fills. A write or a read that comes back after minutes must find its memory as it left it.
"""

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from offloadd import clock
from offloadd.errors import OffloaddError, VolumeError
from offloadd.model.enums import Reason
from offloadd.offload.core import Core
from offloadd.offload.lanes import Lane
from offloadd.offload.moves import Move
from offloadd.offload.volume_link import VolumeLink
from offloadd.scheduler.breaker import BreakerState

#: How often it looks.
PERIOD_S = 0.25
#: A mover that does not answer its control socket within this time says nothing of the volume.
MOVER_WAIT_S = 1.0

log = structlog.get_logger()


class VolumeWatch:
    """One for all volumes. Event-loop owned. `on_admitted(volume)`: it gets writes again."""

    def __init__(self, core: Core, on_admitted: Callable[[VolumeLink], None]) -> None:
        self._core = core
        self._on_admitted = on_admitted
        #: By volume: whether a probe is under way, and when the last one began.
        self._probing: set[int] = set()
        self._asking: set[int] = set()
        self._probed_s: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            for volume in self._core.volumes:
                if volume.opened is not None:
                    try:
                        self.look(volume)
                    except Exception:
                        # Of ours; without a look at it the next volume would hang unseen.
                        log.exception("bug: looking after a volume failed", volume=volume.options.path)
            await asyncio.sleep(PERIOD_S)

    def stop(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()

    def look(self, volume: VolumeLink) -> None:
        """See how one volume that was opened does."""
        health, now_ns = volume.health, clock.monotonic_ns()
        late_ns = int(health.options.late_s * 1e9)
        stalled = [lane for lane in self._core.volume_lanes(volume.ordinal) if lane.stalled_ns(now_ns) >= late_ns]
        mine = self._core.host.volume_lane(volume.ordinal)
        held_bytes = self._core.left_behind(volume).slot_bytes
        overfull = held_bytes > health.options.quarantined_bytes_max
        # With too much in quarantine a good probe does not count either: each try may add to it.
        health.stalled = mine in stalled or overfull
        if overfull and health.reads.admits:
            health.overfull(held_bytes)
        if any(lane is not mine for lane in stalled):
            # A GPU's: its copies may be what hangs.
            health.suspect()
        if mine is not None and mine in stalled and health.reads.admits and volume.ordinal not in self._asking:
            self._asking.add(volume.ordinal)
            self._spawn(self._ask_mover(volume, mine))
        # A lane that was away when the volume turned.
        self._apply(volume)
        due_s = self._probed_s.get(volume.ordinal, 0.0) + health.options.probe_interval_s
        if health.wants_probe and volume.ordinal not in self._probing and clock.monotonic_s() >= due_s:
            self._probing.add(volume.ordinal)
            self._probed_s[volume.ordinal] = clock.monotonic_s()
            self._spawn(self._probe(volume))

    async def _ask_mover(self, volume: VolumeLink, lane: Lane) -> None:
        """Whether it is the volume that stands still, or the whole mover."""
        try:
            # The fence of a move that there never was: a mover that is well answers at once. One that is not is asked once, however long it takes.
            move = self._core.new_move(0).number
            mover = self._core.host.mover
            fence = mover.fence(move)
            done, _ = await asyncio.wait([fence], timeout=MOVER_WAIT_S)
            await fence
            mover.forget_move(move)
            # A mover, or a machine, that stood still goes on now. So it must be seen to stand still once more.
            await asyncio.sleep(MOVER_WAIT_S)
            stalled_ns = lane.stalled_ns(clock.monotonic_ns())
            if done and stalled_ns >= volume.health.options.late_s * 1e9:
                volume.health.stand_still(stalled_ns / 1e9)
        finally:
            self._asking.discard(volume.ordinal)

    async def _probe(self, volume: VolumeLink) -> None:
        health = volume.health
        probe = asyncio.ensure_future(volume.probe())
        try:
            done, _ = await asyncio.wait([probe], timeout=health.options.probe_wait_s)
            if not done:
                health.probed(f"a probe was not answered in {health.options.probe_wait_s:g} s")
            # The next one waits for this one's end, which then tells at once that the volume is back.
            await probe
            health.probed("")
        except VolumeError as error:
            health.probed(f"a probe failed: {error}")
        except OffloaddError as error:
            # Of a keeper that is being started: it tells nothing of the volume.
            log.debug("volume was not probed", volume=volume.options.path, error=str(error))
        finally:
            probe.cancel()
            self._probing.discard(volume.ordinal)

    # -- turning ---------------------------------------------------------------------------------------------------------------------

    def left_behind(self, ordinal: int, moves: list[Move]) -> None:
        """A mover was lost, and what it was sent for this volume is not over: its threads wait in the kernel, so the volume may hang."""
        volume = self._core.volume(ordinal)
        held = self._core.left_behind(volume)
        log.warning(
            "slots of a mover that is lost are not used until its I/O is over", volume=volume.options.path, slots=held.slots, slot_bytes=held.slot_bytes
        )
        volume.health.suspect()
        self._core.answer_stuck(moves, Reason.WORKER_LOST)

    def turned(self, volume: VolumeLink) -> None:
        """A breaker of the volume has changed its state."""
        health = volume.health
        reads, writes = health.reads, health.writes
        if not writes.admits:
            say, what = log.error, "volume is not used" if not reads.admits else "volume is not written to"
        else:
            say, what = log.info, "volume is used again" if writes.state is BreakerState.CLOSED else "volume is used again, on trial"
        say(
            what,
            volume=volume.options.path,
            reads=reads.state.value,
            writes=writes.state.value,
            why=reads.reason or writes.reason,
            nvme=volume.nvme_paths,
        )
        self._core.turn(volume.ordinal, reads=reads.admits)
        lanes = self._core.volume_lanes(volume.ordinal)
        newly_admitted = writes.admits and any(lane.refuses(writes=True) for lane in lanes)
        self._apply(volume)
        if not reads.admits:
            self._core.answer_stuck([move for lane in lanes for move in lane.moves], Reason.VOLUME_DOWN)
        if newly_admitted:
            self._on_admitted(volume)
        volume.wake()

    def _apply(self, volume: VolumeLink) -> None:
        refused = {False: not volume.health.reads.admits, True: not volume.health.writes.admits}
        for lane in self._core.volume_lanes(volume.ordinal):
            if any(lane.refuses(writes=writes) != refused[writes] for writes in refused):
                lane.refuse(reads=refused[False], writes=refused[True])

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("bug: looking after a volume failed", exc_info=error)

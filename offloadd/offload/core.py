"""What the use cases share: the tiers with their lanes, the catalog, what is in flight, and what is counted."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from offloadd import clock
from offloadd.catalog.catalog import Catalog
from offloadd.catalog.reservation import Reservation, Shortage
from offloadd.errors import PathUnavailable
from offloadd.model.device_event import EventName
from offloadd.model.enums import Path, Reason, Tier
from offloadd.model.requests import BlockBatch
from offloadd.model.slots import BLOCK_DTYPE
from offloadd.mover.messages import Job, Operation
from offloadd.offload.admission import Admission, Load
from offloadd.offload.bandwidth import Bandwidths, Direction
from offloadd.offload.devices import HOST, Device
from offloadd.offload.lanes import Lane
from offloadd.offload.moves import Move, PathUse
from offloadd.offload.namespaces import Namespaces
from offloadd.offload.regions import Regions
from offloadd.offload.sessions import Session
from offloadd.offload.stopping import Active, Stopping
from offloadd.offload.traffic import Traffic
from offloadd.offload.volume_link import VolumeLink
from offloadd.scheduler.job_class import JobClass
from offloadd.scheduler.rate import WriteBudget

log = structlog.get_logger()

#: Slabs that a volume may fail to open or cut before a request or spill stops waiting for it: a full disk is told in a fraction of a second, not at the
#: deadline, and arena slots do not stay pinned for it.
SLAB_FAILURES_MAX = 2


class Observer(Protocol):
    """Hears what requests did; the metrics implement it. Called on the event loop; must not block."""

    def request_done(self, operation: str, answer: Any) -> None:
        """A request was answered."""

    def bytes_moved(self, operation: str, uses: Iterable[PathUse]) -> None:
        """Bytes of a request that was answered before went these ways."""

    def blocks(self, operation: str, outcome: str, tier: Tier, count: int) -> None:
        """So many blocks of a request had this outcome."""

    def remote_blocks(self, operation: str, count: int) -> None:
        """So many blocks of a request passed between a GPU and a part of the arena on another NUMA node than the nearest."""


@dataclass(slots=True)
class Core:
    """Shared state of the use cases. Owned by the event-loop thread."""

    catalog: Catalog
    namespaces: Namespaces
    regions: Regions
    #: By name; HOST is always there.
    devices: dict[str, Device]
    observer: Observer
    arena_slab_bytes: int
    admission: Admission
    verify_target: int
    volumes: list[VolumeLink] = field(default_factory=list)
    bandwidths: Bandwidths = field(default_factory=Bandwidths)
    traffic: Traffic = field(default_factory=Traffic)
    counters: Counter[str] = field(default_factory=Counter)
    #: Keys whose evict is under way → set when it is over. A restore of such a key waits for it instead of missing.
    in_flight: dict[bytes, asyncio.Event] = field(default_factory=dict)
    active: dict[int, Active] = field(default_factory=dict)
    #: Ordinals of volumes that are open and give no blocks at present.
    unreadable: frozenset[int] = frozenset()
    stopping: Stopping = field(init=False)
    #: By the ordinals of volumes that have one.
    write_budgets: dict[int, WriteBudget] = field(default_factory=dict)
    draining: bool = False
    #: Verification of headers and checksums on restore. False only in the negative controls of tests: it proves that verification is what protects.
    verify: bool = True
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _tasks: set["asyncio.Task[Any]"] = field(default_factory=set)
    #: Moves of requests that are not over, though the request may have been answered.
    _unfinished: set[int] = field(default_factory=set)
    _all_finished: asyncio.Event = field(default_factory=asyncio.Event)
    _sequence: "itertools.count[int]" = field(default_factory=lambda: itertools.count(clock.wall_ns()))

    def __post_init__(self) -> None:
        self.stopping = Stopping(self.devices, self.counters)

    # -- requests --------------------------------------------------------------------------------------------------------------------

    def begin(self, session: Session, batches: Iterable[BlockBatch], request_id: str, deadline_s: float) -> tuple[int, Active]:
        """Admit a request, or raise `LimitExceeded` or `InvalidRequest` at once: overload is refused, not queued."""
        counts = [(batch.indices.shape[0], self.regions.by_number(batch.region).payload_bytes) for batch in batches]
        load = Load(1, sum(count for count, _ in counts), sum(count * payload_bytes for count, payload_bytes in counts))
        self.admission.enter(session.name, load, clock.monotonic_s())
        number = next(self._numbers)
        self.active[number] = active = Active(session, request_id, deadline_s, self.stopping.called_off, load)
        return number, active

    def end(self, number: int) -> None:
        """The request was answered."""
        active = self.active.pop(number)
        active.end()
        self.admission.leave(active.session.name, active.load, clock.monotonic_s())

    def cancel(self, session: Session, request_id: str) -> bool:
        """Stop the session's running requests with this id; whether there were any."""
        found = [active for active in self.active.values() if active.session is session and active.request_id == request_id and request_id]
        for active in found:
            active.stop(Reason.CANCELLED)
        return bool(found)

    def new_move(self, count: int) -> Move:
        """A move with a number of its own."""
        return Move(number=next(self._numbers), count=count)

    def sequences(self, count: int) -> npt.NDArray[np.uint64]:
        """Rising numbers for slot headers."""
        return np.fromiter(itertools.islice(self._sequence, count), dtype=np.uint64, count=count)

    def spawn(self, work: Any) -> "asyncio.Task[Any]":
        """Run a coroutine on its own, held until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault(error)

    def _fault(self, error: BaseException) -> None:
        self.counters["faults"] += 1
        log.error("bug: work in the background failed", exc_info=error)

    def at_end(self, move: Move, finish: Callable[[], None]) -> None:
        """Run `finish` when the move is over. A fault in it is ours and is logged: it must not stop the lane that brought the last result."""
        self._unfinished.add(move.number)

        def guarded() -> None:
            self._unfinished.discard(move.number)
            for name in move.devices:
                self.devices[name].mover.forget_move(move.number)
            try:
                finish()
            except Exception as error:
                self._fault(error)
            if not self._unfinished:
                self._all_finished.set()

        self._all_finished.clear()
        move.at_end(guarded)

    async def idle(self) -> None:
        """Wait until every move is over and everything spawned has ended."""
        while self._tasks or self._unfinished:
            if self._tasks:
                await asyncio.wait(set(self._tasks))
            if self._unfinished:
                await self._all_finished.wait()

    # -- jobs ------------------------------------------------------------------------------------------------------------------------

    def send_jobs(
        self,
        device: Device,
        lane: Lane,
        move: Move,
        operation: Operation,
        blocks: npt.NDArray[Any],
        *,
        slot_bytes: int,
        job_class: JobClass,
        deadline_s: float = 0.0,
        durable: bool = False,
        instance: int = 0,
        after_event: EventName = b"",
        require_path: bool = False,
        verify_target: int | None = None,
    ) -> None:
        """Queue blocks (BLOCK_DTYPE, `position` set) on one lane of a device. `instance`: the ordinal of the engine instance that asks. `verify_target`: other
        than configured."""
        move.devices.add(device.name)
        if blocks.shape[0] == 0:
            return
        order = Job(
            job=next(self._numbers),
            move=move.number,
            operation=int(operation),
            slot_bytes=slot_bytes,
            blocks=b"",
            deadline_ns=int(deadline_s * 1e9),
            submitted_ns=clock.monotonic_ns(),
            durable=durable,
            verify=self.verify,
            verify_target=self.verify_target if verify_target is None else verify_target,
            after_event=after_event,
            require_path=require_path,
        )
        lane.submit(move, order, blocks, job_class, instance=instance)

    def path_to(self, device: Device, volume: int, asked: Path, direction: Direction, payload_bytes: int) -> Path:
        """The path of a request that moves so many bytes between a device and a volume: the one asked for, or of several the one that was measured faster."""
        if asked in device.volume_paths or len(device.volume_paths) == 1:
            return asked
        return self.bandwidths.choice(device.name, volume, direction, payload_bytes)

    def lanes(self) -> list[Lane]:
        """All lanes."""
        return [lane for device in self.devices.values() for lane in device.lanes()]

    def late_count(self, volume: VolumeLink, now_ns: int) -> int:
        """Jobs that were sent to the volume and are past their deadlines, or that stand still."""
        return sum(lane.running_count if volume.health.stalled else lane.late_count(now_ns) for lane in self.volume_lanes(volume.ordinal))

    def volume_lanes(self, volume: int) -> list[Lane]:
        """All lanes to one volume."""
        return [lane for device in self.devices.values() for (ordinal, _), lane in device.volume_lanes.items() if ordinal == volume]

    def device(self, name: str) -> Device:
        """The device of this name or UUID. Raises `PathUnavailable`: there is none, or it can't be used."""
        # One that was refused since the configuration names its GPU twice stands for the other.
        usable = (one for one in self.devices.values() if not one.mover.given_up)
        found = next((one for one in usable if name == one.name or (one.uuid and one.uuid == name)), None) or self.devices.get(name)
        if found is None:
            # A GPU that can't be used has told no UUID: it may be the one that is meant.
            known = ", ".join(f"{one.name} ({one.note or one.uuid})" if one.is_gpu else one.name for one in self.devices.values())
            raise PathUnavailable(f"device {name!r} has no mover on this node; devices are {known}")
        if found.note:
            raise PathUnavailable(f"device {name!r} can't be used: {found.note}")
        return found

    @property
    def host(self) -> Device:
        """The device whose mover also moves blocks between the tiers."""
        return self.devices[HOST]

    # -- tiers -----------------------------------------------------------------------------------------------------------------------

    def serving_volumes(self) -> list[VolumeLink]:
        """Volumes that take blocks now."""
        return [volume for volume in self.volumes if volume.serving and volume.health.writes.admits and self.host.volume_lane(volume.ordinal) is not None]

    def turn(self, volume: int, *, reads: bool) -> None:
        """Blocks of this volume can be read from now on, or can't."""
        self.unreadable = self.unreadable - {volume} if reads else self.unreadable | {volume}

    def volume(self, ordinal: int) -> VolumeLink:
        """The volume with this ordinal in the catalog."""
        return next(volume for volume in self.volumes if volume.ordinal == ordinal)

    def reserve_volume(self, volume: int, slot_bytes: int, count: int) -> Reservation:
        """Slots to write to, as `Catalog.reserve_volume`, within the volume's write budget."""
        budget = self.write_budgets.get(volume)
        if budget is None:
            return self.catalog.reserve_volume(volume, slot_bytes, count)
        granted = budget.take(count, slot_bytes, clock.monotonic_ns())
        reservation = self.catalog.reserve_volume(volume, slot_bytes, granted)
        budget.give_back(granted - len(reservation), slot_bytes)
        return replace(reservation, shortage=Shortage.BUDGET) if len(reservation) == granted < count else reservation

    def arena_offsets(self, slabs: npt.NDArray[Any], slots: npt.NDArray[Any], slot_bytes: int) -> npt.NDArray[np.uint64]:
        """Byte offsets of arena slots."""
        return np.asarray(slabs.astype(np.uint64) * np.uint64(self.arena_slab_bytes) + slots.astype(np.uint64) * np.uint64(slot_bytes))

    def count_remote(self, operation: str, device: Device, slabs: npt.NDArray[Any]) -> None:
        """Count those of a request's arena slots that are not near to its device."""
        arena = self.catalog.arena
        if arena is not None and arena.nodes and (count := arena.remote_count(slabs, device.memory_node)):
            self.observer.remote_blocks(operation, count)

    def volume_blocks(self, blocks: npt.NDArray[Any], volume: VolumeLink, slabs: npt.NDArray[Any], slots: npt.NDArray[Any]) -> None:
        """Fill the fields that name a slot of a volume: place, nonce, generation is the caller's."""
        blocks["slab"] = slabs
        blocks["slot"] = slots
        for slab, mine in groups(slabs):
            blocks["nonce"][mine] = np.void(volume.nonce(slab))

    def fill_sources(self, blocks: npt.NDArray[Any], volume: int, slabs: npt.NDArray[Any], slots: npt.NDArray[Any], namespace_number: int) -> None:
        """Fill the fields that name existing slots of one namespace, so that the mover can tell whether the header that it reads is theirs."""
        link = self.volume(volume)
        self.volume_blocks(blocks, link, slabs, slots)
        for slab, mine in groups(slabs):
            blocks["generation"][mine] = link.pool.slabs[slab].generations[slots[mine]]
        blocks["namespace_ordinal"], blocks["namespace_epoch"] = self.namespaces.by_number(namespace_number).on_volumes.get(volume, (0, 0))


def groups(values: npt.NDArray[Any]) -> list[tuple[int, Any]]:
    """Each distinct value and an index of where it stands. Nearly always there is one, and sorting to learn that would cost more than the work on it."""
    if values.shape[0] and (values == values[0]).all():
        return [(int(values[0]), slice(None))]
    return [(int(value), values == value) for value in np.unique(values)]


def new_blocks(count: int) -> npt.NDArray[Any]:
    """Zeroed BLOCK_DTYPE records."""
    return np.zeros(count, dtype=BLOCK_DTYPE)

"""The front's end of one mover: what is mapped in it, which lanes it serves, and the fences it is asked for; told again to each fresh process.

One that is wedged is replaced (`supervision`). What its lanes were sent stays theirs until their sockets end (`lanes`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from offloadd import clock
from offloadd.errors import InvalidRequest, Unavailable
from offloadd.ipc.channel import FDS_MAX, AsyncChannel, socket_pair
from offloadd.model.region import Layout
from offloadd.mover.messages import (
    AddLane,
    ArenaLocked,
    ChosenMove,
    CloseMemory,
    ControlAnswer,
    CopiesChosen,
    Descriptors,
    Fenced,
    FenceMove,
    ForgetMove,
    Hello,
    KernelsFailed,
    LaneReady,
    LaneRefused,
    LastOrders,
    MapArena,
    Mapped,
    MapRegion,
    MemoryClosed,
    NotMapped,
    Piece,
    Ping,
    PlaneSpec,
    Pong,
    Shutdown,
    Unmapped,
    UnmapRegion,
)
from offloadd.offload.arena import ArenaMemory
from offloadd.offload.deadlines import result_by
from offloadd.offload.lanes import Lane
from offloadd.offload.processes import WorkerProcess
from offloadd.offload.supervision import Phase, Step, Supervision
from offloadd.tiers.scratch import NO_SCRATCH, Scratch

#: Region number of the arena in `Mapped`.
ARENA_REGION = 0

#: Pause between two tries of a GPU that can't be used, doubling up to the maximum. What stands in its way (memory that another process holds, a driver that is
#: being replaced) passes within seconds or not for hours, and a try is a process that starts and asks the driver: a minute costs little and is soon enough.
RETRY_PAUSE_S = 1.0
RETRY_PAUSE_MAX_S = 60.0

#: From the start of a GPU's mover to its first word, after which its driver is taken to hang. Without its persistence daemon a driver initializes the GPUs of
#: the node first, which takes seconds, not minutes; a longer limit would only let a hung one wait.
HELLO_TIMEOUT_S = 60.0

#: How long a wedged mover may take to close its mappings. It waits for the copies that run, of milliseconds; what takes longer does not end.
CLOSING_S = 1.0

#: From when on a mover that has not answered is told to be silent.
SILENT_NS = 2_000_000_000

#: Movers in a row whose context was lost while they measured kernels. Whatever else loses a context (an error of the GPU, a peer under MPS) hardly does it
#: twice in those milliseconds, and engines need a mover that stays.
MEASURED_LOSSES_MAX = 2

#: What is logged when a GPU's mover page-locks no more of the arena.
ARENA_LOCKED = "the arena was page-locked"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Mapping:
    """Engine memory to be mapped. The descriptors stay open as long as it may have to be mapped again."""

    region: int
    fds: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    layout: Layout
    #: On a GPU, one a memory; `fds` are the chunks of theirs that lie in chunks.
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """A lane and what its threads need: `fds` are the volume's data and synced descriptors, none for the arena."""

    lane: Lane
    thread_count: int
    staging_slot_bytes: int
    fds: tuple[int, ...] = ()
    volume_uuid: bytes = b""
    slab_bytes: int = 0
    data_offset: int = 0
    #: The device's part of the volume's scratch area.
    scratch: Scratch = NO_SCRATCH
    #: Called with what the mover says of it, each time that a mover starts: empty when it is served, else why not.
    on_settled: Callable[[str], None] = lambda _: None


class MoverLink:
    """One mover process, kept alive. Event-loop owned."""

    def __init__(
        self,
        *,
        device: str,
        module: str,
        environment: dict[str, str],
        refuse: Callable[[str], str],
        copies: str = "",
        numa: bool = True,
        native_copies: bool = True,
        wedged_s: float = 30.0,
        lost_max: int = 4,
    ) -> None:
        """`device`: "host", or a GPU as the mover is to find it, and then `copies`: what its copies go by, and `numa`: whether the mover is to run near to its
        GPU. `refuse(uuid)`: why there may not be a mover of the GPU with this UUID; empty if there may. `wedged_s`: how long it may be silent; `lost_max`: how
        many killed ones may wait in the kernel."""
        self.device = device
        #: Whether the device has been given up: there is no process, and there will be none.
        self.given_up = False
        self._refuse = refuse
        self._options = _options(numa=numa, native_copies=native_copies)
        self._retry: asyncio.TimerHandle | None = None
        #: Until the process says hello, if it is a GPU's.
        self._silence: asyncio.TimerHandle | None = None
        self._retry_pause_s = RETRY_PAUSE_S
        #: What the mover said of its device; None before it has.
        self.hello: Hello | None = None
        self.process: WorkerProcess[ControlAnswer] = WorkerProcess(
            name=f"mover {device}",
            module=module,
            incoming=ControlAnswer,
            on_start=self._tell,
            on_message=self._on_message,
            on_lost=self._on_lost,
            environment=environment,
            arguments=_arguments(device, copies, self._options),
            # A GPU goes on with copies that it was told to make.
            code_alone=device == "host",
            lost_max=lost_max,
        )
        self.supervision = Supervision(wedged_ns=int(wedged_s * 1e9), closing_ns=int(CLOSING_S * 1e9))
        #: Whether the present process has said hello.
        self._has_spoken = False
        #: To it, for its last orders.
        self._last: AsyncChannel[MemoryClosed] | None = None
        #: Movers so far, one after the other, whose context was lost while they measured what copies go by.
        self._measured_losses = 0
        self._arena: ArenaMemory | None = None
        self._mappings: dict[int, Mapping] = {}
        self._lanes: dict[int, LaneSpec] = {}
        self._mapping: dict[int, asyncio.Future[None]] = {}
        self._unmapping: dict[int, asyncio.Future[None]] = {}
        self._fencing: dict[int, asyncio.Future[None]] = {}
        #: Moves with a fence in the present process: the only ones that it must be told to forget.
        self._fenced: set[int] = set()
        self._settled: set[int] = set()
        self._settled_changed = asyncio.Event()

    def start(self, arena: ArenaMemory | None) -> None:
        """Spawn the process."""
        self._arena = arena
        self.process.start()

    # -- regions ---------------------------------------------------------------------------------------------------------------------

    async def map_region(self, mapping: Mapping, deadline_s: float) -> None:
        """Map a region; when it returns moves may use it.

        Raises `InvalidRequest` if the mover refuses it, `Unavailable` if the mover died, `DeadlineExpired` if it does not answer in time; nothing changed then.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._mappings[mapping.region] = mapping
        self._mapping[mapping.region] = future
        try:
            self._send_mapping(mapping)
            await result_by(deadline_s, future, f"the mover of device {self.device} did not map the region by the deadline; repeat")
        except InvalidRequest:
            self._mappings.pop(mapping.region, None)
            raise
        except BaseException:
            # Also when the caller hung up. A mover that maps it later unmaps it right away: it obeys in order.
            self.unmap_region(mapping.region)
            raise
        finally:
            self._mapping.pop(mapping.region, None)

    def unmap_region(self, region: int) -> "asyncio.Future[None]":
        """Forget a region now; the future is done when no mapping is left, be it that the mover unmapped it or that it died."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._mappings.pop(region, None) is None or not self.process.alive:
            future.set_result(None)
            return future
        self._unmapping[region] = future
        future.add_done_callback(lambda _: self._unmapping.pop(region, None))
        self.process.send(UnmapRegion(region=region))
        return future

    def _send_mapping(self, mapping: Mapping) -> None:
        ahead = max(0, len(mapping.fds) - 1) // FDS_MAX * FDS_MAX
        for start in range(0, ahead, FDS_MAX):
            self.process.send(Descriptors(), mapping.fds[start : start + FDS_MAX])
        self.process.send(
            MapRegion(
                region=mapping.region,
                memory_bytes=mapping.memory_bytes,
                block_count=mapping.layout.block_count,
                planes=tuple(PlaneSpec(plane.memory, plane.offset_bytes, plane.block_stride_bytes, plane.block_bytes) for plane in mapping.layout.planes),
                pieces=mapping.pieces,
            ),
            mapping.fds[ahead:],
        )

    # -- lanes -----------------------------------------------------------------------------------------------------------------------

    def add_lane(self, spec: LaneSpec) -> None:
        """Serve a lane, now and by each later process."""
        if self.given_up:
            spec.on_settled(self._note)
            return
        self._lanes[spec.lane.number] = spec
        if self.process.alive:
            self._send_lane(spec)

    def _send_lane(self, spec: LaneSpec) -> None:
        ours, theirs = socket_pair()
        self.process.send(
            AddLane(
                lane=spec.lane.number,
                path=spec.lane.path.name.lower(),
                thread_count=spec.thread_count,
                staging_slot_bytes=spec.staging_slot_bytes,
                volume_uuid=spec.volume_uuid,
                slab_bytes=spec.slab_bytes,
                data_offset=spec.data_offset,
                scratch_offset=spec.scratch.offset,
                scratch_bytes=spec.scratch.size_bytes,
            ),
            (theirs.fileno(), *spec.fds),
        )
        self.process.after_sent(theirs.close)
        spec.lane.connect(ours)

    def serves(self, lane: int) -> bool:
        """Whether the present process has opened the lane; before it has, jobs wait in it."""
        return lane in self._settled

    async def lanes_ready(self) -> None:
        """Wait until every lane's threads stand, or were refused."""
        while not self._settled >= set(self._lanes):
            self._settled_changed.clear()
            await self._settled_changed.wait()

    # -- fences ----------------------------------------------------------------------------------------------------------------------

    def fence(self, move: int) -> "asyncio.Future[None]":
        """Ask for a fence now; when the future is done, no copy of the move touches engine memory any more. Only for moves that are not over."""
        future = self._fencing.get(move)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            if not self.process.alive:
                future.set_result(None)
                return future
            self._fencing[move] = future
            self._fenced.add(move)
            self.process.send(FenceMove(move=move))
        return future

    def forget_move(self, move: int) -> None:
        """The move is over; its fence may go."""
        if move in self._fenced:
            self._fenced.discard(move)
            self.process.send(ForgetMove(move=move))

    # -- the process -----------------------------------------------------------------------------------------------------------------

    def look(self, now_ns: int, stalled_ns: int) -> None:
        """See how the process does, and replace it if it is wedged. `stalled_ns`: how long its lane to the arena has stood still."""
        if not self.process.alive or not self._has_spoken:
            # It is only asked once it has said hello: until then its interpreter starts, and its driver.
            return
        if self.supervision.silent_ns or self.supervision.phase is Phase.KILLED:
            self.process.look()
        match self.supervision.look(now_ns, stalled_ns=stalled_ns):
            case Step.PING:
                self.process.send(Ping())
            case Step.CLOSE:
                log.error("mover is wedged; replacing it", device=self.device, pid=self.process.pid, why=self.supervision.reason)
                if self._last is not None:
                    self._last.send(CloseMemory())
            case Step.SUPERSEDE:
                self.process.supersede()
            case Step.KILL:
                log.error("mover does not close its mappings of engine memory; killing it", device=self.device, pid=self.process.pid, waited_s=CLOSING_S)
                self.process.kill()

    @property
    def state(self) -> str:
        """Of a process that runs: "up", "silent" (it has not answered for some time), or "closing" (it is being replaced)."""
        if self.supervision.phase in (Phase.WELL, Phase.ASKED):
            return "silent" if self.supervision.silent_ns >= SILENT_NS else "up"
        return "closing"

    def _on_last(self, message: MemoryClosed, fds: list[int]) -> None:
        log.info("mover has closed its mappings of engine memory", device=self.device, pid=self.process.pid)
        self.supervision.closed()

    def _tell(self) -> None:
        self._has_spoken = False
        self.supervision.started(clock.monotonic_ns())
        ours, theirs = socket_pair()
        self._last = AsyncChannel(ours, MemoryClosed, on_message=self._on_last, on_close=lambda: None, takes_fds=False)
        self.process.send(LastOrders(), (theirs.fileno(),))
        self.process.after_sent(theirs.close)
        if self.device != "host":
            self._silence = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._unheard)
        if (arena := self._arena) is not None:
            message = MapArena(arena_bytes=arena.arena_bytes, huge_pages=arena.huge_pages, slab_bytes=arena.slab_bytes, parts=arena.parts)
            self.process.send(message, (arena.fd,))
        for mapping in self._mappings.values():
            self._send_mapping(mapping)
        for spec in self._lanes.values():
            self._send_lane(spec)

    def _on_message(self, message: ControlAnswer, fds: list[int]) -> None:
        match message:
            case Hello():
                self._greeted(message)
            case Mapped():
                _resolve(self._mapping.get(message.region))
            case NotMapped():
                if message.region == ARENA_REGION:
                    log.error("mover can't map the arena", device=self.device, error=message.error)
                _resolve(self._mapping.get(message.region), InvalidRequest(message.error))
            case Unmapped():
                _resolve(self._unmapping.get(message.region))
            case LaneReady():
                self._lane_settled(message.lane, "")
            case LaneRefused():
                self._lane_settled(message.lane, message.why)
            case Fenced():
                _resolve(self._fencing.pop(message.move, None))
            case Pong():
                self.supervision.answered()
            case ArenaLocked():
                told = {"device": self.device, "locked_bytes": message.locked_bytes, "arena_bytes": message.arena_bytes}
                if message.why:
                    log.warning(ARENA_LOCKED, **told, error=f"copies to and from the others are slower: {message.why}")
                else:
                    log.info(ARENA_LOCKED, **told)
            case CopiesChosen():
                log.info(
                    "copies were chosen", device=self.device, shape=message.shape or "all", moves=[_told(move) for move in message.moves], note=message.note
                )
                if message.moves:
                    self._measured_losses = 0
            case KernelsFailed():
                self._kernels_failed(message)

    def _kernels_failed(self, message: KernelsFailed) -> None:
        self._measured_losses += 1
        if not message.chosen and self._measured_losses < MEASURED_LOSSES_MAX:
            log.warning("the context was lost while copies were measured; the next mover measures them again", device=self.device, error=message.why)
            return
        log.warning("kernels failed; later movers go by the copy engines", device=self.device, error=message.why)
        self.process.arguments = _arguments(self.device, "engines", self._options)

    @property
    def _note(self) -> str:
        return self.hello.note if self.hello is not None else ""

    def _unheard(self) -> None:
        note = f"its driver has not answered within {HELLO_TIMEOUT_S:g} s: it hangs, or is very slow to initialize (nvidia-persistenced keeps it ready)"
        # It may still answer in the pause, and is taken then.
        self._unusable(Hello(pid=self.process.pid, paths=(), note=note), self.process.replace)

    def _unusable(self, hello: Hello, renew: Callable[[], None]) -> None:
        before, self.hello = self._note, hello
        if hello.note != before:
            log.warning("the device can't be used; trying again with growing pauses", device=self.device, error=hello.note)
        # A process of its own for each try: a driver that has failed to start in one does not start in it later.
        self._retry = asyncio.get_running_loop().call_later(self._retry_pause_s, renew)
        self._retry_pause_s = min(2 * self._retry_pause_s, RETRY_PAUSE_MAX_S)

    def _greeted(self, hello: Hello) -> None:
        self._end_timers()
        self._has_spoken = True
        self.supervision.started(clock.monotonic_ns())
        if hello.note:
            self._unusable(hello, lambda: self.process.renew(Shutdown()))
            return
        self.hello = hello
        if why := self._refuse(hello.uuid):
            self._give_up(why)
        else:
            self._retry_pause_s = RETRY_PAUSE_S
            more = {name: text for name, text in (("placement", hello.placement), ("copies_by", hello.copies_by)) if text}
            log.info("mover is up", device=self.device, uuid=hello.uuid, pid=hello.pid, paths=list(hello.paths), **more)

    def _end_timers(self) -> None:
        for timer in (self._retry, self._silence):
            if timer is not None:
                timer.cancel()
        self._retry = self._silence = None

    def _give_up(self, why: str) -> None:
        """Serve the device no more: its process ends, and with it what it holds of the GPU."""
        assert self.hello is not None
        self.hello = msgspec.structs.replace(self.hello, paths=(), uuid="", note=why, gpu=None)
        self.given_up = True
        log.error("the device is not served", device=self.device, error=why)
        self.process.expect_exit()
        self.process.send(Shutdown())
        given_up, self._lanes = self._lanes, {}
        for spec in given_up.values():
            spec.on_settled(why)
        self._settled_changed.set()

    def _lane_settled(self, lane: int, why: str) -> None:
        if lane not in self._lanes:
            # Of a device that was given up meanwhile.
            return
        if why:
            log.warning("a way is not served", device=self.device, volume=self._lanes[lane].lane.name, path=self._lanes[lane].lane.path.name.lower(), why=why)
        self._settled.add(lane)
        self._settled_changed.set()
        self._lanes[lane].on_settled(why)

    def _on_lost(self) -> None:
        self._end_timers()
        if self._last is not None:
            self._last.close()
            self._last = None
        # A dead process maps and copies nothing: fences and unmaps hold; a region that was being mapped is not.
        self._settled.clear()
        for future in (*list(self._unmapping.values()), *self._fencing.values()):
            _resolve(future)
        self._fencing.clear()
        self._fenced.clear()
        for future in list(self._mapping.values()):
            _resolve(future, Unavailable(f"the mover of device {self.device} died while it mapped the region; repeat"))


def _options(*, numa: bool, native_copies: bool) -> tuple[str, ...]:
    return *(() if numa else ("--no-numa",)), *(() if native_copies else ("--no-native",))


def _arguments(device: str, copies: str, options: tuple[str, ...]) -> tuple[str, ...]:
    return "--device", device, *(("--copies", copies) if copies else ()), *options


def _told(move: ChosenMove) -> str:
    by = "kernels" if move.kernels else "copy engines"
    return f"{move.name} by {by} (GB/s: kernels {move.kernels_bytes_per_s / 1e9:.1f}, copy engines {move.engines_bytes_per_s / 1e9:.1f})"


def _resolve(future: "asyncio.Future[None] | None", error: Exception | None = None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)

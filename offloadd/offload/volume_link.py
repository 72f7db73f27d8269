"""The front's end of one volume: its keeper process, its state, and the catalog's pool that its slabs make up.

opening ──VolumeOpened──▶ recovering ──ScanFinished──▶ serving
  │ ▲
  │ └──after a pause── retrying        Failed, by what may pass: a device that is away, a lock that a dying daemon still holds
  ├──Failed──────────────▲
  └──Failed──▶ failed                  by what no time mends: a foreign or damaged file
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import numpy as np
import structlog

from offloadd import clock
from offloadd.catalog.catalog import Catalog
from offloadd.catalog.pool import Pool, Slab, SlabState
from offloadd.errors import OffloaddError, Unavailable
from offloadd.keeper.messages import (
    SUMMARY_RECORDS_MAX,
    AddNamespace,
    Answer,
    CloseSlab,
    CloseVolume,
    CutSlab,
    Done,
    DropNamespace,
    Failed,
    Inventory,
    KeeperUp,
    NamespaceAdded,
    OpenSlab,
    OpenVolume,
    Probe,
    Recovered,
    ScanFinished,
    SlabInfo,
    SlabReady,
    SummaryPart,
    VolumeAnswers,
    VolumeOpened,
)
from offloadd.machine.place import nvme_paths
from offloadd.machine.system import System
from offloadd.model.slots import FLAG_KEEP
from offloadd.offload.deadlines import first_of
from offloadd.offload.keeper_requests import CUT_WAIT_S, KeeperRequests
from offloadd.offload.namespaces import NamespaceEntry, Namespaces
from offloadd.offload.processes import WorkerProcess
from offloadd.offload.volume_health import HealthOptions, VolumeHealth
from offloadd.tiers.format import SUMMARY_DTYPE, slot_count_for

#: How long after a volume's opening a restore of an unknown block waits for its scan. A million blocks take 1 to 2 s, and to recompute takes longer than that.
SCAN_WAIT_S = 5.0

log = structlog.get_logger()

#: Open slabs above `open_slabs` are closed one after the other; a pause between failures keeps a sick volume from being asked all the time.
CLOSE_RETRY_S = 1.0
SLAB_RETRY_S = 0.1
#: Pause between two tries to open a volume, doubling up to the maximum: a path that comes back, or the end of the process that holds the lock, is noticed
#: within seconds, and a try costs one message and a system call.
OPEN_RETRY_S = 0.25
OPEN_RETRY_S_MAX = 5.0
#: How long a start waits for a keeper to take requests: its interpreter starts, as this one did.
KEEPER_START_WAIT_S = 10.0
#: And then for the volume to be locked, and its first sectors to be read. What takes longer hangs, or another process has it still: the daemon is ready without
#: it, and serves it once it answers. Two seconds are all that a start may take.
ANSWER_WAIT_S = 0.5
#: And then for its tables, of all slabs.
OPEN_WAIT_S = 2.0
#: Kinds of failures at opening that stay until a person mends the file or the configuration.
_LASTING = frozenset({"VolumeForeign", "VolumeDamaged", "InvalidRequest"})


@dataclass(frozen=True, slots=True)
class VolumeOptions:
    """What the configuration says of one volume. Limits are 0 for none."""

    path: str
    io_threads: int
    open_slabs: int
    prewrite: bool
    evict_bytes_per_s_max: int = 0
    write_bytes_per_day_max: int = 0


class VolumeLink:
    """One volume, kept open by its keeper. Event-loop owned.

    `on_opened(self)`: geometry and descriptors are known; lanes may be added. `keep_until_s()`: until when recovered keeps stay. `on_turn(self)`: a breaker of
    its health has changed its state.
    """

    def __init__(
        self,
        options: VolumeOptions,
        *,
        catalog: Catalog,
        namespaces: Namespaces,
        keep_until_s: Callable[[], float],
        on_opened: Callable[["VolumeLink"], None],
        on_turn: Callable[["VolumeLink"], None],
        health: HealthOptions,
    ) -> None:
        self.options = options
        self.health = VolumeHealth(health, lambda: on_turn(self))
        self.state = "opening"
        #: Why it can't be opened.
        self.failure = ""
        #: When that is tried again; meaningful while the state is "retrying".
        self.retry_at_s = 0.0
        self._retry_pause_s = OPEN_RETRY_S
        self._retry: asyncio.TimerHandle | None = None
        self.opened: VolumeOpened | None = None
        self.ordinal = -1
        self.fds: tuple[int, ...] = ()
        self.scan: ScanFinished | None = None
        self.recovered_blocks = 0
        #: Slabs that could not be opened or cut so far, restarts of the keeper aside.
        self.slab_failures = 0
        #: Set and replaced whenever a slab became ready, or could not: waiting evicts look again.
        self.slabs_changed = asyncio.Event()
        self.settled = asyncio.Event()
        #: Set once a keeper takes requests, and once the volume has answered it.
        self.kept = asyncio.Event()
        self.answers = asyncio.Event()
        self.process: WorkerProcess[Answer] = WorkerProcess(
            name=f"keeper {options.path}",
            module="offloadd.keeper.main",
            incoming=Answer,
            on_start=self._open,
            on_message=self._on_answer,
            on_lost=self._on_lost,
        )
        self._catalog = catalog
        self._namespaces = namespaces
        self._keep_until_s = keep_until_s
        self._on_opened = on_opened
        self._requests = KeeperRequests(self.process, options.path, on_late=self.health.suspect)
        self._tasks: set[asyncio.Task[None]] = set()
        self._dirty: dict[int, bool] = {}
        self._by_ordinal: dict[int, NamespaceEntry] = {}
        self._started_s = 0.0
        #: Until when restores of unknown blocks wait for its scan.
        self.scan_until_s = 0.0
        self.recovery_s = 0.0

    # -- what callers ask ------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Spawn the keeper, which opens the volume."""
        self._started_s = clock.monotonic_s()
        self.process.start()

    async def opened_in_time(self) -> bool:
        """At a start: wait until it serves or can't, but no longer for one that does not answer. Whether it is settled."""
        for wait_s, events in ((KEEPER_START_WAIT_S, [self.kept]), (ANSWER_WAIT_S, [self.answers, self.settled]), (OPEN_WAIT_S, [self.settled])):
            if not await first_of(events, wait_s):
                break
        return self.settled.is_set()

    async def probe(self) -> None:
        """Read a sector; returns when it was read, however long that takes. Raises `VolumeError` if it can't be, `Unavailable` if nobody could be asked."""
        await self._requests.ask(Probe(ticket=self._requests.ticket()), wait_s=None)

    @property
    def nvme_paths(self) -> str:
        """The NVMe controllers behind it with their states, for people."""
        return nvme_paths(System(), self.options.path) or "none"

    @property
    def serving(self) -> bool:
        """Whether blocks may be read and written (also while it is still being scanned)."""
        return self.state in ("recovering", "serving")

    @property
    def scanning(self) -> bool:
        """Whether blocks that are not known yet may still be found, soon. False once the scan takes longer than SCAN_WAIT_S: nobody waits for a slow volume."""
        return self.state == "recovering" and self.health.reads.admits and clock.monotonic_s() < self.scan_until_s

    @property
    def pool(self) -> Pool:
        """The catalog's pool of this volume; only after it was opened."""
        return self._catalog.volumes[self.ordinal]

    def nonce(self, slab: int) -> bytes:
        """The nonce of a cut slab."""
        return self.pool.slabs[slab].nonce

    async def add_namespace(self, entry: NamespaceEntry) -> None:
        """Make sure that the namespace stands in the volume's table. Raises an error of offloadd.errors if it can't be entered."""
        if self.ordinal in entry.on_volumes:
            return
        request = AddNamespace(ticket=self._requests.ticket(), namespace_id=entry.namespace_id, tenant=entry.tenant, fields=entry.fields)
        # Without a limit: it is asked in the background, and a keeper that hangs shall not be asked again and again.
        answer = await self._requests.ask(request, wait_s=None)
        assert isinstance(answer, NamespaceAdded)
        entry.on_volumes[self.ordinal] = (answer.ordinal, answer.epoch)

    async def drop_namespace(self, entry: NamespaceEntry) -> None:
        """Drop it, synced."""
        await self._requests.ask(DropNamespace(ticket=self._requests.ticket(), namespace_id=entry.namespace_id))
        entry.on_volumes.pop(self.ordinal, None)

    def grant_wishes(self) -> None:
        """Have the keeper do what the pool asked for since the last call, and close slabs beyond the limit."""
        for wish in self.pool.take_wishes():
            self._spawn(self._prepare(wish.slab, wish.slot_bytes))
        slab = self.pool.next_to_close()
        if slab is not None and self.serving:
            self.pool.closing(slab)
            self._spawn(self._close_slab(slab))

    async def close(self, *, timeout_s: float) -> None:
        """Write the summaries of all open slabs, so that the next start scans nothing, and end the keeper."""
        if self.process.alive and self.serving and not self.health.reads.admits:
            log.warning("volume not closed cleanly, since it does not answer; the next start scans its open slabs", volume=self.options.path)
        elif self.process.alive and self.serving:
            try:
                async with asyncio.timeout(timeout_s):
                    if self._tasks:
                        await asyncio.wait(self._tasks)
                    for slab in self.pool.open_slabs():
                        if slab.reserved_count == 0:
                            self.pool.closing(slab)
                            await self._close_slab(slab)
                    self.process.expect_exit()
                    await self._requests.ask(CloseVolume(ticket=self._requests.ticket()), wait_s=None)
            except (TimeoutError, OffloaddError) as error:
                log.warning("volume not closed cleanly; the next start scans its open slabs", volume=self.options.path, error=str(error) or "timed out")
        self._forget_retry()
        await self.process.stop(timeout_s=2.0)
        for fd in self.fds:
            os.close(fd)
        self.fds = ()

    # -- slabs -----------------------------------------------------------------------------------------------------------------------

    async def _prepare(self, slab: int, slot_bytes: int) -> None:
        ticket = self._requests.ticket()
        request = CutSlab(ticket=ticket, slab=slab, slot_bytes=slot_bytes) if slot_bytes else OpenSlab(ticket=ticket, slab=slab)
        try:
            answer = await self._requests.ask(request, wait_s=CUT_WAIT_S)
        except OffloaddError as error:
            log.warning("slab can't be opened", volume=self.options.path, slab=slab, error=str(error))
            if not isinstance(error, Unavailable):
                self.slab_failures += 1
            # Whoever waits for a slab asks again at once: without a pause a keeper that is away would be asked in a loop.
            await asyncio.sleep(SLAB_RETRY_S)
            self.pool.failed(slab, cut=bool(slot_bytes))
        else:
            assert isinstance(answer, SlabReady)
            self.pool.ready(slab, answer.nonce)
        self.wake()
        self.grant_wishes()

    async def _close_slab(self, slab: Slab) -> None:
        try:
            for part in self._summary(slab):
                self.process.send(part)
            # Without a limit: it stays unused until the keeper has told what became of it. Were it written to meanwhile, a late close would put a
            # summary of before on the volume, and after a crash what was written since would not be found.
            await self._requests.ask(CloseSlab(ticket=self._requests.ticket(), slab=slab.index), wait_s=None)
        except OffloaddError as error:
            log.warning("slab can't be closed; it is scanned at the next start, if it stays so", volume=self.options.path, slab=slab.index, error=str(error))
            await asyncio.sleep(CLOSE_RETRY_S)
            self.pool.closed(slab.index, clean=False)
        else:
            self.pool.closed(slab.index, clean=True)
        self.wake()

    def _summary(self, slab: Slab) -> list[SummaryPart]:
        records = np.zeros(slab.slot_count, dtype=SUMMARY_DTYPE)
        records["generation"] = slab.generations
        live = np.flatnonzero(slab.rows)
        keys, payload_bytes, numbers, kept = self._catalog.describe(slab.rows[live])
        places = np.array([self._namespaces.by_number(int(number)).on_volumes.get(self.ordinal, (0, 0)) for number in numbers], dtype=np.uint32)
        records["key"][live] = keys
        records["payload_bytes"][live] = payload_bytes
        records["flags"][live] = kept
        if live.shape[0]:
            records["namespace_ordinal"][live] = places[:, 0]
            records["namespace_epoch"][live] = places[:, 1]
        return [
            SummaryPart(slab=slab.index, first=first, records=records[first : first + SUMMARY_RECORDS_MAX].tobytes())
            for first in range(0, slab.slot_count, SUMMARY_RECORDS_MAX)
        ]

    def wake(self) -> None:
        """Have those who wait for its slabs, or its scan, look again."""
        changed, self.slabs_changed = self.slabs_changed, asyncio.Event()
        changed.set()

    # -- the keeper ------------------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._forget_retry()
        if self.opened is None:
            self.state = "opening"
        self.process.send(
            OpenVolume(ticket=0, path=self.options.path, io_threads=self.options.io_threads, prewrite=self.options.prewrite, recover=self.opened is None),
            self.fds,
        )

    def _on_answer(self, answer: Answer, fds: list[int]) -> None:
        match answer:
            case KeeperUp():
                self.kept.set()
            case VolumeAnswers():
                self.answers.set()
            case VolumeOpened():
                self._on_volume_opened(answer, fds)
            case Inventory():
                if self.state == "opening":
                    self._adopt(answer)
            case Recovered():
                if self.state == "recovering":
                    self._recover(answer)
            case ScanFinished():
                self._on_scan_finished(answer)
            case Failed(ticket=0):
                self._fail(answer)
            case Done() | Failed() | NamespaceAdded() | SlabReady():
                self._requests.answered(answer)

    def _on_volume_opened(self, answer: VolumeOpened, fds: list[int]) -> None:
        self.failure, self._retry_pause_s = "", OPEN_RETRY_S
        if self.opened is not None:
            # A keeper that was started again: we know all it could tell, and hold the descriptors that it adopted.
            for fd in fds:
                os.close(fd)
            return
        self.opened = answer
        self.fds = tuple(fds)
        self.ordinal = self._catalog.add_volume(
            slab_count=answer.slab_count,
            slot_count_for=lambda slot_bytes: slot_count_for(answer.slab_bytes, slot_bytes),
            open_slabs_max=self.options.open_slabs,
        )

    def _adopt(self, inventory: Inventory) -> None:
        for namespace in inventory.namespaces:
            self._namespaces.enter(namespace.namespace_id).on_volumes[self.ordinal] = (namespace.ordinal, namespace.epoch)
        for slab in inventory.slabs:
            self._adopt_slab(slab)
        if not inventory.last:
            return
        self.state = "recovering"
        self.scan_until_s = clock.monotonic_s() + SCAN_WAIT_S
        self._by_ordinal = self._namespaces.by_volume_ordinal(self.ordinal)
        assert self.opened is not None
        log.info(
            "volume is open",
            volume=self.options.path,
            uuid=self.opened.volume_uuid.hex(),
            slabs=self.opened.slab_count,
            cut=self.pool.cut_count,
            file_system=self.opened.file_system,
            direct_io=self.opened.direct_io or self.opened.direct_io_note,
        )
        self._on_opened(self)
        self.settled.set()

    def _adopt_slab(self, slab: SlabInfo) -> None:
        self.pool.adopt(slab.slab, slot_bytes=slab.slot_bytes, slot_count=slab.slot_count, nonce=slab.nonce)
        self._dirty[slab.slab] = slab.dirty

    def _recover(self, part: Recovered) -> None:
        records = np.frombuffer(part.records, dtype=SUMMARY_DTYPE)
        slab = self.pool.slabs[part.slab]
        slab.generations[part.first : part.first + records.shape[0]] = records["generation"]
        live = np.flatnonzero(records["payload_bytes"])
        if live.shape[0]:
            found = records[live]
            ordinals, inverse = np.unique(found["namespace_ordinal"], return_inverse=True)
            entries = [self._by_ordinal.get(int(ordinal)) for ordinal in ordinals]
            numbers = np.array([entry.number if entry is not None else -1 for entry in entries], dtype=np.int32)[inverse]
            known = numbers >= 0
            self.recovered_blocks += self._catalog.recover(
                self.ordinal,
                part.slab,
                (live + part.first).astype(np.uint32)[known],
                found["key"][known],
                payload_bytes=found["payload_bytes"][known],
                namespaces=numbers[known],
                kept=(found["flags"][known] & FLAG_KEEP) != 0,
                keep_until_s=self._keep_until_s(),
            )
        if part.last:
            self.pool.recovered(part.slab, dirty=self._dirty[part.slab])
            self.wake()

    def _on_scan_finished(self, scan: ScanFinished) -> None:
        if self.scan is not None:
            return
        self.scan = scan
        self.state = "serving"
        self.recovery_s = clock.monotonic_s() - self._started_s
        log.info(
            "volume is recovered",
            volume=self.options.path,
            blocks=self.recovered_blocks,
            slabs_from_summary=scan.slabs_from_summary,
            slabs_scanned=scan.slabs_scanned,
            header_bytes_read=scan.header_bytes_read,
            headers_bad=scan.headers_bad,
            seconds=round(self.recovery_s, 3),
        )
        self.wake()
        self.grant_wishes()

    def _fail(self, answer: Failed) -> None:
        """The keeper can't open the volume; or one that was started again can't take it over, and meanwhile movers go on with what is open."""
        path, lasting = self.options.path, answer.kind in _LASTING
        before, self.failure = self.failure, answer.error
        if lasting:
            if self.opened is None:
                self.state = "failed"
                self.process.expect_exit()
            log.error("volume can't be used; the daemon serves without it", volume=path, kind=answer.kind, error=answer.error)
        else:
            if self.opened is None:
                self.state = "retrying"
            pause_s = self._retry_pause_s
            self._retry_pause_s = min(2 * pause_s, OPEN_RETRY_S_MAX)
            self.retry_at_s = clock.monotonic_s() + pause_s
            self._retry = asyncio.get_running_loop().call_later(pause_s, self._open)
            if answer.error != before:
                log.warning(
                    "volume can't be opened; trying again with growing pauses",
                    volume=path,
                    kind=answer.kind,
                    error=answer.error,
                    pause_s=pause_s,
                    nvme=self.nvme_paths,
                )
        self.settled.set()

    def _forget_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _on_lost(self) -> None:
        # A fresh process opens by itself.
        self._forget_retry()
        self._requests.lost()
        if self.state == "recovering":
            # Slabs that were not told whole stay as they are: their blocks are not found until the next start. A fresh keeper does not scan again,
            # since slots of recovered slabs may have been handed out meanwhile.
            for slab in self.pool.slabs:
                if slab.state == SlabState.SCANNING:
                    self.pool.recovered(slab.index, dirty=self._dirty[slab.index])
            self.state = "serving"
            self.wake()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("bug: work on a volume failed", volume=self.options.path, exc_info=error)

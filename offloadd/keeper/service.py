"""The keeper's requests: taken in order on one thread, long work handed to a small pool, each answered exactly once.

Requests for one slab wait for each other (also for the slab's scan); requests for different slabs, and for the namespace table, do not.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from offloadd.errors import InvalidRequest, OffloaddError, Unavailable
from offloadd.ipc.channel import Channel
from offloadd.keeper.messages import (
    SUMMARY_RECORDS_MAX,
    AddNamespace,
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
    Ping,
    Probe,
    Recovered,
    Request,
    SlabInfo,
    SlabReady,
    SummaryPart,
    VolumeAnswers,
    VolumeOpened,
)
from offloadd.keeper.scan import Scanner
from offloadd.keeper.summaries import SummaryInbox
from offloadd.keeper.volume import Volume, open_kept_volume
from offloadd.tiers.format import Array
from offloadd.tiers.slab_header import SlabHeader
from offloadd.tiers.volume_io import read_past_cache

#: Threads that cut and close slabs. A prewrite alone fills the device; the second lets a close pass it.
_SLAB_THREADS = 2
_IO_THREADS_MAX = 64
_INVENTORY_SLABS = 512
_INVENTORY_NAMESPACES = 512

SlabRequest = CutSlab | OpenSlab | SummaryPart | CloseSlab
Ticketed = OpenVolume | AddNamespace | DropNamespace | CutSlab | OpenSlab | CloseSlab | CloseVolume | Ping | Probe
Item = TypeVar("Item")


class Keeper:
    """Serves one volume to one front. `run` belongs to the main thread; what other threads finish comes back to it through `_post`."""

    def __init__(self, channel: Channel[Request]) -> None:
        self._channel = channel
        self._volume: Volume | None = None
        self._prewrite = True
        self._slab_pool = ThreadPoolExecutor(max_workers=_SLAB_THREADS, thread_name_prefix="slab")
        self._stopping = threading.Event()
        self._summaries = SummaryInbox()
        #: Slabs at work (cut, closed, or not yet told), with the requests that wait for them.
        self._busy: dict[int, deque[SlabRequest]] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        #: Between a check of the live namespaces and the message built on it, no drop may be answered.
        self._namespace_lock = threading.Lock()

    def run(self) -> None:
        """Serve until the front closes the socket or the volume. An I/O error is an answer, never the end."""
        poller = select.poll()
        poller.register(self._channel.sock, select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        self._send(KeeperUp())
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                while self._posted:
                    self._posted.popleft()()
            if self._channel.sock.fileno() in ready:
                received = self._channel.receive()
                if received is None:
                    return
                request, fds = received
                if isinstance(request, CloseVolume):
                    self._stop(request)
                    return
                self._take(request, fds)

    def _post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)
        os.eventfd_write(self._wake_fd, 1)

    def _send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        try:
            self._channel.send(message, fds)
        except (BrokenPipeError, ConnectionResetError):
            # Nobody is left to serve, and threads may sit in an I/O call for minutes; everything that counts is on the device.
            os._exit(0)

    def _take(self, request: Request, fds: list[int]) -> None:
        if isinstance(request, OpenVolume):
            self._answer(request, lambda: self._open(request, fds))
            return
        for fd in fds:
            os.close(fd)
        if isinstance(request, CutSlab | OpenSlab | SummaryPart | CloseSlab):
            waiting = self._busy.get(request.slab)
            if waiting is None:
                self._take_slab(request)
            else:
                waiting.append(request)
        elif isinstance(request, AddNamespace):
            self._answer(request, lambda: self._add_namespace(request))
        elif isinstance(request, DropNamespace):
            self._answer(request, lambda: self._drop_namespace(request))
        elif isinstance(request, Ping):
            self._send(Done(ticket=request.ticket))
        elif isinstance(request, Probe):
            self._answer(request, lambda: self._probe(request))

    def _take_slab(self, request: SlabRequest) -> None:
        if isinstance(request, SummaryPart):
            self._summary_part(request)
        elif isinstance(request, OpenSlab):
            self._answer(request, lambda: self._open_slab(request))
        elif isinstance(request, CutSlab):
            self._answer(request, lambda: self._cut_slab(request))
        else:
            self._answer(request, lambda: self._close_slab(request))

    def _answer(self, request: Ticketed, action: Callable[[], None]) -> None:
        try:
            action()
        except (OffloaddError, OSError) as error:
            self._send(failure(request.ticket, error))

    def _opened(self) -> Volume:
        if self._volume is None:
            raise InvalidRequest("no volume is open")
        return self._volume

    # Volume

    def _open(self, request: OpenVolume, fds: list[int]) -> None:
        if self._volume is not None or not 1 <= request.io_threads <= _IO_THREADS_MAX:
            for fd in fds:
                os.close(fd)
            if self._volume is not None:
                raise InvalidRequest(f"{self._volume.file.path} is already open; a keeper keeps 1 volume")
            raise InvalidRequest(f"io_threads is {request.io_threads}; 1 to {_IO_THREADS_MAX} are possible")
        volume = open_kept_volume(request.path, fds, io_threads=request.io_threads, on_answer=lambda: self._send(VolumeAnswers()))
        self._volume, self._prewrite = volume, request.prewrite
        geometry, file = volume.geometry, volume.file
        opened = VolumeOpened(
            ticket=request.ticket,
            volume_uuid=geometry.volume_uuid,
            volume_bytes=geometry.volume_bytes,
            slab_bytes=geometry.slab_bytes,
            slab_count=geometry.slab_count,
            data_offset=geometry.data_offset,
            namespace_count=geometry.namespace_count,
            epoch=volume.epoch,
            direct_io=file.direct_io,
            direct_io_note=file.direct_io_note,
            file_system=file.file_system,
            scratch_offset=geometry.scratch_offset,
            scratch_bytes=geometry.scratch_bytes,
        )
        self._send(opened, (file.data_fd, file.synced_fd))
        cut = [header for header in volume.headers if header.cut]
        self._send_inventory(volume, cut)
        for header in cut:
            self._busy[header.slab] = deque()
        # A thread of its own: it waits for the slabs one by one, and a volume that hangs must not hold up the end of the process.
        threading.Thread(target=self._scan, args=(volume, cut, request.io_threads), name="scanner", daemon=True).start()

    def _send_inventory(self, volume: Volume, cut: list[SlabHeader]) -> None:
        slabs = [SlabInfo(header.slab, header.slot_bytes, header.slot_count, header.nonce, header.dirty) for header in cut]
        slab_parts, namespace_parts = _parts(slabs, _INVENTORY_SLABS), _parts(volume.namespaces.live(), _INVENTORY_NAMESPACES)
        messages = [Inventory(slabs=part, namespaces=(), last=False) for part in slab_parts]
        messages += [Inventory(slabs=(), namespaces=part, last=False) for part in namespace_parts]
        for message in messages:
            self._send(message)
        self._send(Inventory(slabs=(), namespaces=(), last=True))

    def _scan(self, volume: Volume, cut: list[SlabHeader], io_threads: int) -> None:
        def tell(header: SlabHeader, records: Array) -> None:
            with self._namespace_lock:
                volume.namespaces.forget_dead(records, header.slot_bytes)
                for first in range(0, len(records), SUMMARY_RECORDS_MAX):
                    part = records[first : first + SUMMARY_RECORDS_MAX]
                    last = first + len(part) == len(records)
                    self._send(Recovered(slab=header.slab, first=first, records=part.tobytes(), last=last))
            self._post(lambda: self._release(header.slab))

        scanner = Scanner(fd=volume.file.data_fd, geometry=volume.geometry, headers=cut, tell=tell, io_threads=io_threads)
        try:
            finished = scanner.run()
        except BaseException as error:
            self._post(partial(_rise, error))
            return
        self._send(msgspec.structs.replace(finished, headers_bad=finished.headers_bad + volume.headers_damaged))

    def _stop(self, request: CloseVolume) -> None:
        """Cuts and closes that run are ended or awaited, so that everything asked for is answered before `Done`."""
        self._stopping.set()
        self._slab_pool.shutdown(wait=True)
        while self._posted:
            self._posted.popleft()()
        for waiting in self._busy.values():
            for held in waiting:
                if not isinstance(held, SummaryPart):
                    self._send(failure(held.ticket, Unavailable("the volume is being closed")))
        self._send(Done(ticket=request.ticket))

    def _probe(self, request: Probe) -> None:
        volume = self._opened()

        def read() -> None:
            try:
                read_past_cache(volume.file.data_fd, "a sector to see whether the volume answers")
            except OSError as error:
                self._send(failure(request.ticket, error))
            else:
                self._send(Done(ticket=request.ticket))

        # A thread of its own: this read is made where one may be expected to hang.
        threading.Thread(target=read, name="probe", daemon=True).start()

    # Namespaces

    def _add_namespace(self, request: AddNamespace) -> None:
        ordinal, epoch = self._opened().namespaces.add(request.namespace_id, request.tenant, request.fields)
        self._send(NamespaceAdded(ticket=request.ticket, ordinal=ordinal, epoch=epoch))

    def _drop_namespace(self, request: DropNamespace) -> None:
        namespaces = self._opened().namespaces
        with self._namespace_lock:
            namespaces.drop(request.namespace_id)
        self._send(Done(ticket=request.ticket))

    # Slabs

    def _open_slab(self, request: OpenSlab) -> None:
        volume = self._opened()
        header = _require_cut(volume.check_slab(request.slab))
        header = volume.headers[request.slab] = volume.open_slab(header)
        self._send(SlabReady(ticket=request.ticket, slab=request.slab, slot_count=header.slot_count, nonce=header.nonce))

    def _cut_slab(self, request: CutSlab) -> None:
        volume = self._opened()
        before = volume.check_slab(request.slab)
        volume.check_slot_bytes(request.slot_bytes)
        # From here on nothing of the slab counts, whatever becomes of the cut.
        volume.headers[request.slab] = SlabHeader(slab=request.slab, written=before.written)
        self._summaries.forget(request.slab)

        def work() -> SlabHeader:
            return volume.cut(before, request.slot_bytes, prewrite=self._prewrite, check_stop=self._check_stop)

        def finish(header: SlabHeader) -> None:
            volume.headers[request.slab] = header
            self._send(SlabReady(ticket=request.ticket, slab=request.slab, slot_count=header.slot_count, nonce=header.nonce))

        self._work(request, work, finish)

    def _check_stop(self) -> None:
        if self._stopping.is_set():
            raise Unavailable("the volume is being closed")

    def _summary_part(self, request: SummaryPart) -> None:
        """Not answered: a part that can't be taken is missing when the slab is closed."""
        volume = self._volume
        if volume is None or not 0 <= request.slab < volume.geometry.slab_count:
            return
        self._summaries.take(request, volume.headers[request.slab])

    def _close_slab(self, request: CloseSlab) -> None:
        volume = self._opened()
        header = _require_cut(volume.check_slab(request.slab))
        records = self._summaries.complete(header)
        # Should a write fail, the header on the device may say clean; the next opening must then set the bit, so ours may not say dirty.
        volume.headers[request.slab] = replace(header, dirty=False)

        def finish(after: SlabHeader) -> None:
            volume.headers[request.slab] = after
            self._send(Done(ticket=request.ticket))

        self._work(request, lambda: volume.close_slab(header, records), finish)

    def _work(self, request: CutSlab | CloseSlab, work: Callable[[], SlabHeader], finish: Callable[[SlabHeader], None]) -> None:
        """Run `work` in the pool, then `finish` on the main thread; requests for the slab wait meanwhile."""
        self._busy[request.slab] = deque()

        def run() -> None:
            try:
                header = work()
            except (OffloaddError, OSError) as error:
                failed = failure(request.ticket, error)
                self._post(lambda: self._send(failed))
            except BaseException as error:
                self._post(partial(_rise, error))
            else:
                self._post(lambda: finish(header))
            self._post(lambda: self._release(request.slab))

        self._slab_pool.submit(run)

    def _release(self, slab: int) -> None:
        if self._stopping.is_set():
            return
        waiting = self._busy.pop(slab)
        while waiting:
            self._take_slab(waiting.popleft())
            again = self._busy.get(slab)
            if again is not None:
                again.extend(waiting)
                return


def failure(ticket: int, error: OffloaddError | OSError) -> Failed:
    """The answer that tells an error by its name."""
    if isinstance(error, OSError):
        return Failed(ticket=ticket, kind="OSError", error=str(error), errno=error.errno or 0)
    return Failed(ticket=ticket, kind=type(error).__name__, error=str(error))


def _require_cut(header: SlabHeader) -> SlabHeader:
    if not header.cut:
        raise InvalidRequest(f"slab {header.slab} is not cut")
    return header


def _parts(items: list[Item], size: int) -> list[tuple[Item, ...]]:
    return [tuple(items[first : first + size]) for first in range(0, len(items), size)]


def _rise(error: BaseException) -> None:
    """An error that no request explains is a defect: it ends the keeper, on the main thread, with its traceback."""
    raise error

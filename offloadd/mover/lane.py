"""One lane: a socket with jobs, and the threads that take turns at reading it and all do the work.

Leader and followers: a thread without work becomes the leader if there is none, waits in the socket for a job, cuts it, leaves the slices but the first to the
others, and does the first itself. So a job of one slice reaches the volume without a hand-over between threads (some 0.1 ms), and no thread ever polls.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from offloadd.ipc.channel import Channel
from offloadd.ipc.descriptors import keep_only
from offloadd.model.device_event import EventName
from offloadd.mover.device import Bench
from offloadd.mover.messages import Job, LaneAnswer, Parked, Unparked
from offloadd.mover.slices import Slice, cut
from offloadd.mover.time_slices import take_short_turns
from offloadd.mover.tools import Memories, Tools, may_begin
from offloadd.mover.volume import Volume
from offloadd.mover.work import FrontGoneError, run
from offloadd.tiers.format import LONG_SLOT_BYTES

#: Between two rounds of looks at the events and flags of waiting jobs. Pauses double from about what a look takes to what would be seen in the latency of a
#: single block, and are never shorter than the round before took: the leader spends at most half of its time on looks, however many jobs wait.
_PAUSE_S_MIN = 20e-6
_PAUSE_S_MAX = 1e-3
#: A job that has waited for so long is told to the front. Most have not: their event has come before, or comes while its first read is under way.
_PARKED_TELL_S = 2e-3


#: The move, its event or flag, and its regions.
_Awaited = tuple[int, EventName, tuple[int, ...]]


@dataclass(slots=True)
class _ParkedJob:
    """A job whose engine has not come yet. `told`: the front knows."""

    pieces: list[Slice]
    since_s: float
    told: bool = False


class Lane:
    """`open` makes the staging slots and starts the threads; they end when the socket closes or `stop` is called, and the last one closes everything.

    With `shared_fds` the threads of a volume's lane have a descriptor table of their own: those, the lane's socket and the volume. So when the process is
    killed while the volume hangs, nothing but these stays open: not the locks of other volumes, nor the sockets by which the front learns of the end. And
    the end of this lane's socket, which comes with its last thread, proves that no I/O of the lane is in flight any more.
    """

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        memories: Memories,
        volume: Volume | None,
        *,
        path: str,
        thread_count: int,
        staging_slot_bytes: int,
        shared_fds: Collection[int] | None = None,
    ) -> None:
        if thread_count < 1:
            raise ValueError(f"lane {number} has thread_count {thread_count}; at least 1 is needed")
        if volume is not None and staging_slot_bytes < LONG_SLOT_BYTES:
            raise ValueError(f"lane {number} has staging_slot_bytes {staging_slot_bytes}; at least LONG_SLOT_BYTES {LONG_SLOT_BYTES} is needed")
        self._number = number
        self._path = path
        self._channel: Channel[Job] = Channel(sock, Job)
        self._shared_fds = shared_fds
        #: Of a lane with a table of its own: the socket in the table of whoever calls `stop`.
        self._handle: socket.socket | None = None
        self._memories = memories
        self._volume = volume
        self._thread_count = thread_count
        self._staging_slot_bytes = staging_slot_bytes
        #: One a thread; none in the arena's lane, whose slots are copied where they lie.
        self._benches: Sequence[Bench] = ()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        #: Jobs whose engine has not come yet, by what they wait for, so that those of one request cost one look. Only the leader touches them.
        self._parked: dict[_Awaited, deque[_ParkedJob]] = {}
        #: The next job comes from the socket, if one is there.
        self._socket_first = False
        #: Slices that no thread has begun.
        self._waiting: deque[Slice] = deque()
        #: Some thread is waiting in the socket.
        self._led = False
        self._stopped = False
        self._alive = thread_count
        #: Whether the threads have a descriptor table of their own.
        self._apart = False

    def open(self) -> None:
        """Make a staging slot for each thread of a volume's lane, and start the threads. Raises OSError; the lane is closed then."""
        try:
            if self._volume is not None:
                self._benches = self._memories.device.benches(self._path, self._volume, self._thread_count, self._staging_slot_bytes)
        except OSError:
            self._close()
            raise
        for index, bench in enumerate(self._benches or [None] * self._thread_count):
            tools = Tools(memories=self._memories, path=self._path, bench=bench, volume=self._volume, send=self._send)
            # Daemon threads: a thread that a lost volume holds in the kernel must not keep the process from ending.
            self._threads.append(threading.Thread(target=self._work, args=(tools,), name=f"lane-{self._number}-{index}", daemon=True))
        if self._volume is None or self._shared_fds is None:
            self._start()
        else:
            self._start_apart(self._volume, self._shared_fds)

    def _start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _start_apart(self, volume: Volume, shared_fds: Collection[int]) -> None:
        """Start the threads in a descriptor table of their own; this thread's then has the lane's socket only, and none of the volume's. Where there can't be
        one, what is held is let go together with the whole process."""
        fd = self._channel.sock.fileno()
        self._handle = self._channel.sock.dup()
        # Threads have the table of whoever starts them.
        starter = threading.Thread(target=self._enter, args=([fd, volume.data_fd, volume.synced_fd, *shared_fds],), name=f"lane-{self._number}-start")
        starter.start()
        starter.join()
        if self._apart:
            os.close(fd)
            volume.close()

    def _enter(self, fds: list[int]) -> None:
        self._apart = keep_only(fds)
        self._start()

    def stop(self) -> None:
        """Begin no more slices. Running ones end and are answered; `join` waits for them."""
        self._end(self._handle or self._channel.sock)

    def _end(self, sock: socket.socket) -> None:
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify_all()
        try:
            # Wakes the leader; the other direction stays open for the results of running slices.
            sock.shutdown(socket.SHUT_RD)
        except OSError:
            # The threads have ended and closed the socket, or the peer has: there is no leader to wake.
            return

    def join(self) -> None:
        """Wait until all threads have ended."""
        for thread in self._threads:
            thread.join()
        if self._handle is not None:
            self._handle.close()

    def _send(self, message: LaneAnswer) -> None:
        try:
            self._channel.send(message)
        except OSError as error:
            raise FrontGoneError from error

    def _work(self, tools: Tools) -> None:
        if self._volume is not None:
            take_short_turns()
        try:
            self._memories.device.enter_thread(self._path)
            while (piece := self._next()) is not None:
                run(tools, piece)
        except FrontGoneError:
            self._end(self._channel.sock)
        except Exception:
            # Only a fault of the lane's own machinery comes here. Closing the lane tells the front; going on with a thread less would hide it.
            traceback.print_exc(file=sys.stderr)
            self._end(self._channel.sock)
        finally:
            self._leave()

    def _next(self) -> Slice | None:
        """The next slice for the calling thread; None when the lane has ended."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._waiting or not self._led)
                if self._waiting:
                    return self._waiting.popleft()
                if self._stopped:
                    return None
                self._led = True
            pieces = self._lead()
            with self._changed:
                self._led = False
                if pieces is None or self._stopped:
                    self._stopped = True
                    self._changed.notify_all()
                    return None
                self._waiting.extend(pieces[1:])
                # One more than there are slices: somebody has to lead.
                self._changed.notify(len(pieces))
                if pieces:
                    return pieces[0]

    def _lead(self) -> list[Slice] | None:
        """The slices of the next job that may begin; None when the front has closed the lane.

        Jobs behind an engine's event wait here and not in a thread: an engine that does not come must not hold up another's. Nobody looks at them while all
        threads work, but then nobody could begin them.
        """
        pause_s = _PAUSE_S_MIN
        while True:
            # In turn: jobs whose engines have come, perhaps all at once, keep a restore in the socket waiting for one of them at most, and the other way round.
            if self._parked and not (self._socket_first and self._readable()):
                begin = time.monotonic()
                if (pieces := self._unpark(begin)) is not None:
                    self._socket_first = True
                    return pieces
                if not self._readable(max(pause_s, time.monotonic() - begin)):
                    pause_s = min(2 * pause_s, _PAUSE_S_MAX)
                    continue
            self._socket_first = False
            received = self._receive()
            if not received or may_begin(self._memories.engine, received):
                return received
            self._park(received)
            pause_s = _PAUSE_S_MIN

    def _park(self, pieces: list[Slice]) -> None:
        awaited = (pieces[0].job.move, pieces[0].job.after_event, tuple(pieces[0].regions))
        self._parked.setdefault(awaited, deque()).append(_ParkedJob(pieces, time.monotonic()))

    def _unpark(self, now_s: float) -> list[Slice] | None:
        """The slices of a job that waits no more; None if all do. Those that have waited for some time are told to the front."""
        for awaited, jobs in self._parked.items():
            if may_begin(self._memories.engine, jobs[0].pieces):
                parked = jobs.popleft()
                if not jobs:
                    del self._parked[awaited]
                if parked.told:
                    self._send(Unparked(job=parked.pieces[0].job.job))
                return parked.pieces
            for parked in jobs:
                if not parked.told and now_s - parked.since_s >= _PARKED_TELL_S:
                    parked.told = True
                    self._send(Parked(job=parked.pieces[0].job.job))
        return None

    def _readable(self, timeout_s: float = 0.0) -> bool:
        # Not select(): a mover with many volumes has descriptors above its 1024.
        poll = select.poll()
        poll.register(self._channel.sock, select.POLLIN)
        if not 0 < timeout_s < 1e-3:
            return bool(poll.poll(timeout_s * 1e3))
        # poll() counts whole milliseconds, and rounds up.
        if not poll.poll(0):
            time.sleep(timeout_s)
        return bool(poll.poll(0))

    def _receive(self) -> list[Slice] | None:
        """The slices of the next job; None when the front has closed the lane."""
        try:
            received = self._channel.receive()
        except msgspec.DecodeError as error:
            # Jobs come from our own front; what can't be read can't be answered either. Closing the lane makes the front see it.
            print(f"mover: lane {self._number} received an unreadable message: {error}", file=sys.stderr, flush=True)
            return None
        if received is None:
            return None
        return cut(received[0], thread_count=self._thread_count, staging_slot_bytes=self._staging_slot_bytes)

    def _leave(self) -> None:
        with self._changed:
            self._alive -= 1
            last = self._alive == 0
        if last:
            self._close()

    def _close(self) -> None:
        # The peer shall see the end though the handle is open.
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        if self._volume is not None:
            self._volume.close()
        for bench in self._benches:
            bench.close()

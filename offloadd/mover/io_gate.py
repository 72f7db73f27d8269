"""How many I/Os one volume has in flight at once: enough to keep it busy, few enough that its threads do not march in step."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offloadd.model.enums import Reason
from offloadd.units import MIB

#: Bytes that keep any volume busy: 1.2 ms of a 7 GB/s device. Below it every I/O gets in.
BUSY_BYTES = 8 * MIB


class CalledOffError(Exception):
    """The I/O was not begun: nobody wants it any more, for this reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.name)
        self.reason = reason


class IoGate:
    """Lets an I/O in while fewer than `long_count` run or all of them together stay within BUSY_BYTES. Used by the threads of one lane.

    A device shares its bandwidth among the I/Os in flight. With one for each thread all of them end together, and then all threads verify and copy while the
    volume idles: a restore of 320 MiB on 4 threads reaches 0.80 of the raw read. With half of the threads in I/Os and half at work it reaches 0.92 to 0.95.
    """

    def __init__(self, long_count: int) -> None:
        self._long_count = long_count
        self._changed = threading.Condition()
        self._count = 0
        self._bytes = 0
        #: Threads that wait to get in.
        self._waiting = 0

    @contextmanager
    def passing(self, size_bytes: int, called_off: Callable[[], Reason]) -> Iterator[None]:
        """Wait for room, hold it for the length of the I/O. Raises `CalledOffError` if there is a reason, after the wait, not to begin it."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._count < self._long_count or self._bytes + size_bytes <= BUSY_BYTES)
            self._waiting -= 1
            self._count += 1
            self._bytes += size_bytes
        try:
            # Behind I/Os that hang the wait may have lasted for minutes, and requests have ended meanwhile.
            if reason := called_off():
                raise CalledOffError(reason)
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._bytes -= size_bytes
                awaited = self._waiting > 0
                self._changed.notify_all()
            if awaited:
                # Whoever was woken needs the interpreter to begin its I/O, and this thread would keep it for 0.1 ms more, while the volume has one I/O less.
                # A restore of 320 MiB gained 0.02 to 0.08 of the raw reads in six of seven A/B series, and lost 0.01 in one.
                time.sleep(0)

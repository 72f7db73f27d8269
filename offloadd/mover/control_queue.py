"""Control messages that have arrived but are not yet obeyed: copies wait for them.

Jobs and fences come on different sockets, so a mover that stood still (stopped, swapped out, starved) may find both waiting and read the job first. A copy
that begins then would touch memory whose move has been called off. So before each copy the threads look whether the control socket is empty and at rest.
"""

import select
import socket
import threading


class ControlQueue:
    """The main thread calls `wait` before it receives, and `handled` after it has obeyed; other threads call `settle`."""

    def __init__(self, sock: socket.socket) -> None:
        # One poll object for each side: an object can't be used by two threads at once. Threads that settle take turns by the lock.
        self._waiting = select.poll()
        self._waiting.register(sock, select.POLLIN)
        self._looking = select.poll()
        self._looking.register(sock, select.POLLIN)
        self._changed = threading.Condition()
        self._handling = False
        self._over = False

    def wait(self) -> None:
        """Block until a message or the end of the socket is there; from now on until `handled` copies wait."""
        # The message stays in the socket until the flag is up, so there is no moment at which neither tells of it.
        self._waiting.poll()
        with self._changed:
            self._handling = True

    def handled(self) -> None:
        """The message received last has been obeyed."""
        with self._changed:
            self._handling = False
            self._changed.notify_all()

    def end(self) -> None:
        """No message is going to be obeyed any more; running slices may finish."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until every message that had arrived has been obeyed. Not to be called inside a copy: unmap and fence wait for copies to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or not (self._handling or self._looking.poll(0)))

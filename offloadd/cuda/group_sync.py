"""One fdatasync for all writes of about the same time: KvikIO opens a volume without O_DSYNC, so what it wrote is synced on a second descriptor."""

import errno
import threading
from collections.abc import Callable


class VolumeDoomed(OSError):
    """A sync of the volume failed: what was written since the last good one may be lost, and no later sync could tell."""


class GroupSync:
    """One sync for all that ask at about the same time. Any thread may call."""

    def __init__(self, sync: Callable[[], None]) -> None:
        """`sync`: makes all that was written before it began durable, or raises OSError."""
        self._sync = sync
        self._changed = threading.Condition()
        #: Syncs are numbered from 1; number `_begun` runs if it is not `_done`.
        self._begun = 0
        self._done = 0
        self._failure: OSError | None = None

    @property
    def doomed(self) -> str:
        """Why nothing can be made durable any more; empty if it can."""
        return "" if self._failure is None else str(self._failure)

    def sync(self) -> None:
        """Return when a sync that began after this call has succeeded. Raises VolumeDoomed when one failed, now or earlier: it is never tried again.

        A kernel reports a lost write once; the sync after it succeeds, though the bytes are gone.
        """
        with self._changed:
            # One that runs now may have begun before the caller's write returned.
            wanted = self._begun + 1
            while self._done < wanted:
                self.refuse_doomed()
                if self._begun == self._done:
                    self._lead()
                else:
                    self._changed.wait()

    def refuse_doomed(self) -> None:
        """Raise VolumeDoomed if a sync has failed."""
        if self._failure is not None:
            raise VolumeDoomed(self._failure.errno, f"a sync failed ({self._failure.strerror}): what was written since the last good one may be lost")

    def _lead(self) -> None:
        self._begun += 1
        self._changed.release()
        failure: OSError | None = OSError(errno.EIO, "the sync was interrupted")
        try:
            self._sync()
            failure = None
        except OSError as error:
            failure = error
        finally:
            self._changed.acquire()
            if failure is None:
                self._done = self._begun
            else:
                self._failure = failure
            self._changed.notify_all()

"""Descriptor tables: threads that keep some descriptors, and no others, for themselves.

A process that was killed is not gone while one of its threads waits in the kernel for a device (D state), and until then everything in that thread's table
stays open: sockets give no end, and locks stay held. So a thread that may come to wait there for long has a table with what it works with, and nothing else.
"""

import ctypes
from collections.abc import Collection
from itertools import pairwise

#: close_range(2), Linux 5.9: the same number on every architecture that was new enough to get it.
_CLOSE_RANGE = 436
_UNSHARE = 2
_LAST = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)


def keep_only(fds: Collection[int]) -> bool:
    """Give the calling thread, and the threads that it starts later, a table of their own with these descriptors and the three standard ones.

    Numbers stay what they are; what is opened or closed here or in the other table from now on is only so there. False, and nothing has changed, where the
    kernel has no close_range or a filter forbids it.
    """
    kept = sorted({0, 1, 2, *fds})
    # The one range that is never empty goes first: it makes the table this thread's own.
    if _close_range(kept[-1] + 1, _LAST, _UNSHARE):
        return False
    for before, after in pairwise(kept):
        if after - before > 1:
            _close_range(before + 1, after - 1, 0)
    return True


def _close_range(first: int, last: int, flags: int) -> int:
    # Not os.closerange: it would close one by one, in a table that is still shared.
    return int(_libc.syscall(ctypes.c_long(_CLOSE_RANGE), ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(flags)))

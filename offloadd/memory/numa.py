"""Where threads run and memory lies: CPUs of threads, and the node that the kernel is to take pages from.

Containers often refuse the calls for memory (Docker's filter does without CAP_SYS_NICE). Nothing depends on them but speed, so a refusal is an answer, not an
error.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Set
from pathlib import Path

_MPOL_PREFERRED = 1
_MASK_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
#: The C library has no function for it; libnuma, which has, is rarely installed.
_MBIND = {"x86_64": 237, "aarch64": 235}

_libc = ctypes.CDLL(None, use_errno=True)


def prefer_node(address: int, size_bytes: int, node: int) -> str:
    """Have pages that are not there yet taken from a node while it has some, else from others. Returns why the kernel refused; empty if it did not.

    Memory that is shared keeps the policy for all who map it, unless it lies on reserved huge pages: there each mapping has its own.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"no number of mbind is known on {platform.machine()}"
    words = (ctypes.c_ulong * (node // _MASK_WORD_BITS + 1))()
    words[node // _MASK_WORD_BITS] = 1 << node % _MASK_WORD_BITS
    # The kernel reads one bit less than it is told of.
    bits = ctypes.c_ulong(len(words) * _MASK_WORD_BITS + 1)
    if _libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(size_bytes), ctypes.c_long(_MPOL_PREFERRED), words, bits, ctypes.c_ulong(0)
    ):
        error = ctypes.get_errno()
        return f"mbind to node {node}: {errno.errorcode.get(error, error)}, {os.strerror(error)}"
    return ""


def bind_all_threads(cpus: Set[int]) -> None:
    """Let every thread of this process, and those that they start, run on these CPUs only. Raises OSError if the kernel refuses."""
    bound: set[int] = set()
    # Threads that a thread starts before its own turn have the old CPUs.
    while new := {int(task.name) for task in Path("/proc/self/task").iterdir()} - bound:
        for thread in new:
            try:
                os.sched_setaffinity(thread, cpus)
            except ProcessLookupError:
                # It has ended.
                continue
        bound |= new

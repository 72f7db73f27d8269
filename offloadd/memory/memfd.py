"""Sealed memfds: memory that two processes share and neither can shrink under the other.

A memory that can shrink is a way to kill whoever maps it (SIGBUS on the first byte behind the new end), so nothing unsealed is ever mapped.
"""

import errno
import fcntl
import mmap
import os

from offloadd.errors import InvalidRequest

#: Seals that every shared memory carries. SEAL keeps a peer from adding FUTURE_WRITE later, after which a restarted mover could not map it again.
SEALS = {"F_SEAL_SHRINK": fcntl.F_SEAL_SHRINK, "F_SEAL_GROW": fcntl.F_SEAL_GROW, "F_SEAL_SEAL": fcntl.F_SEAL_SEAL}
_ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
HUGE_PAGE_BYTES = 2 << 20


def create_sealed(name: str, bytes: int, huge: bool = False) -> int:
    """A new memfd of `bytes` zero bytes with all of SEALS; the caller closes it. Raises OSError.

    `huge`: take it from the system's reserved 2 MiB pages when `bytes` is a multiple of that and enough of them are free; otherwise ordinary pages, which
    MADV_HUGEPAGE may still make transparent huge ones.
    """
    if bytes < 1:
        raise InvalidRequest(f"a shared memory of {bytes} bytes can't be made; at least 1 is needed")
    if huge and bytes % HUGE_PAGE_BYTES == 0:
        try:
            return _create(name, bytes, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        except OSError as error:
            # ENOMEM: too few reserved pages. ENOSYS, EINVAL, ENODEV: a kernel without hugetlb.
            if error.errno not in (errno.ENOMEM, errno.ENOSYS, errno.EINVAL, errno.ENODEV):
                raise
    return _create(name, bytes, 0)


def _create(name: str, bytes: int, flags: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, bytes)
        if flags:
            # Reserved pages are reserved by mmap, not by ftruncate: without this trial the first mapping would fail far from here.
            map_shared(fd, bytes).close()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _ALL_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def validate_sealed(fd: int, expected_bytes: int | None = None) -> int:
    """The real size of a memfd in bytes. Raises `InvalidRequest` unless it is a memfd with all of SEALS and at least `expected_bytes` long."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidRequest(f"the descriptor is not a memfd: {os.strerror(error.errno or 0)}") from error
    missing = [name for name, bit in SEALS.items() if not seals & bit]
    if missing:
        raise InvalidRequest(f"the memfd lacks the seals {', '.join(missing)}")
    size_bytes = os.fstat(fd).st_size
    if expected_bytes is not None and size_bytes < expected_bytes:
        raise InvalidRequest(f"the memfd has {size_bytes} bytes; {expected_bytes} were announced")
    return size_bytes


def map_shared(fd: int, bytes: int) -> mmap.mmap:
    """A shared, writable mapping of the first `bytes` bytes. Raises OSError or ValueError (longer than the file)."""
    return mmap.mmap(fd, bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)

"""Volume checks that ask the volume itself: these can hang with it."""

import errno
import os
import stat
from collections.abc import Iterator

from offloadd.doctor.direct_io import probe_direct_io
from offloadd.doctor.finding import Finding, fail, not_applicable, ok, warn
from offloadd.doctor.subject import Volume
from offloadd.errors import VolumeDamaged, VolumeForeign
from offloadd.machine.system import System
from offloadd.tiers.slab_header import read_slab_headers
from offloadd.tiers.superblock import Superblock, check_geometry, read_superblock
from offloadd.tiers.volume_io import open_read_only, size_of
from offloadd.units import SECTOR_BYTES, format_bytes

#: Slab headers that are read at most: 4,096 reads of 4 KiB take about a second on one drive.
_HEADERS_MAX = 4096
_THREADS = 8
_UNOPENED = "it can't be opened"


def check_file(system: System, volume: Volume) -> Iterator[Finding]:
    """Whether the volume is there and may be opened, and by whom."""
    path = volume.options.path
    try:
        status = system.path(path).stat()
    except FileNotFoundError:
        yield fail(f"{path} is not there", f"offloadd volume format {path} --size 100GiB")
        return
    except OSError as error:
        yield fail(f"{path}: {error.strerror}", f"ls -ld {path.rpartition('/')[0] or '/'}")
        return
    is_block = stat.S_ISBLK(status.st_mode)
    if not (is_block or stat.S_ISREG(status.st_mode)):
        yield fail("neither a regular file nor a block device", "set volume.path to a file or a block device")
        return
    whose = f"{'block device' if is_block else 'file'}, uid {status.st_uid}, mode {status.st_mode & 0o7777:04o}"
    if not os.access(system.path(path), os.R_OK | os.W_OK):
        yield fail(f"{whose}: uid {os.geteuid()} may not read and write it", f"chown {os.geteuid()} {path}   # or run as its owner")
    elif status.st_mode & 0o006:
        # KV is the prompt.
        yield warn(f"{whose}: everybody may read it, and KV is the prompt", f"chmod o-rwx {path}")
    else:
        yield ok(whose)


def check_superblock(system: System, volume: Volume) -> Iterator[Finding]:
    """Whether this is a volume, and how much of it has been written once."""
    path = volume.options.path
    try:
        fd, locked = open_read_only(str(system.path(path)))
    except OSError as error:
        yield _unopened(error, path)
        return
    except VolumeForeign:
        yield not_applicable(_UNOPENED)
        return
    try:
        try:
            superblock = read_superblock(fd, path)
            check_geometry(superblock.geometry, size_of(fd), path)
        except VolumeForeign:
            yield fail("it is no offloadd volume", f"offloadd volume format {path}")
            return
        except VolumeDamaged as error:
            yield fail(_told(system, error), f"offloadd volume format {path} --force-blocks   # its blocks are lost")
            return
        geometry = superblock.geometry
        use = "open in a daemon" if locked else "not in use"
        yield ok(f"{format_bytes(geometry.volume_bytes)}, {geometry.slab_count} slabs, opened {int(superblock.record[0]['epoch'])} times, {use}")
        yield _prewrite(fd, superblock, volume)
    finally:
        os.close(fd)


def _prewrite(fd: int, superblock: Superblock, volume: Volume) -> Finding:
    geometry = superblock.geometry
    count = min(geometry.slab_count, _HEADERS_MAX)
    headers = read_slab_headers(fd, geometry, range(count), threads=_THREADS)
    damaged = sum(header is None for header in headers)
    unwritten = sum(header is not None and not header.written for header in headers)
    of = f"of {'' if count == geometry.slab_count else 'the first '}{count} slabs"
    if damaged:
        return warn(f"{damaged} {of} have unreadable headers: their blocks are lost, they are used again", f"offloadd volume show {volume.options.path}")
    if not unwritten:
        return ok("every slab has been written once")
    if volume.options.prewrite:
        return ok(f"{unwritten} {of} were never written: each is, before its first use")
    return warn(f"{unwritten} {of} were never written, and prewrite is off: a power cut can take what was DURABLE there", "set prewrite = true for this volume")


def check_direct_io(system: System, volume: Volume) -> Iterator[Finding]:
    """Whether O_DIRECT works, and at which alignment."""
    try:
        found = probe_direct_io(str(system.path(volume.options.path)))
    except OSError as error:
        yield _unopened(error, volume.options.path)
        return
    if 0 < found.offset_bytes <= SECTOR_BYTES:
        memory = f", memory at {found.memory_bytes}" if found.memory_bytes else ""
        yield ok(f"works at offsets of {found.offset_bytes} bytes{memory}")
    elif found.offset_bytes:
        yield warn(f"needs offsets of {found.offset_bytes} bytes; ours are {SECTOR_BYTES}: I/O passes through the page cache", "put the volume on xfs or ext4")
    else:
        yield warn(f"does not work ({found.error}): I/O passes through the page cache", "put the volume on xfs or ext4")


def check_space(system: System, volume: Volume) -> Iterator[Finding]:
    """Whether a sparse file could be filled."""
    path = system.path(volume.options.path)
    try:
        status, around = path.stat(), os.statvfs(path)
    except OSError as error:
        yield _unopened(error, volume.options.path)
        return
    if stat.S_ISBLK(status.st_mode):
        yield not_applicable("a block device has all of its space")
        return
    missing = max(0, status.st_size - status.st_blocks * 512)
    free = around.f_bavail * around.f_frsize
    if missing > free:
        yield warn(
            f"sparse: {format_bytes(missing)} are not allocated yet, {format_bytes(free)} are free: writes will fail",
            f"fallocate -l {status.st_size} {volume.options.path}   # once there is room",
        )
    else:
        yield ok(f"{format_bytes(free)} free, {format_bytes(missing)} of it still to be allocated" if missing else "all of it is allocated")


def _unopened(error: OSError, path: str) -> Finding:
    """What the check named `file` has said already is not said again."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM):
        return not_applicable(_UNOPENED)
    return fail(f"I/O fails: {error.strerror}", f"dd if={path} of=/dev/null bs=4k count=1 iflag=direct; dmesg | tail")


def _told(system: System, error: Exception) -> str:
    """An error's text with the path as the machine knows it."""
    return str(error) if str(system.root) == "/" else str(error).replace(str(system.root), "")

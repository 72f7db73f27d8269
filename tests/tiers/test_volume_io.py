"""Descriptors, byte counts and the fallback from O_DIRECT."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from offloadd.errors import VolumeBusy, VolumeForeign
from offloadd.tiers import volume_io
from offloadd.tiers.volume_file import format_volume
from offloadd.tiers.volume_io import allocate, open_volume, read_full, read_up_to, write_full
from offloadd.units import MIB, SECTOR_BYTES


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "volume"
    path.write_bytes(bytes(MIB))
    return str(path)


def refuse_direct_open(monkeypatch, code):
    real = os.open

    def refuse(path, flags, *arguments):
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *arguments)

    monkeypatch.setattr(volume_io.os, "open", refuse)


def test_the_pair_is_direct_and_the_second_one_synced(path):
    file = open_volume(path, busy_wait_s=0)
    flags = [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (file.data_fd, file.synced_fd)]
    if not file.direct_io:
        pytest.skip(f"this file system has no O_DIRECT: {file.direct_io_note}")
    assert flags[0] & os.O_DIRECT and flags[1] & os.O_DIRECT
    assert not flags[0] & os.O_DSYNC and flags[1] & os.O_DSYNC
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in (file.data_fd, file.synced_fd))
    assert file.size_bytes == MIB and file.file_system not in ("", "unknown")
    file.close()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_without_direct_io_the_volume_opens_through_the_page_cache_and_says_so(path, monkeypatch, code):
    refuse_direct_open(monkeypatch, code)
    file = open_volume(path, busy_wait_s=0)
    assert not file.direct_io and "O_DIRECT" in file.direct_io_note and path in file.direct_io_note
    assert not fcntl.fcntl(file.synced_fd, fcntl.F_GETFL) & os.O_DIRECT
    file.close()


def test_direct_io_that_opens_but_does_not_read_is_noticed(path, monkeypatch):
    """Some FUSE servers take the flag and fail the first read."""
    real = os.preadv

    def refuse(fd, buffers, offset, *flags):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(fd, buffers, offset, *flags)

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(volume_io.os, "preadv", refuse)
    file = open_volume(path, busy_wait_s=0)
    assert not file.direct_io
    read_full(file.data_fd, allocate(SECTOR_BYTES), 0, "test")
    file.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_other_errors_of_opening_are_errors(path, monkeypatch):
    refuse_direct_open(monkeypatch, errno.EACCES)
    with pytest.raises(PermissionError):
        open_volume(path, busy_wait_s=0)


def test_opening_never_creates_and_never_truncates(path, tmp_path):
    with pytest.raises(FileNotFoundError):
        open_volume(str(tmp_path / "missing"), busy_wait_s=0)
    assert not (tmp_path / "missing").exists()
    open_volume(path, busy_wait_s=0).close()
    assert Path(path).stat().st_size == MIB


def test_what_is_no_file_is_foreign(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "."):
        with pytest.raises(VolumeForeign):
            open_volume(str(tmp_path / name), busy_wait_s=0)


def test_the_lock_lives_as_long_as_any_copy_of_the_data_descriptor(path):
    file = open_volume(path, busy_wait_s=0)
    copy = os.dup(file.data_fd)
    file.close()
    with pytest.raises(VolumeBusy):
        open_volume(path, busy_wait_s=0.05)
    os.close(copy)
    open_volume(path, busy_wait_s=0).close()


def test_a_read_beyond_the_end_is_an_error_and_says_how_far_it_came(path):
    file = open_volume(path, busy_wait_s=0)
    with pytest.raises(OSError, match=f"reading tail: {SECTOR_BYTES} of {2 * SECTOR_BYTES} bytes") as raised:
        read_full(file.data_fd, allocate(2 * SECTOR_BYTES), MIB - SECTOR_BYTES, "tail")
    assert raised.value.errno == errno.EIO
    with pytest.raises(OSError, match="0 of 4096"):
        read_full(file.data_fd, allocate(SECTOR_BYTES), 2 * MIB, "nothing")
    assert read_up_to(file.data_fd, allocate(2 * SECTOR_BYTES), MIB - SECTOR_BYTES, "tail") == SECTOR_BYTES
    file.close()


class Fake:
    """Stands for preadv and pwritev: moves at most `limits[i]` bytes in call i."""

    def __init__(self, real, limits):
        self.real, self.limits = real, list(limits)

    def __call__(self, fd, buffers, offset, *flags):
        limit = self.limits.pop(0)
        return self.real(fd, [buffers[0][:limit]], offset) if limit else 0


def test_short_counts_are_continued_while_aligned(path, monkeypatch):
    data = bytes(range(256)) * (4 * SECTOR_BYTES // 256)
    buffer = allocate(4 * SECTOR_BYTES)
    buffer[:] = data
    fd = os.open(path, os.O_RDWR)
    monkeypatch.setattr(volume_io.os, "pwritev", Fake(os.pwritev, [SECTOR_BYTES, 2 * SECTOR_BYTES, SECTOR_BYTES]))
    write_full(fd, buffer, 0, "test")
    monkeypatch.setattr(volume_io.os, "preadv", Fake(os.preadv, [3 * SECTOR_BYTES, SECTOR_BYTES]))
    target = allocate(4 * SECTOR_BYTES)
    read_full(fd, target, 0, "test")
    assert bytes(target) == data
    os.close(fd)


@pytest.mark.parametrize("limits", [[100], [0], [SECTOR_BYTES, 0], [SECTOR_BYTES, 1000]], ids=str)
def test_unaligned_and_empty_counts_are_errors(path, monkeypatch, limits):
    fd = os.open(path, os.O_RDWR)
    monkeypatch.setattr(volume_io.os, "pwritev", Fake(os.pwritev, limits))
    with pytest.raises(OSError, match=f"writing test: {sum(limits)} of 8192"):
        write_full(fd, allocate(2 * SECTOR_BYTES), 0, "test")
    monkeypatch.setattr(volume_io.os, "preadv", Fake(os.preadv, limits))
    with pytest.raises(OSError, match=f"reading test: {sum(limits)} of 8192"):
        read_full(fd, allocate(2 * SECTOR_BYTES), 0, "test")
    os.close(fd)


def test_errors_name_what_was_touched_and_keep_their_number(path):
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(OSError, match="writing header of slab 7") as raised:
        write_full(fd, allocate(SECTOR_BYTES), 0, "header of slab 7")
    assert raised.value.errno == errno.EBADF
    os.close(fd)


def test_a_volume_formats_on_tmpfs_and_says_whether_it_is_direct():
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no mount here")
    path = f"/dev/shm/offloadd-test-{os.getpid()}"
    try:
        format_volume(path, volume_bytes=8 * MIB, slab_bytes=MIB, namespace_count=8)
        file = open_volume(path, busy_wait_s=0)
        assert file.file_system == "tmpfs" and file.direct_io == (file.direct_io_note == "")
        file.close()
    finally:
        Path(path).unlink()

"""Locks, limits and answers of a keeper."""

import errno
import os
import select
import signal
import subprocess
import sys

import pytest

from offloadd.errors import VolumeBusy, VolumeDamaged, VolumeForeign
from offloadd.ipc.channel import Channel, socket_pair
from offloadd.keeper.messages import (
    AddNamespace,
    Answer,
    CloseSlab,
    CloseVolume,
    CutSlab,
    Done,
    DropNamespace,
    Failed,
    KeeperUp,
    NamespaceAdded,
    OpenSlab,
    OpenVolume,
    Ping,
    Probe,
    SlabReady,
    VolumeAnswers,
    VolumeOpened,
)
from offloadd.keeper.volume import open_kept_volume
from offloadd.tiers import superblock, volume_io
from offloadd.tiers.format import SUPERBLOCK_OFFSETS, parse_superblocks
from offloadd.tiers.volume_io import allocate, open_volume
from offloadd.tiers.volume_summary import read_volume
from offloadd.units import MIB, SECTOR_BYTES

SLOT_BYTES = 128 * 1024


def try_open(keeper, path, fds=()):
    return keeper.request(OpenVolume(ticket=keeper.next_ticket(), path=str(path), io_threads=2, prewrite=True), fds)


def test_a_second_keeper_finds_the_volume_busy(new_keeper, volume_path):
    first = new_keeper().open(volume_path)
    failed = try_open(new_keeper(), volume_path)
    assert isinstance(failed, Failed) and failed.kind == "VolumeBusy"
    assert isinstance(first.request(Ping(ticket=first.next_ticket())), Done)
    assert read_volume(str(volume_path)).locked
    first.kill()
    assert not read_volume(str(volume_path)).locked
    new_keeper().open(volume_path)


def test_a_keeper_waits_for_a_dying_holder_of_the_lock(new_keeper, volume_path):
    first = new_keeper().open(volume_path)
    second = new_keeper()
    second.channel.send(OpenVolume(ticket=1, path=str(volume_path), io_threads=2, prewrite=True))
    # The second keeper is trying now, or will: either way the lock is freed within its patience.
    first.kill()
    assert type(second.answer(1)).__name__ == "VolumeOpened"


def test_passed_descriptors_keep_the_lock_when_the_keeper_dies(new_keeper, volume_path):
    first = new_keeper().open(volume_path)
    first.process.kill()
    first.process.wait(60)
    failed = try_open(new_keeper(), volume_path)
    assert isinstance(failed, Failed) and failed.kind == "VolumeBusy"
    heir = new_keeper().open(volume_path, fds=tuple(first.fds))
    assert heir.opened.epoch == first.opened.epoch + 1
    assert heir.opened.direct_io == first.opened.direct_io
    assert isinstance(heir.cut(0), SlabReady)
    # Our copies may go: the heir's keep the lock.
    first.close_fds()
    failed = try_open(new_keeper(), volume_path)
    assert isinstance(failed, Failed) and failed.kind == "VolumeBusy"


def test_descriptors_that_are_not_a_volumes_pair_are_refused(new_keeper, volume_path, tmp_path):
    keeper = new_keeper()
    data = os.open(volume_path, os.O_RDWR)
    (tmp_path / "other").write_bytes(bytes(8192))
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_DSYNC)
    for fds, words in (((data,), "1 descriptors"), ((data, data), "O_DSYNC"), ((data, other), "different files")):
        failed = try_open(keeper, volume_path, fds)
        assert isinstance(failed, Failed) and failed.kind == "InvalidRequest" and words in failed.error
    os.close(data)
    os.close(other)
    keeper.open(volume_path)


def test_descriptors_without_the_lock_do_not_pass_one_held_by_another(new_keeper, volume_path):
    first = new_keeper().open(volume_path)
    pair = (os.open(volume_path, os.O_RDWR), os.open(volume_path, os.O_RDWR | os.O_DSYNC))
    failed = try_open(new_keeper(), volume_path, pair)
    assert isinstance(failed, Failed) and failed.kind == "VolumeBusy"
    for fd in pair:
        os.close(fd)
    assert isinstance(first.request(Ping(ticket=first.next_ticket())), Done)


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_torn_superblock_write_leaves_the_other_copy_also_when_one_was_damaged(volume_path, monkeypatch, damaged):
    with volume_path.open("r+b") as file:
        file.seek(SUPERBLOCK_OFFSETS[damaged] + 500)
        file.write(b"\xff")
    real = superblock.write_full

    def tear(fd, buffer, offset, what):
        torn = bytearray(buffer)
        torn[2048:] = b"\xee" * 2048
        aligned = allocate(len(torn))
        aligned[:] = torn
        real(fd, aligned, offset, what)
        raise OSError(errno.EIO, "power cut")

    monkeypatch.setattr(superblock, "write_full", tear)
    with pytest.raises(OSError, match="power cut"):
        open_kept_volume(str(volume_path), [], io_threads=1)
    monkeypatch.undo()
    volume = open_kept_volume(str(volume_path), [], io_threads=1)
    assert volume.epoch == 1
    volume.file.close()


def test_a_truncated_volume_is_refused_with_both_sizes(new_keeper, volume_path):
    os.truncate(volume_path, 10 * MIB)
    failed = try_open(new_keeper(), volume_path)
    assert isinstance(failed, Failed) and failed.kind == "VolumeDamaged"
    assert str(10 * MIB) in failed.error and str(18 * MIB) in failed.error


def test_a_file_of_something_else_a_directory_and_nothing_are_refused(new_keeper, tmp_path):
    keeper = new_keeper()
    (tmp_path / "text").write_bytes(b"hello" * 10_000)
    assert try_open(keeper, tmp_path / "text").kind == "VolumeForeign"
    assert try_open(keeper, tmp_path).kind == "VolumeForeign"
    missing = try_open(keeper, tmp_path / "missing")
    assert missing.kind == "OSError" and missing.errno == 2
    assert not (tmp_path / "missing").exists()


def test_one_damaged_superblock_is_survived_and_repaired_two_are_not(volume_path):
    volume = open_kept_volume(str(volume_path), [], io_threads=2)
    volume.file.close()
    for offset in SUPERBLOCK_OFFSETS:
        with volume_path.open("r+b") as file:
            file.seek(offset + 500)
            file.write(b"\xff")
        again = open_kept_volume(str(volume_path), [], io_threads=2)
        assert again.epoch == volume.epoch + 1
        volume = again
        volume.file.close()
    raw = volume_path.read_bytes()[: 2 * SECTOR_BYTES]
    assert int(parse_superblocks(raw[:SECTOR_BYTES], bytes(SECTOR_BYTES), name="a")["epoch"][0]) == volume.epoch
    assert int(parse_superblocks(bytes(SECTOR_BYTES), raw[SECTOR_BYTES:], name="b")["epoch"][0]) == volume.epoch
    with volume_path.open("r+b") as file:
        for offset in SUPERBLOCK_OFFSETS:
            file.seek(offset + 500)
            file.write(b"\xff")
    with pytest.raises(VolumeDamaged):
        open_kept_volume(str(volume_path), [], io_threads=2)


def test_a_known_namespace_keeps_its_ordinal_and_a_long_one_is_refused_with_the_limit(new_keeper, volume_path):
    keeper = new_keeper().open(volume_path)
    added = keeper.add_namespace("a")
    again = keeper.add_namespace("a")
    assert (again.ordinal, again.epoch) == (added.ordinal, added.epoch) == (0, 1)
    failed = keeper.request(AddNamespace(ticket=keeper.next_ticket(), namespace_id=b"l" * 32, tenant="é" * 10, fields=bytes(3565)))
    assert failed.kind == "InvalidRequest" and "20 + 3565" in failed.error and "3584" in failed.error
    fits = keeper.request(AddNamespace(ticket=keeper.next_ticket(), namespace_id=b"l" * 32, tenant="é" * 10, fields=bytes(3564)))
    assert isinstance(fits, NamespaceAdded)


def test_a_full_namespace_table_reuses_dropped_ordinals_with_a_new_epoch(new_keeper, volume_path):
    keeper = new_keeper().open(volume_path)
    added = [keeper.add_namespace(str(number)) for number in range(8)]
    assert sorted(item.ordinal for item in added) == list(range(8))
    full = AddNamespace(ticket=keeper.next_ticket(), namespace_id=b"x" * 32, tenant="", fields=b"")
    failed = keeper.request(full)
    assert failed.kind == "LimitExceeded" and "8" in failed.error
    keeper.request(DropNamespace(ticket=keeper.next_ticket(), namespace_id=b"3".ljust(32, b"\0")))
    taken = keeper.request(AddNamespace(ticket=keeper.next_ticket(), namespace_id=b"x" * 32, tenant="", fields=b""))
    assert (taken.ordinal, taken.epoch) == (added[3].ordinal, added[3].epoch + 1)
    keeper.kill()
    again = new_keeper().open(volume_path)
    assert {(info.ordinal, info.epoch) for info in again.namespaces} == {(n, 2 if n == added[3].ordinal else 1) for n in range(8)}


def test_requests_that_cannot_work_are_told_so_with_numbers(new_keeper, volume_path):
    keeper = new_keeper()
    assert keeper.request(OpenSlab(ticket=keeper.next_ticket(), slab=0)).kind == "InvalidRequest"
    assert keeper.request(AddNamespace(ticket=keeper.next_ticket(), namespace_id=b"x" * 32, tenant="", fields=b"")).kind == "InvalidRequest"
    keeper.open(volume_path)
    for request, words in (
        (CutSlab(ticket=100, slab=4, slot_bytes=SLOT_BYTES), "the volume has 4"),
        (CutSlab(ticket=101, slab=0, slot_bytes=8193), "8193"),
        (CutSlab(ticket=102, slab=0, slot_bytes=4096), "4096"),
        (CutSlab(ticket=103, slab=0, slot_bytes=4 * MIB), str(4 * MIB)),
        (OpenSlab(ticket=104, slab=0), "slab 0 is not cut"),
        (CloseSlab(ticket=105, slab=0), "slab 0 is not cut"),
        (OpenVolume(ticket=106, path=str(volume_path), io_threads=1, prewrite=True), "already open"),
    ):
        failed = keeper.request(request)
        assert isinstance(failed, Failed) and failed.kind == "InvalidRequest" and words in failed.error, failed


def test_requests_for_one_slab_are_taken_in_order_without_waiting_for_answers(new_keeper, new_summary, volume_path):
    keeper = new_keeper().open(volume_path)
    namespace = keeper.add_namespace()
    ready = keeper.cut(0)
    records = new_summary(ready, namespace, [1])
    keeper.channel.send(CutSlab(ticket=50, slab=1, slot_bytes=8192))
    keeper.channel.send(OpenSlab(ticket=51, slab=1))
    keeper.channel.send(CutSlab(ticket=52, slab=1, slot_bytes=SLOT_BYTES))
    keeper.send_summary(0, records)
    keeper.channel.send(CloseSlab(ticket=53, slab=0))
    keeper.channel.send(OpenSlab(ticket=54, slab=0))
    answers = {ticket: keeper.answer(ticket) for ticket in (50, 51, 52, 53, 54)}
    assert answers[51].nonce == answers[50].nonce != answers[52].nonce
    assert answers[52].slot_count == ready.slot_count
    assert answers[53] == Done(ticket=53) and answers[54].nonce == ready.nonce
    keeper.kill()
    assert new_keeper().open(volume_path).slabs[0].dirty


def test_ctrl_c_is_not_for_the_keeper_and_the_end_of_the_front_is(new_keeper, volume_path):
    # A test run in the background ignores SIGINT, and children inherit that; a caught signal becomes the default one in a child.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        keeper = new_keeper().open(volume_path)
    finally:
        signal.signal(signal.SIGINT, before)
    keeper.process.send_signal(signal.SIGINT)
    assert isinstance(keeper.request(Ping(ticket=keeper.next_ticket())), Done)
    keeper.channel.close()
    assert keeper.process.wait(60) == 0


def test_close_volume_answers_everything_and_exits_with_0(new_keeper, volume_path):
    keeper = new_keeper().open(volume_path)
    for ticket in range(10, 18):
        keeper.channel.send(CutSlab(ticket=ticket, slab=ticket % 4, slot_bytes=SLOT_BYTES))
    done = keeper.request(CloseVolume(ticket=99))
    assert done == Done(ticket=99)
    tickets = sorted(message.ticket for message in keeper.other)
    assert tickets == list(range(10, 18))
    assert all(isinstance(message, SlabReady) or message.kind == "Unavailable" for message in keeper.other)
    assert keeper.process.wait(60) == 0


def test_a_front_that_is_killed_takes_its_keeper_along():
    """The socket stays open here, in the test: only the parent's death can end the keeper."""
    ours, theirs = socket_pair()
    code = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-m', 'offloadd.keeper.main', '--fd', '{theirs.fileno()}'], pass_fds=({theirs.fileno()},))\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], pass_fds=(theirs.fileno(),), stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        channel = Channel(ours, Answer)
        ours.settimeout(60)
        channel.send(Ping(ticket=1))
        assert channel.receive() is not None
        keeper_fd = os.pidfd_open(pid)
        parent.kill()
        parent.wait(60)
        assert select.select([keeper_fd], [], [], 60)[0] == [keeper_fd]
        os.close(keeper_fd)
    finally:
        parent.kill()
        parent.wait(60)
        ours.close()
        theirs.close()


def test_the_keeper_imports_no_grpc():
    code = "import sys, offloadd.keeper.main; sys.exit(any(name.split('.')[0] in ('grpc', 'google', 'torch') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_volume_without_superblock_magic_is_foreign(tmp_path):
    path = tmp_path / "zeros"
    path.write_bytes(bytes(8 * MIB))
    with pytest.raises(VolumeForeign):
        open_kept_volume(str(path), [], io_threads=1)


def test_a_probe_reads_the_volume_and_needs_an_open_one(new_keeper, volume_path):
    keeper = new_keeper()
    early = keeper.request(Probe(ticket=keeper.next_ticket()))
    assert isinstance(early, Failed) and "no volume is open" in early.error
    keeper.open(volume_path)
    assert isinstance(keeper.request(Probe(ticket=keeper.next_ticket())), Done)
    os.truncate(volume_path, 0)
    gone = keeper.request(Probe(ticket=keeper.next_ticket()))
    assert isinstance(gone, Failed) and gone.kind == "OSError"


def test_a_keeper_says_that_it_takes_requests_and_that_the_volume_has_answered_before_it_reads_the_tables(new_keeper, volume_path):
    keeper = new_keeper()
    assert keeper.channel.receive() == (KeeperUp(), [])
    keeper.channel.send(OpenVolume(ticket=1, path=str(volume_path), io_threads=4, prewrite=False))
    assert keeper.channel.receive() == (VolumeAnswers(), [])
    opened, fds = keeper.channel.receive()
    assert isinstance(opened, VolumeOpened)
    keeper.fds += fds


def test_a_keeper_does_not_read_a_volume_whose_lock_is_held_by_another(volume_path, monkeypatch):
    """The owner may be one that was killed and waits for the volume in the kernel: whoever reads would wait as well."""
    owner = open_volume(str(volume_path), busy_wait_s=0)
    monkeypatch.setattr(volume_io.os, "preadv", lambda *_: pytest.fail("it read"))
    with pytest.raises(VolumeBusy):
        open_volume(str(volume_path), busy_wait_s=0)
    monkeypatch.undo()
    owner.close()
    open_volume(str(volume_path), busy_wait_s=0).close()

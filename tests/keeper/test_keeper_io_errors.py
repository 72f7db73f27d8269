"""A volume that answers with errors: told, survived, and never taken for something better than it is."""

import errno
import os
import resource
import threading

import numpy as np

from offloadd.ipc.channel import Channel, socket_pair
from offloadd.keeper import volume as keeper_volume
from offloadd.keeper.messages import (
    AddNamespace,
    Answer,
    CloseSlab,
    CloseVolume,
    CutSlab,
    Done,
    DropNamespace,
    Failed,
    Inventory,
    KeeperUp,
    OpenSlab,
    OpenVolume,
    Request,
    ScanFinished,
    SlabReady,
    SummaryPart,
    VolumeAnswers,
)
from offloadd.keeper.service import Keeper
from offloadd.tiers.format import SLAB_DTYPE, SUMMARY_DTYPE
from offloadd.units import MIB, SECTOR_BYTES

SLOT_BYTES = 128 * 1024


def limit_file(keeper, size_bytes):
    """From now on the keeper's writes behind `size_bytes` fail with EFBIG."""
    _, hard = resource.prlimit(keeper.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(keeper.process.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))


def test_a_cut_that_fails_in_its_zeros_is_told_and_leaves_an_uncut_slab(new_keeper, new_writer, volume_path):
    keeper = new_keeper().open(volume_path)
    writer = new_writer(volume_path, keeper.opened)
    limit_file(keeper, writer.geometry.slab_offset(2) + MIB)
    failed = keeper.request(CutSlab(ticket=keeper.next_ticket(), slab=2, slot_bytes=SLOT_BYTES))
    assert isinstance(failed, Failed) and failed.kind == "OSError" and failed.errno == errno.EFBIG and "zeros of slab 2" in failed.error
    assert keeper.request(OpenSlab(ticket=keeper.next_ticket(), slab=2)).kind == "InvalidRequest"
    # The rest goes on.
    assert isinstance(keeper.cut(0), SlabReady)
    keeper.kill()
    assert list(new_keeper().open(volume_path).slabs) == [0]


def test_a_close_that_fails_leaves_a_dirty_slab(new_keeper, new_writer, new_summary, volume_path):
    keeper = new_keeper().open(volume_path)
    namespace = keeper.add_namespace()
    ready = keeper.cut(1)
    writer = new_writer(volume_path, keeper.opened)
    writer.write(writer.header(ready, 2, namespace), 1, 2)
    limit_file(keeper, writer.geometry.slab_offset(1) + SECTOR_BYTES)
    failed = keeper.close_slab(1, new_summary(ready, namespace, [5]))
    assert isinstance(failed, Failed) and failed.errno == errno.EFBIG and "summary of slab 1" in failed.error
    assert isinstance(keeper.request(OpenSlab(ticket=keeper.next_ticket(), slab=1)), SlabReady)
    keeper.kill()
    again = new_keeper().open(volume_path)
    assert again.slabs[1].dirty and sorted(again.blocks(1)) == [2]


def test_a_namespace_whose_entry_cannot_be_written_is_neither_added_nor_dropped(new_keeper, volume_path):
    keeper = new_keeper().open(volume_path)
    keeper.add_namespace("n")
    limit_file(keeper, SECTOR_BYTES)
    other = b"other".ljust(32, b"\0")
    for request in (AddNamespace(ticket=50, namespace_id=other, tenant="", fields=b""), DropNamespace(ticket=51, namespace_id=b"n".ljust(32, b"\0"))):
        failed = keeper.request(request)
        assert isinstance(failed, Failed) and failed.errno == errno.EFBIG and "namespace table entry" in failed.error
    limit_file(keeper, resource.RLIM_INFINITY)
    assert keeper.add_namespace("other").ordinal == 1
    keeper.kill()
    assert [info.ordinal for info in new_keeper().open(volume_path).namespaces] == [0, 1]


def test_a_slab_whose_close_failed_after_reaching_the_device_is_marked_dirty_by_its_next_opening(volume_path, monkeypatch):
    """The header says clean on the device, the keeper was told that it failed. An opening answered at once would lose the next crash's scan."""
    ours, theirs = socket_pair()
    ours.settimeout(60)
    channel = Channel(ours, Answer)
    thread = threading.Thread(target=Keeper(Channel(theirs, Request)).run)
    thread.start()

    def ask(message):
        channel.send(message)
        while True:
            answer, fds = channel.receive()
            for fd in fds:
                os.close(fd)
            if getattr(answer, "ticket", None) == message.ticket:
                return answer
            assert isinstance(answer, KeeperUp | VolumeAnswers | Inventory | ScanFinished)

    try:
        opened = ask(OpenVolume(ticket=1, path=str(volume_path), io_threads=2, prewrite=False))
        ready = ask(CutSlab(ticket=2, slab=0, slot_bytes=SLOT_BYTES))
        real = keeper_volume.write_record

        def write_and_fail(*arguments):
            real(*arguments)
            raise OSError(errno.EIO, "no answer")

        def dirty_bit():
            with volume_path.open("rb") as file:
                file.seek(opened.data_offset)
                return int(np.frombuffer(file.read(SECTOR_BYTES), dtype=SLAB_DTYPE)["dirty"][0])

        monkeypatch.setattr(keeper_volume, "write_record", write_and_fail)
        channel.send(SummaryPart(slab=0, first=0, records=np.zeros(ready.slot_count, dtype=SUMMARY_DTYPE).tobytes()))
        failed = ask(CloseSlab(ticket=3, slab=0))
        assert isinstance(failed, Failed) and failed.errno == errno.EIO
        assert dirty_bit() == 0
        monkeypatch.setattr(keeper_volume, "write_record", real)
        assert isinstance(ask(OpenSlab(ticket=4, slab=0)), SlabReady)
        assert dirty_bit() == 1
    finally:
        assert ask(CloseVolume(ticket=5)) == Done(ticket=5)
        thread.join(60)
        ours.close()
        theirs.close()


def test_a_slab_is_called_clean_only_after_its_summary_and_its_slots_were_synced(volume_path, monkeypatch):
    volume = keeper_volume.open_kept_volume(str(volume_path), [], io_threads=1)
    try:
        header = volume.cut(volume.headers[0], 16 * 1024, prewrite=False, check_stop=lambda: None)
        order = []
        for name in ("write_full", "sync", "write_record"):
            real = getattr(keeper_volume, name)
            monkeypatch.setattr(keeper_volume, name, lambda *arguments, name=name, real=real: order.append(name) or real(*arguments))
        volume.close_slab(header, np.zeros(header.slot_count, dtype=SUMMARY_DTYPE))
        assert order == ["write_full", "sync", "write_record"]
    finally:
        volume.file.close()

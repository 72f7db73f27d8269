"""What comes back after the end of a keeper, and what never does."""

import dataclasses
import os

import numpy as np
import pytest

from offloadd.errors import Unavailable
from offloadd.keeper.messages import CloseSlab, Done, DropNamespace, Failed, OpenSlab, OpenVolume, Recovered, ScanFinished, SlabReady, SummaryPart
from offloadd.keeper.scan import Scanner
from offloadd.keeper.volume import open_kept_volume
from offloadd.tiers.format import SLAB_DTYPE, SLAB_MAGIC, SUMMARY_DTYPE, is_sound, seal
from offloadd.tiers.slab_header import SlabHeader
from offloadd.tiers.volume_file import format_volume
from offloadd.units import MIB, SECTOR_BYTES

SLOT_BYTES = 128 * 1024
PAYLOAD_BYTES = SLOT_BYTES - SECTOR_BYTES - 100
ID = b"n".ljust(32, b"\0")


@pytest.fixture
def kept(new_keeper, new_writer, volume_path):
    """A keeper with one namespace and slab 1 cut, and a writer."""
    keeper = new_keeper().open(volume_path)
    namespace = keeper.add_namespace()
    ready = keeper.cut(1)
    return keeper, namespace, ready, new_writer(volume_path, keeper.opened)


def test_sound_slot_headers_come_back_after_a_kill_and_nothing_else_does(kept, new_keeper, volume_path):
    keeper, namespace, ready, writer = kept
    for slot in (0, 3, 7):
        writer.write(writer.header(ready, slot, namespace, generation=slot + 1, flags=1), 1, slot)
    torn = bytearray(writer.header(ready, 5, namespace, generation=99))
    torn[2000] ^= 1
    writer.write(bytes(torn), 1, 5)
    keeper.kill()
    again = new_keeper().open(volume_path)
    assert again.blocks(1) == {slot: f"key 1 {slot}".encode().ljust(32, b"\1") for slot in (0, 3, 7)}
    records = again.records[1]
    assert [int(records[slot]["generation"]) for slot in (0, 3, 7)] == [1, 4, 8]
    assert all(int(records[slot]["flags"]) == 1 and int(records[slot]["payload_bytes"]) == PAYLOAD_BYTES for slot in (0, 3, 7))
    # A slot whose past is unknown continues above every generation that the slab has seen.
    assert set(records["generation"][records["payload_bytes"] == 0]) == {8}
    assert again.finished.headers_bad == 1
    assert again.finished.slabs_scanned == 1 and again.finished.slabs_from_summary == 0
    assert again.finished.header_bytes_read == ready.slot_count * SECTOR_BYTES
    assert again.opened.epoch == keeper.opened.epoch + 1
    assert [(info.ordinal, info.epoch, info.namespace_id) for info in again.namespaces] == [(namespace.ordinal, namespace.epoch, ID)]


def test_short_slots_are_found_in_long_reads(new_keeper, new_writer, volume_path):
    keeper = new_keeper().open(volume_path)
    namespace = keeper.add_namespace()
    ready = keeper.cut(0, 8192)
    writer = new_writer(volume_path, keeper.opened)
    slots = [0, 1, 255, 256, 257, ready.slot_count - 1]
    for slot in slots:
        writer.write(writer.header(ready, slot, namespace, payload_bytes=4096), 0, slot, 8192)
    keeper.kill()
    again = new_keeper().open(volume_path)
    assert sorted(again.blocks(0)) == slots
    assert again.finished.headers_bad == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"slab": 2},
        {"slot": 3},
        {"nonce": bytes(range(16))},
        {"volume_uuid": bytes(range(16))},
        {"generation": 0},
        {"payload_bytes": 0},
        {"payload_bytes": SLOT_BYTES - SECTOR_BYTES + 1},
        {"payload_bytes": SLOT_BYTES - 2 * SECTOR_BYTES},
        {"payload_bytes": (1 << 64) - 1},
        {"namespace_epoch": 7},
        {"namespace_ordinal": 5},
        {"namespace_ordinal": 1 << 30},
        {"magic": b"OFFLSLB\1"},
        {"format_version": 2},
    ],
    ids=str,
)
def test_a_sound_header_of_something_else_is_no_block(kept, new_keeper, volume_path, changes):
    keeper, namespace, ready, writer = kept
    writer.write(writer.header(ready, 2, namespace), 1, 2)
    writer.write(writer.header(ready, 4, namespace, **changes), 1, 4)
    keeper.kill()
    assert sorted(new_keeper().open(volume_path).blocks(1)) == [2]


def test_a_closed_slab_comes_back_without_one_header_read(kept, new_keeper, new_summary, volume_path):
    keeper, namespace, ready, _ = kept
    assert keeper.close_slab(1, new_summary(ready, namespace, [1, 30])) == Done(ticket=keeper.ticket)
    keeper.kill()
    again = new_keeper().open(volume_path)
    assert not again.slabs[1].dirty
    assert sorted(again.blocks(1)) == [1, 30]
    assert set(again.records[1]["generation"]) == {5}
    assert again.finished.header_bytes_read == 0
    assert again.finished.slabs_from_summary == 1 and again.finished.slabs_scanned == 0


def test_a_summary_with_one_flipped_bit_is_not_believed(kept, new_keeper, new_summary, volume_path):
    keeper, namespace, ready, writer = kept
    writer.write(writer.header(ready, 2, namespace), 1, 2)
    keeper.close_slab(1, new_summary(ready, namespace, [1, 30]))
    keeper.kill()
    at = writer.geometry.slab_offset(1) + SECTOR_BYTES + 64
    writer.patch(at, bytes([writer.read(at, 1)[0] ^ 1]))
    again = new_keeper().open(volume_path)
    assert sorted(again.blocks(1)) == [2]
    assert again.finished.slabs_scanned == 1 and again.finished.slabs_from_summary == 0


def test_an_opened_slab_is_scanned_again_after_a_crash(kept, new_keeper, new_summary, volume_path):
    keeper, namespace, ready, writer = kept
    keeper.close_slab(1, new_summary(ready, namespace, [1]))
    opened = keeper.request(OpenSlab(ticket=keeper.next_ticket(), slab=1))
    assert opened == SlabReady(ticket=keeper.ticket, slab=1, slot_count=ready.slot_count, nonce=ready.nonce)
    writer.write(writer.header(ready, 2, namespace), 1, 2)
    keeper.kill()
    assert sorted(new_keeper().open(volume_path).blocks(1)) == [2]


def test_only_dirty_slabs_are_scanned_and_clean_ones_come_first(new_keeper, new_summary, volume_path):
    keeper = new_keeper().open(volume_path)
    namespace = keeper.add_namespace()
    ready = [keeper.cut(slab) for slab in range(4)]
    for slab in (1, 2, 3):
        keeper.close_slab(slab, new_summary(ready[slab], namespace, [slab]))
    keeper.kill()
    again = new_keeper().open(volume_path)
    assert again.told[-1] == 0 and sorted(again.told) == [0, 1, 2, 3]
    assert again.finished.slabs_from_summary == 3 and again.finished.slabs_scanned == 1
    assert again.finished.header_bytes_read == ready[0].slot_count * SECTOR_BYTES
    assert [sorted(again.blocks(slab)) for slab in range(4)] == [[], [1], [2], [3]]


def test_payload_that_imitates_slot_headers_is_not_accepted_after_a_cut_to_shorter_slots(kept, new_keeper, volume_path):
    keeper, namespace, ready, writer = kept
    short = 8192
    count = writer.geometry.slab_bytes // short
    # Headers as a client that knew the old nonce would place them: wherever a shorter slot may begin.
    for at in range(count):
        slot = at
        header = writer.header(ready, slot, namespace, payload_bytes=short - SECTOR_BYTES)
        writer.write(header, 1, slot, short)
    recut = keeper.cut(1, short)
    assert recut.nonce != ready.nonce
    writer.write(writer.header(recut, 9, namespace, payload_bytes=short - SECTOR_BYTES), 1, 9, short)
    keeper.kill()
    again = new_keeper().open(volume_path)
    assert sorted(again.blocks(1)) == [9]
    # Sound headers of an earlier cut are old space, not damage.
    assert again.finished.headers_bad == 0


def test_a_dropped_namespace_never_comes_back_from_slot_headers_or_a_summary(new_keeper, new_writer, new_summary, volume_path):
    keeper = new_keeper().open(volume_path)
    namespace, other = keeper.add_namespace("n"), keeper.add_namespace("other")
    scanned, closed = keeper.cut(0), keeper.cut(1)
    writer = new_writer(volume_path, keeper.opened)
    writer.write(writer.header(scanned, 1, namespace, generation=3), 0, 1)
    writer.write(writer.header(scanned, 2, other), 0, 2)
    records = new_summary(closed, namespace, [1])
    records[2] = new_summary(closed, other, [2])[2]
    keeper.close_slab(1, records)
    assert keeper.request(DropNamespace(ticket=keeper.next_ticket(), namespace_id=ID)) == Done(ticket=keeper.ticket)
    keeper.kill()
    again = new_keeper().open(volume_path)
    assert [info.namespace_id for info in again.namespaces] == [b"other".ljust(32, b"\0")]
    assert sorted(again.blocks(0)) == [2] and sorted(again.blocks(1)) == [2]
    assert int(again.records[0][1]["generation"]) == 3 and int(again.records[1][1]["generation"]) == 5
    # Added again it is another life: what it left behind stays dead.
    reborn = again.add_namespace("n")
    assert (reborn.ordinal, reborn.epoch) == (namespace.ordinal, namespace.epoch + 1)
    again.kill()
    third = new_keeper().open(volume_path)
    assert sorted(third.blocks(0)) == [2] and sorted(third.blocks(1)) == [2]


def test_a_slab_is_not_closed_by_an_incomplete_summary(kept, new_keeper, new_summary, volume_path):
    keeper, namespace, ready, writer = kept
    writer.write(writer.header(ready, 2, namespace), 1, 2)
    records = new_summary(ready, namespace, [1])
    keeper.send_summary(1, records[:-1])
    failed = keeper.request(CloseSlab(ticket=keeper.next_ticket(), slab=1))
    assert isinstance(failed, Failed) and failed.kind == "InvalidRequest"
    assert f"{len(records) - 1} valid records" in failed.error and f"{len(records)} slots" in failed.error
    keeper.kill()
    again = new_keeper().open(volume_path)
    assert again.slabs[1].dirty and sorted(again.blocks(1)) == [2]


def test_a_damaged_slab_header_makes_the_slab_uncut_and_is_counted(kept, new_keeper, volume_path):
    keeper, namespace, ready, writer = kept
    writer.write(writer.header(ready, 2, namespace), 1, 2)
    keeper.kill()
    at = writer.geometry.slab_offset(1) + 300
    writer.patch(at, b"\1")
    again = new_keeper().open(volume_path)
    assert again.slabs == {} and again.finished.headers_bad == 1
    assert again.cut(1).nonce != ready.nonce


@pytest.mark.parametrize("changes", [{"slab": 2}, {"volume_uuid": bytes(range(16))}, {"slot_count": 30}, {"format_version": 2}, {"state": 7}], ids=str)
def test_a_sound_slab_header_of_something_else_makes_the_slab_uncut(kept, new_keeper, volume_path, changes):
    keeper, _, _, writer = kept
    keeper.kill()
    at = writer.geometry.slab_offset(1)
    record = np.frombuffer(writer.read(at, SECTOR_BYTES), dtype=SLAB_DTYPE).copy()
    for name, value in changes.items():
        record[name] = np.void(value) if isinstance(value, bytes) else value
    seal(record)
    writer.patch(at, record.tobytes())
    again = new_keeper().open(volume_path)
    assert again.slabs == {} and again.finished.headers_bad == 1


def test_a_slab_that_cannot_be_read_is_told_as_empty_and_the_others_come_back(kept, new_keeper, volume_path):
    keeper, namespace, ready, writer = kept
    writer.write(writer.header(ready, 2, namespace), 1, 2)
    keeper.kill()
    good = SlabHeader(slab=1, cut=True, slot_bytes=SLOT_BYTES, slot_count=ready.slot_count, nonce=ready.nonce, dirty=True)
    # Beyond the end of the file each read comes back short, which is an I/O error like any other.
    beyond = SlabHeader(slab=50, cut=True, slot_bytes=SLOT_BYTES, slot_count=ready.slot_count, nonce=ready.nonce, dirty=True)
    clean = SlabHeader(slab=51, cut=True, slot_bytes=8192, slot_count=100, nonce=ready.nonce, dirty=False)
    told = {}
    fd = os.open(volume_path, os.O_RDONLY)
    try:
        finished = Scanner(
            fd=fd,
            geometry=writer.geometry,
            headers=[beyond, clean, good],
            tell=lambda header, records: told.__setitem__(header.slab, records.copy()),
            io_threads=2,
        ).run()
    finally:
        os.close(fd)
    assert sorted(told) == [1, 50, 51]
    assert not told[50]["payload_bytes"].any() and not told[51]["payload_bytes"].any()
    assert np.flatnonzero(told[1]["payload_bytes"]).tolist() == [2]
    assert finished.slabs_failed == 2 and finished.slabs_scanned == 1


def test_a_cut_writes_the_whole_slab_once_and_a_second_cut_does_not(new_keeper, new_writer, volume_path):
    keeper = new_keeper().open(volume_path)
    writer = new_writer(volume_path, keeper.opened)
    start, slab_bytes = writer.geometry.slab_offset(2), writer.geometry.slab_bytes
    neighbours = (writer.geometry.slab_offset(2) - SECTOR_BYTES, writer.geometry.slab_offset(3))
    writer.patch(start + SECTOR_BYTES, b"\xaa" * (slab_bytes - SECTOR_BYTES))
    for at in neighbours:
        writer.patch(at, b"\xbb" * SECTOR_BYTES)
    keeper.cut(2)
    header = writer.read(start, SECTOR_BYTES)
    assert is_sound(header, SLAB_MAGIC) and np.frombuffer(header, dtype=SLAB_DTYPE)[0]["written"] == 1
    assert not any(writer.read(start + SECTOR_BYTES, slab_bytes - SECTOR_BYTES))
    assert all(writer.read(at, SECTOR_BYTES) == b"\xbb" * SECTOR_BYTES for at in neighbours)
    writer.patch(start + MIB, b"\xaa")
    keeper.cut(2, 8192)
    assert writer.read(start + MIB, 1) == b"\xaa"
    # Neither does the first cut of a later keeper: the flag is on the volume.
    keeper.kill()
    new_keeper().open(volume_path).cut(2)
    assert writer.read(start + MIB, 1) == b"\xaa"


def test_without_prewrite_a_cut_is_one_header_and_does_not_claim_a_written_slab(new_keeper, new_writer, volume_path):
    keeper = new_keeper().open(volume_path, prewrite=False)
    writer = new_writer(volume_path, keeper.opened)
    start = writer.geometry.slab_offset(2)
    writer.patch(start + MIB, b"\xaa")
    keeper.cut(2)
    assert writer.read(start + MIB, 1) == b"\xaa"
    assert np.frombuffer(writer.read(start, SECTOR_BYTES), dtype=SLAB_DTYPE)[0]["written"] == 0


def test_a_crash_within_the_prewrite_leaves_an_uncut_slab_that_is_prewritten_again(kept, new_keeper, new_summary, volume_path):
    """The state between the two headers of a cut, made by stopping the cut at its first zeros."""
    keeper, namespace, ready, writer = kept
    keeper.close_slab(1, new_summary(ready, namespace, [1]))
    keeper.kill()
    volume = open_kept_volume(str(volume_path), [], io_threads=2)
    old = volume.headers[1]

    def crash():
        raise Unavailable("crash")

    with pytest.raises(Unavailable):
        volume.cut(dataclasses.replace(old, written=False), SLOT_BYTES, prewrite=True, check_stop=crash)
    volume.file.close()
    again = new_keeper().open(volume_path)
    assert again.slabs == {} and again.finished.headers_bad == 0
    writer.patch(writer.geometry.slab_offset(1) + MIB, b"\xaa")
    again.cut(1)
    assert writer.read(writer.geometry.slab_offset(1) + MIB, 1) == b"\0"


def test_summary_parts_in_any_order_make_one_summary(new_keeper, volume_path, new_summary):
    keeper = new_keeper().open(volume_path)
    namespace = keeper.add_namespace()
    ready = keeper.cut(0, 8192)
    records = new_summary(ready, namespace, list(range(0, ready.slot_count, 3)), payload_bytes=4000)
    for first in (200, 0, 100, 300):
        end = ready.slot_count if first == 300 else first + 100
        keeper.channel.send(SummaryPart(slab=0, first=first, records=records[first:end].tobytes()))
    assert isinstance(keeper.request(CloseSlab(ticket=keeper.next_ticket(), slab=0)), Done)
    keeper.kill()
    assert (new_keeper().open(volume_path).records[0] == records.astype(SUMMARY_DTYPE)).all()


def test_after_a_drop_is_answered_the_running_scan_tells_no_block_of_it(new_keeper, new_summary, tmp_path):
    path = tmp_path / "volume"
    format_volume(str(path), volume_bytes=1026 * MIB, slab_bytes=64 * MIB, namespace_count=8)
    keeper = new_keeper().open(path, prewrite=False)
    namespace = keeper.add_namespace()
    for slab in range(16):
        ready = keeper.cut(slab, 8192)
        keeper.close_slab(slab, new_summary(ready, namespace, list(range(ready.slot_count)), payload_bytes=4000))
    keeper.kill()
    again = new_keeper()
    # Some 8 MiB of records do not fit into the socket: while nothing is read, the scan stands in the middle.
    again.channel.send(OpenVolume(ticket=1, path=str(path), io_threads=2, prewrite=False))
    again.channel.send(DropNamespace(ticket=2, namespace_id=ID))
    dropped, blocks_after = False, 0
    while True:
        message, fds = again.receive()
        again.fds += fds
        if isinstance(message, Done):
            dropped = True
        elif isinstance(message, Recovered) and dropped:
            blocks_after += int(np.frombuffer(message.records, dtype=SUMMARY_DTYPE)["payload_bytes"].any())
        elif isinstance(message, ScanFinished):
            break
    assert blocks_after == 0
    if not dropped:
        again.answer(2)

"""Slots to a volume and back: the right bytes, one call of cuFile each, no copy through the host, and a clear error for each fault."""

import errno
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from ...standin.block import CufileMode
from ...standin.controls import Control, wait_until
from ...standin_tests.child import Child
from .conftest import SLOT, VOLUME_BYTES

GDS_MODES = [CufileMode.NVFS, CufileMode.P2P]
DIGEST = "import hashlib; result = hashlib.sha256(read(slot.address, SLOT_BYTES)).hexdigest()"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("mode", GDS_MODES)
def test_bytes_are_equal_by_one_registered_call_a_slice_and_no_copy_through_the_host(
    make_mover: Callable[[], Child], control: Control, path: Path, mode: CufileMode
) -> None:
    control.cufile_mode = mode
    mover = make_mover()
    mover.run("set_up()")
    process = control.process(mover.pid)
    before, old = process.counters, path.read_bytes()
    assert mover.run("result = [volume.read(slot, 0, SLOT_BYTES, i * SLOT_BYTES) for i in (0, 3, 2)]") == [SLOT] * 3
    assert mover.run("result = volume.write(slot, 0, SLOT_BYTES, 7 * SLOT_BYTES)") == SLOT
    # A part of a slot; a page of what is below KvikIO's own threshold.
    assert mover.run("result = volume.read(slot, 65536, 4096, 5 * SLOT_BYTES), volume.write(slot, 65536, 4096, 4096)") == [4096, 4096]
    moved = process.counters - before
    assert (moved.cufile_reads, moved.cufile_writes, moved.cufile_registered) == (4, 2, 6)
    assert (moved.host_copies, moved.cufile_bounced, moved.cufile_unaligned, moved.cufile_host_buffers) == (0, 0, 0, 0)
    piece = old[5 * SLOT : 5 * SLOT + 4096]
    wanted = old[2 * SLOT : 3 * SLOT]
    assert path.read_bytes() == old[:4096] + piece + old[8192 : 7 * SLOT] + wanted
    assert mover.run(DIGEST) == digest(wanted[:65536] + piece + wanted[69632:])


def test_a_slice_as_long_as_the_task_size_is_one_call(make_mover: Callable[[], Child], control: Control) -> None:
    mover = make_mover()
    mover.run("set_up(task_bytes=5 * 4096)")
    before = control.process(mover.pid).counters
    mover.run("volume.read(slot, 4096, 5 * 4096, 0)")
    assert (control.process(mover.pid).counters - before).cufile_reads == 1
    assert "at most 20480 at once" in mover.run("result = failure(lambda: volume.read(slot, 0, 6 * 4096, 0))")[2]


def test_threads_with_a_slot_each_move_their_own_bytes(mover: Child, control: Control, path: Path) -> None:
    old, before = path.read_bytes(), control.process(mover.pid).counters
    mover.run("""
        from concurrent.futures import ThreadPoolExecutor
        begin = gds.proof.snapshot()
        def swap(number):
            one, two = (StagingSlot.allocate(device, SLOT_BYTES) for _ in range(2))
            for _ in range(5):  # an odd count of swaps is one swap
                volume.read(one, 0, SLOT_BYTES, number * SLOT_BYTES)
                volume.read(two, 0, SLOT_BYTES, (number + 4) * SLOT_BYTES)
                volume.write(one, 0, SLOT_BYTES, (number + 4) * SLOT_BYTES)
                volume.write(two, 0, SLOT_BYTES, number * SLOT_BYTES)
                volume.sync()
            one.close()
            two.close()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(swap, range(4)))
    """)
    assert path.read_bytes() == old[4 * SLOT :] + old[: 4 * SLOT]
    moved = control.process(mover.pid).counters - before
    assert (moved.cufile_reads, moved.cufile_writes, moved.cufile_registered, moved.host_copies) == (40, 40, 80, 0)
    assert mover.run("counts = gds.proof.since(begin); result = [counts.way.label, counts.reads.done, counts.writes.done]") == ["gds_nvfs", 40, 40]


@pytest.mark.parametrize(
    "numbers",
    ["100, 4096, 0", "0, 4095, 0", "0, 4096, 512", "-4096, 4096, 0", "0, 4096, -4096", "0, 0, 0", "0, SLOT_BYTES + 4096, 0", "4096, SLOT_BYTES, 0"],
)
def test_numbers_that_would_bounce_or_leave_the_slot_are_refused_before_cufile_is_called(mover: Child, control: Control, numbers: str) -> None:
    before = control.process(mover.pid).counters
    for verb in ("read", "write"):
        assert mover.run(f"result = failure(lambda: volume.{verb}(slot, {numbers}))")[0] == "ValueError"
    moved = control.process(mover.pid).counters - before
    assert moved.cufile_reads == moved.cufile_writes == 0


def test_opening_a_volume_keeps_its_length_and_bytes(mover: Child, path: Path) -> None:
    old = path.read_bytes()
    mover.run("volume.close(); volume = GdsVolume.open(gds, data_fd, synced_fd)")
    assert path.read_bytes() == old and len(old) == VOLUME_BYTES


# ---- proof ----


@pytest.mark.parametrize(("mode", "way"), [(CufileMode.NVFS, "gds_nvfs"), (CufileMode.P2P, "gds_p2p"), (CufileMode.COMPAT, "cufile_posix")])
def test_the_way_is_told_as_it_was(mover: Child, control: Control, mode: CufileMode, way: str) -> None:
    control.cufile_mode = mode
    before = control.process(mover.pid).counters
    mover.run("before = gds.proof.snapshot(); volume.read(slot, 0, SLOT_BYTES, 0); [volume.write(slot, 0, SLOT_BYTES, 0) for _ in range(2)]")
    told = mover.run(
        "counts = gds.proof.since(before); result = [counts.way.label, counts.way.is_gds, counts.count(counts.way), counts.reads.done, counts.writes.done]"
    )
    assert told == [way, way != "cufile_posix", 3, 1, 2]
    bounced = (control.process(mover.pid).counters - before).host_copies
    assert bounced == (3 if way == "cufile_posix" else 0)


def test_one_bounced_io_among_many_is_seen(mover: Child, control: Control) -> None:
    mover.run("before = gds.proof.snapshot(); [volume.read(slot, 0, 4096, 0) for _ in range(20)]")
    control.cufile_mode = CufileMode.COMPAT
    mover.run("volume.read(slot, 0, 4096, 0)")
    control.cufile_mode = CufileMode.NVFS
    assert mover.run("volume.read(slot, 0, 4096, 0); counts = gds.proof.since(before); result = [counts.way.label, counts.reads.nvfs, counts.reads.posix]") == [
        "cufile_posix",
        21,
        1,
    ]


def test_nothing_moved_is_no_way(mover: Child, control: Control) -> None:
    assert mover.run("before = gds.proof.snapshot(); result = gds.proof.since(before).way.label") == "unproven"
    control.fail("cuFileRead", errno.EIO, times=1)
    told = mover.run("failure(lambda: volume.read(slot, 0, 4096, 0)); counts = gds.proof.since(before); result = [counts.way.label, counts.reads.failed]")
    assert told == ["unproven", 1]


def test_what_kvikio_moves_by_itself_is_seen(mover: Child, control: Control) -> None:
    told = mover.run("""
        import kvikio
        before = gds.proof.snapshot()
        kvikio.defaults.set("gds_threshold", 1 << 20)
        volume.read(slot, 0, 4096, 0)
        volume.read(slot, 0, SLOT_BYTES, 0)
        counts = gds.proof.since(before)
        result = [counts.way.label, counts.kvikio_posix, counts.reads.nvfs]
    """)
    assert told == ["kvikio_posix", 1, 1]


def test_counts_are_told_by_gpu(mover: Child) -> None:
    mover.run("volume.read(slot, 0, 4096, 0); mine = [gpu for gpu in CufileStats.start().read() if gpu.uuid == device.uuid]")
    assert mover.run("result = [len(mine), mine[0].reads.nvfs]") == [1, 1]


def test_a_volume_is_refused_when_kvikio_was_set_up_otherwise(mover: Child) -> None:
    told = mover.run("""
        import kvikio
        kvikio.defaults.set("compat_mode", kvikio.CompatMode.AUTO)
        result = unavailable(lambda: GdsVolume.open(gds, data_fd, synced_fd))
    """)
    assert told[0] == "unproven" and "AUTO" in told[1]


# ---- faults ----


@pytest.mark.parametrize(("verb", "function"), [("read", "cuFileRead"), ("write", "cuFileWrite")])
def test_a_short_transfer_is_an_error_and_the_next_one_goes_on(mover: Child, control: Control, verb: str, function: str) -> None:
    control.short(function, 8192, skip=1, times=1)
    told = mover.run(f"result = [failure(lambda: volume.{verb}(slot, 0, SLOT_BYTES, 0)) for _ in range(3)]")
    assert told[0] is told[2] is None
    assert told[1][:2] == ["ShortTransfer", errno.EIO] and "cuFile moved 8192" in told[1][2]


def test_a_read_over_the_end_of_the_volume_is_an_error(mover: Child) -> None:
    told = mover.run(f"result = failure(lambda: volume.read(slot, 0, SLOT_BYTES, {VOLUME_BYTES - 4096}))")
    assert told[0] == "ShortTransfer"


@pytest.mark.parametrize(
    ("verb", "function", "code", "wanted"),
    [
        ("write", "cuFileWrite", errno.EIO, errno.EIO),
        ("write", "cuFileWrite", errno.ENOSPC, errno.ENOSPC),
        ("write", "cuFileWrite", errno.EPERM, errno.EPERM),
        ("write", "cuFileWrite", 5044, errno.EIO),
        # KvikIO loses the errno of a read, so no other may be claimed.
        ("read", "cuFileRead", errno.EIO, errno.EIO),
        ("read", "cuFileRead", errno.ENOLINK, errno.EIO),
        ("read", "cuFileRead", 5044, errno.EIO),
    ],
)
def test_an_error_in_the_middle_has_its_errno_where_it_is_known(mover: Child, control: Control, verb: str, function: str, code: int, wanted: int) -> None:
    control.fail(function, code, skip=1, times=1)
    told = mover.run(f"result = [failure(lambda: volume.{verb}(slot, 0, SLOT_BYTES, 2 * SLOT_BYTES)) for _ in range(3)]")
    assert told[0] is told[2] is None
    assert told[1][1] == wanted
    assert f"{verb} {SLOT} bytes at offset {2 * SLOT}" in told[1][2]
    assert ("cufile io error" in told[1][2]) == (code == 5044)
    assert "/kvikio/" not in told[1][2]


def test_a_hung_io_holds_its_thread_alone_and_its_slot_and_volume_can_not_be_closed(mover: Child, control: Control) -> None:
    with control.hang("cuFileRead", times=1) as fault:
        mover.run("""
            hung = StagingSlot.allocate(device, 4096)
            told = []
            thread = threading.Thread(target=lambda: told.append(volume.read(hung, 0, 4096, 0)))
            thread.start()
        """)
        wait_until(lambda: fault.waiting_now == 1, "the read to hang")
        assert mover.run("result = volume.read(slot, 0, SLOT_BYTES, 0)") == SLOT
        assert mover.run("result = failure(hung.close)[0], failure(volume.close)[0]") == ["ValueError", "ValueError"]
        assert control.process(mover.pid).counters.cufile_buffers_now == 2
    assert mover.run("thread.join(); hung.close(); result = told") == [4096]
    mover.run("tear_down()")


# ---- slots ----


def test_a_slot_is_deregistered_before_it_is_freed_and_all_is_given_back(mover: Child, control: Control) -> None:
    process = control.process(mover.pid)
    held = process.counters.held
    assert (held["cufile_handles_now"], held["cufile_buffers_now"], held["allocations_now"]) == (1, 1, 1)
    mover.run("volume.read(slot, 0, 4096, 0); tear_down(); slot.close(); volume.close(); device.close()")
    assert process.counters.freed_while_registered == 0
    assert process.counters.held == {}


def test_a_slot_that_cufile_does_not_let_go_of_is_not_freed(mover: Child, control: Control) -> None:
    control.fail("cuFileBufDeregister", 5024, times=1)
    assert mover.run("result = failure(slot.close)")[:2] == ["OSError", errno.EIO]
    process = control.process(mover.pid)
    assert (process.counters.allocations_now, process.counters.freed_while_registered) == (1, 0)
    mover.run("slot.close()")
    assert (process.counters.allocations_now, process.counters.cufile_buffers_now, process.counters.freed_while_registered) == (0, 0, 0)


def test_a_refused_registration_frees_the_memory_and_names_the_limit(mover: Child, control: Control) -> None:
    control.limit_bar(SLOT)
    told = mover.run("result = unavailable(lambda: StagingSlot.allocate(device, SLOT_BYTES))")
    assert told[0] == "registration" and f"{SLOT} bytes" in told[1] and "pinned" in told[1]
    assert control.process(mover.pid).counters.allocations_now == 1
    assert mover.run("result = volume.read(slot, 0, SLOT_BYTES, 0)") == SLOT


@pytest.mark.parametrize("size_bytes", [0, 4095, 4096 + 512, (16 << 20) + 4096])
def test_a_slot_of_a_wrong_size_is_refused(mover: Child, size_bytes: int) -> None:
    told = mover.run(f"result = failure(lambda: StagingSlot.allocate(device, {size_bytes}))")
    assert told[0] == "ValueError" and str(size_bytes) in told[2]


def test_a_closed_slot_and_a_closed_volume_are_refused(mover: Child) -> None:
    mover.run("other = StagingSlot.allocate(device, 4096); other.close()")
    assert "closed" in mover.run("result = failure(lambda: volume.read(other, 0, 4096, 0))")[2]
    mover.run("volume.close()")
    assert "closed" in mover.run("result = failure(lambda: volume.write(slot, 0, 4096, 0))")[2]
    assert "closed" in mover.run("result = failure(volume.sync)")[2]

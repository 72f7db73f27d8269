"""`gds`: bytes go between GPU memory and a volume by cuFile, nothing of the payload through the host, and the answer says what was proven."""

import errno
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from offloadd.units import KIB

from ..standin.block import CufileMode
from ..standin.controls import Control, wait_until
from ..system.daemon_process import DaemonProcess
from .conftest import Node, settled_gds

COUNT = 12
BLOCK_BYTES = 640 * KIB
SHAPE = {"block_count": 2 * COUNT, "memory_bytes": [2 * COUNT * BLOCK_BYTES], "planes": [(0, 0, BLOCK_BYTES, BLOCK_BYTES)]}
EVICT = f"""
    half = {COUNT}
    names = [f"block {{number}}" for number in range(half)]
    for number, name in enumerate(names):
        engine.write(number, name)
    evicted = engine.evict(range(half), names, durable=True, path="GDS", require_path=True)
    result = evicted
"""
RESTORE = """
    restored = engine.restore(range(half, 2 * half), names, path="GDS", require_path={require})
    result = [restored, engine.wrong(range(half, 2 * half), names)]
"""


@pytest.fixture
def daemon(standin_node: Node) -> DaemonProcess:
    daemon = standin_node.daemon(mover={"verify_target": 0})
    assert settled_gds(daemon) == (True, "")
    return daemon


def test_no_payload_passes_the_host_and_a_slice_is_one_call(standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None]) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    assert standin_node.control is not None
    mover = standin_node.control.process(daemon.worker_pid("mover cuda:0"))
    before = mover.counters
    evicted = engine.run(EVICT)
    restored, wrong = engine.run(RESTORE.format(require=True))
    done = mover.counters - before
    assert evicted["paths"] == restored["paths"] == [["VOLUME", "GDS", COUNT]]
    assert {outcome[0] for outcome in restored["outcomes"]} == {"RESTORED"} and wrong == []
    # Header sectors, and 12 bytes a block: its length there, its checksum back.
    assert done.host_to_device_bytes + done.device_to_host_bytes == COUNT * (4096 + 8 + 4) + COUNT * (4096 + 8 + 4)
    assert done.cufile_host_copies == done.cufile_bounced == done.cufile_unaligned == 0
    slot_bytes = BLOCK_BYTES + 4096
    assert (done.cufile_write_bytes, done.cufile_read_bytes) == (COUNT * slot_bytes, COUNT * slot_bytes)
    # Neighbouring slots, and 8 threads by default: one slice for each.
    assert (done.cufile_writes, done.cufile_reads, done.cufile_registered) == (8, 8, 16)
    assert done.kernels > 0


def test_what_one_path_wrote_any_other_restores(standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None]) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    engine.run(EVICT)
    for path in ("BOUNCE", "GDS"):
        restored, wrong = engine.run(RESTORE.format(require=True).replace('path="GDS"', f"path={path!r}"))
        assert restored["paths"] == [["VOLUME", path, COUNT]] and wrong == []


@pytest.mark.parametrize(
    ("hinder", "why"),
    [
        (lambda control: control.fail("cuFileDriverOpen", 5001), "open the driver of cuFile"),
        (lambda control: setattr(control, "cufile_mode", CufileMode.COMPAT), "bounced through POSIX"),
        (lambda control: control.fail("cuFileHandleRegister", 5008), "open the volume with cuFile"),
        (lambda control: control.limit_bar(4 << 20), "with cuFile"),
        (lambda control: control.fail("cuFileRead", errno.EIO), "cuFile gave an error"),
    ],
    ids=["no driver", "compat", "file system", "BAR1", "I/O error"],
)
def test_incident_17_where_there_is_no_way_past_the_host_the_daemon_says_why_and_bounces(
    standin_node: Node, make_engine: Callable[..., None], hinder: Callable[[Control], object], why: str
) -> None:
    assert standin_node.control is not None
    hinder(standin_node.control)
    daemon, engine = standin_node.daemon(), standin_node.engine()
    available, note = settled_gds(daemon)
    assert not available and why in note
    make_engine(engine, daemon, **SHAPE)
    with pytest.raises(RuntimeError, match="path gds is not available"):
        engine.run(EVICT)
    evicted = engine.run(EVICT.replace(", require_path=True", ""))
    restored, wrong = engine.run(RESTORE.format(require=False))
    assert evicted["paths"] == restored["paths"] == [["VOLUME", "BOUNCE", COUNT]] and wrong == []


def test_volumes_are_probed_one_after_the_other(standin_node: Node) -> None:
    assert standin_node.control is not None
    with standin_node.control.hang("cuFileWrite"):
        daemon = standin_node.daemon(volume_count=2)
        daemon.wait_until(lambda: daemon.log.read_text().count("a way is not served") == 2, "the end of both probes", timeout_s=60)
        first, second = [line.split()[0] for line in daemon.log.read_text().splitlines() if "a way is not served" in line]
        assert datetime.fromisoformat(second) - datetime.fromisoformat(first) > timedelta(seconds=5), "both were probed at once"


@pytest.mark.parametrize("require", [False, True])
@pytest.mark.parametrize("operation", ["evict", "restore"])
def test_cufile_that_bounces_later_is_told(standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None], operation: str, require: bool) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    if operation == "restore":
        engine.run(EVICT)
    assert standin_node.control is not None
    standin_node.control.cufile_mode = CufileMode.COMPAT
    if operation == "restore":
        moved, wrong = engine.run(RESTORE.format(require=require))
        assert len(wrong) == (COUNT if require else 0), "bytes were scattered though the required path was not taken"
    else:
        moved = engine.run(EVICT.replace("require_path=True", f"require_path={require}"))
    if require:
        assert {tuple(outcome[:2]) for outcome in moved["outcomes"]} == {("FAILED", "WRONG_PATH")} and moved["paths"] == []
    else:
        assert (moved["paths"], moved["ways"]) == ([["VOLUME", "BOUNCE", COUNT]], {"cufile_posix": COUNT})
        counted = daemon.counters()
        assert counted[f'offloadd_bytes_total{{operation="{operation}",tier="volume",path="bounce",way="cufile_posix"}}'] == COUNT * BLOCK_BYTES
        assert not any(f'operation="{operation}"' in name and 'path="gds"' in name for name in counted)


@pytest.mark.parametrize(("mode", "way"), [(CufileMode.NVFS, "gds_nvfs"), (CufileMode.P2P, "gds_p2p")])
def test_the_two_ways_past_the_host_are_told_apart(standin_node: Node, make_engine: Callable[..., None], mode: CufileMode, way: str) -> None:
    assert standin_node.control is not None
    standin_node.control.cufile_mode = mode
    daemon, engine = standin_node.daemon(), standin_node.engine()
    assert settled_gds(daemon) == (True, "")
    make_engine(engine, daemon, **SHAPE)
    evicted = engine.run(EVICT)
    restored, _ = engine.run(RESTORE.format(require=True))
    for moved in (evicted, restored):
        assert (moved["paths"], moved["ways"]) == ([["VOLUME", "GDS", COUNT]], {way: COUNT})
    counted = daemon.counters()
    for operation in ("evict", "restore"):
        assert counted[f'offloadd_bytes_total{{operation="{operation}",tier="volume",path="gds",way="{way}"}}'] == COUNT * BLOCK_BYTES


@pytest.mark.parametrize(("mode", "path", "way"), [(CufileMode.NVFS, "gds", "gds_nvfs"), (CufileMode.COMPAT, "bounce", "cufile_posix")])
def test_what_is_answered_before_cufile_has_it_claims_no_way(
    standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None], mode: CufileMode, path: str, way: str
) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    engine.run(EVICT.replace("block {number}", "cuts the slab {number}"))
    control = standin_node.control
    assert control is not None
    name = f'offloadd_bytes_total{{operation="evict",tier="volume",path="{path}",way="{way}"}}'
    before = daemon.counters()
    control.cufile_mode = mode
    with control.hang("cuFileWrite"):
        copied = engine.run(EVICT.replace("durable=True", "durable=False").replace("require_path=True", "require_path=False"))
        assert copied["paths"] == [["VOLUME", "AUTO", COUNT]] and copied["ways"] == {"plain": COUNT}
        told = {other: value for other, value in daemon.counters().items() if other.startswith("offloadd_bytes")}
        assert told == {other: value for other, value in before.items() if other.startswith("offloadd_bytes")}, "bytes were counted that no way had taken"
    daemon.wait_until(lambda: daemon.counters().get(name, 0) - before.get(name, 0) == COUNT * BLOCK_BYTES, "the count of the late bytes")


@pytest.mark.parametrize("call", ["cuFileRead", "cuFileWrite"])
def test_an_error_in_the_middle_fails_its_blocks_and_no_others(standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None], call: str) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    assert standin_node.control is not None
    if call == "cuFileRead":
        engine.run(EVICT)
    with standin_node.control.fail(call, errno.EIO, times=1) as fault:
        outcomes = engine.run(RESTORE.format(require=True))[0]["outcomes"] if call == "cuFileRead" else engine.run(EVICT)["outcomes"]
        assert fault.hits == 1
    failed = [outcome[1] for outcome in outcomes if outcome[0] == "FAILED"]
    assert failed and set(failed) == {"IO_ERROR"} and len(failed) < COUNT
    engine.run(EVICT)
    restored, wrong = engine.run(RESTORE.format(require=True))
    assert {outcome[0] for outcome in restored["outcomes"]} == {"RESTORED"} and wrong == []


def test_a_corrupt_payload_is_found_on_the_gpu(standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None]) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    engine.run(EVICT)
    content = bytearray(daemon.volumes[0].read_bytes())
    payload = bytes.fromhex(engine.run("result = engine.expected('block 3').hex()"))
    at = content.index(payload)
    content[at + 100_000] ^= 4
    with daemon.volumes[0].open("r+b") as file:
        file.seek(at)
        file.write(content[at : at + BLOCK_BYTES])
    restored, wrong = engine.run(RESTORE.format(require=True))
    assert [outcome[:2] for outcome in restored["outcomes"]] == [
        ["DATA_LOSS", "CHECKSUM_MISMATCH"] if number == 3 else ["RESTORED", "NONE"] for number in range(COUNT)
    ]
    assert wrong == [COUNT + 3]


def test_a_short_read_is_data_loss(standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None]) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    engine.run(EVICT)
    assert standin_node.control is not None
    with standin_node.control.short("cuFileRead", 8192, times=1):
        restored, wrong = engine.run(RESTORE.format(require=True))
    lost = [number for number, outcome in enumerate(restored["outcomes"]) if outcome[:2] == ["DATA_LOSS", "SHORT_IO"]]
    assert lost and wrong == [COUNT + number for number in lost]


def test_durable_is_answered_after_a_sync_that_covers_the_write(standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None]) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    assert standin_node.control is not None
    mover = daemon.worker_pid("mover cuda:0")
    with standin_node.control.hang("fdatasync", times=1, pid=mover) as fault:
        engine.start(EVICT)
        wait_until(lambda: fault.waiting_now == 1, "a sync after the writes")
        assert standin_node.control.process(mover).counters.cufile_writes > 0
    assert {outcome[0] for outcome in engine.finish()["outcomes"]} == {"STORED"}


def test_after_a_failed_sync_nothing_more_is_durable_and_what_was_is_still_restored(
    standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None]
) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **SHAPE)
    engine.run(EVICT)
    assert standin_node.control is not None
    standin_node.control.fail("fdatasync", errno.EIO, times=1, pid=daemon.worker_pid("mover cuda:0"))
    more = "result = engine.evict([0], [{name!r}], durable=True, path='GDS', require_path=True)"
    for name in ("the failed sync's", "one later"):
        assert engine.run(more.format(name=name))["outcomes"] == [["FAILED", "IO_ERROR", "ANY"]]
    restored, wrong = engine.run(RESTORE.format(require=True))
    assert {outcome[0] for outcome in restored["outcomes"]} == {"RESTORED"} and wrong == []


def test_what_lies_behind_a_payload_in_its_slot_is_no_other_block(standin_node: Node, make_engine: Callable[..., None]) -> None:
    daemon = standin_node.daemon(io_threads=1)
    assert settled_gds(daemon) == (True, "")
    for payload_bytes, name in ((8191, "a secret"), (5001, "short")):
        # Both payloads take slots of 12 KiB, so the second is staged where the first was.
        engine = standin_node.engine()
        make_engine(engine, daemon, block_count=1, memory_bytes=[payload_bytes], planes=[(0, 0, payload_bytes, payload_bytes)], weights=name)
        engine.run(f"engine.write(0, {name!r})")
        engine.run(f"engine.evict([0], [{name!r}], durable=True, path='GDS', require_path=True)")
        payload = bytes.fromhex(engine.run(f"result = engine.expected({name!r}).hex()"))
    content = daemon.volumes[0].read_bytes()
    at = content.index(payload)
    assert content[at + 5001 : at + 8192] == bytes(8192 - 5001)

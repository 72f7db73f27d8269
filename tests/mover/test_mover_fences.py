"""After a fence, an unmap or a deadline has been answered, no copy touches engine memory. Each test chooses the order of events."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from offloadd.ipc.channel import socket_pair
from offloadd.memory.mapping import map_memories, map_private
from offloadd.memory.planes import plane_views
from offloadd.model.enums import Reason
from offloadd.mover import handover, long_work, slot_io
from offloadd.mover.device import HostDevice, HostRegion
from offloadd.mover.engine_memory import EngineMemory
from offloadd.mover.lane import Lane
from offloadd.mover.messages import AddLane, Copied, Fenced, FenceMove, ForgetMove, Job, Operation, Shutdown, SliceDone, Unmapped, UnmapRegion
from offloadd.mover.slices import Slice
from offloadd.mover.tools import Memories, Tools
from offloadd.mover.volume import adopt_volume
from offloadd.mover.work import run
from offloadd.tiers.format import slot_bytes_for
from offloadd.transfer.native import NativeUnavailableError, load
from offloadd.units import MIB, align_up

from .mover_harness import ANSWER_TIMEOUT_S, NONCE, UUID, Engine, Mover, make_records, plain
from .mover_harness import Lane as Peer

SLOT_BYTES = slot_bytes_for(20000)


@pytest.mark.parametrize("operation", [op for op in Operation if op != Operation.NULL])
def test_no_slice_of_a_fenced_move_touches_memory(mover, volume, make_engine, arena, operation):
    engine = make_engine()
    first = mover.add_lane(volume)
    first.run(Operation.EVICT, make_records(range(8), 20000), SLOT_BYTES)
    # The jobs wait in a socket that nobody reads yet: the mover learns of the fence first, and of the jobs only then.
    sockets = mover.lane_sockets()
    records = make_records(range(8, 16), 20000, arena_step=align_up(20000, 4096))
    fenced = sockets[0].submit(operation, records, SLOT_BYTES, move=77, verify=False)
    assert mover.ask(FenceMove(move=77)) == Fenced(move=77)
    before, on_disk = engine.snapshot(), volume.read(0, 0, 16 * SLOT_BYTES)
    lane = mover.add_lane(volume, number=2, sockets=sockets)
    outcome = lane.collect(fenced, 8)
    assert outcome.reasons == [Reason.CANCELLED] * 8 and outcome.copied == 0 and not any(done.io_bytes for done in outcome.done)
    assert engine.snapshot() == before and volume.read(0, 0, 16 * SLOT_BYTES) == on_disk and not any(arena[:MIB])
    # The fence is the move's alone, and ends when the move is forgotten.
    assert lane.run(Operation.RESTORE, make_records(range(8, 16), 20000), SLOT_BYTES, move=78).reasons == [0] * 8
    mover.control.send(ForgetMove(move=77))
    assert mover.ask(FenceMove(move=1)) == Fenced(move=1)
    assert lane.run(Operation.RESTORE, make_records(range(8, 16), 20000), SLOT_BYTES, move=77).reasons == [0] * 8


def test_a_fence_is_obeyed_before_the_job_that_stood_in_line_with_it(mover, volume, make_engine):
    engine = make_engine()
    lane = mover.add_lane(volume)
    lane.run(Operation.EVICT, make_records(range(8), 20000), SLOT_BYTES)
    before = engine.snapshot()
    for move in range(100, 120):
        # Both wait on different sockets when the mover goes on; nothing but the look at the control socket puts them in order.
        mover.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, mover.process.pid, os.WSTOPPED)
        job = lane.submit(Operation.RESTORE, make_records(range(8, 16), 20000), SLOT_BYTES, move=move)
        mover.control.send(FenceMove(move=move))
        mover.process.send_signal(signal.SIGCONT)
        assert lane.collect(job, 8).reasons == [Reason.CANCELLED] * 8
        assert mover.receive() == Fenced(move=move)
    assert engine.snapshot() == before


def test_slices_of_an_unmapped_region_touch_no_memory(mover, volume, make_engine):
    engine = make_engine()
    lane = mover.add_lane(volume)
    lane.run(Operation.EVICT, make_records(range(8), 20000), SLOT_BYTES)
    assert mover.ask(UnmapRegion(region=1)) == Unmapped(region=1)
    assert "memfd:engine" not in Path(f"/proc/{mover.process.pid}/maps").read_text()
    before = engine.snapshot()
    for operation in (Operation.RESTORE, Operation.EVICT):
        assert lane.run(operation, make_records(range(8, 16), 20000), SLOT_BYTES).reasons == [Reason.CANCELLED] * 8
    assert engine.snapshot() == before
    make_engine(number=1)


def test_shutdown_ends_with_zero(mover, volume):
    mover.add_lane(volume)
    mover.control.send(Shutdown())
    assert mover.process.wait(ANSWER_TIMEOUT_S) == 0


def test_running_slices_finish_after_shutdown_though_the_front_has_hung_up(mover, volume, make_engine):
    make_engine()
    lane = mover.add_lane(volume, threads=1)
    mover.process.send_signal(signal.SIGSTOP)
    lane.submit(Operation.EVICT, make_records(range(8), 20000), SLOT_BYTES)
    mover.control.send(Shutdown())
    mover.control.sock.shutdown(socket.SHUT_WR)
    mover.process.send_signal(signal.SIGCONT)
    assert mover.process.wait(ANSWER_TIMEOUT_S) == 0


def test_the_mover_process_imports_neither_grpc_nor_cuda():
    code = "import sys, offloadd.mover.main; print(sorted({'grpc', 'google.protobuf', 'pydantic', 'cupy', 'kvikio', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_lane_that_can_not_be_had_ends_the_mover_with_an_error(volume):
    mover = Mover()
    _, theirs = mover.lane_sockets()
    message = AddLane(
        lane=1, path="host", thread_count=4, staging_slot_bytes=4096, volume_uuid=UUID, slab_bytes=volume.slab_bytes, data_offset=volume.data_offset
    )
    mover.control.send(message, [theirs.fileno(), *volume.fds])
    assert mover.process.wait(ANSWER_TIMEOUT_S) == 1
    mover.control.close()


def test_the_mover_dies_with_its_parent(tmp_path):
    """Its control socket stays open here, so only the death of the parent can end it."""
    ours, theirs = socket_pair()
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'offloadd.mover.main', '--fd', sys.argv[1]], pass_fds=[int(sys.argv[1])])\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    ours.settimeout(ANSWER_TIMEOUT_S)
    hello = msgspec.msgpack.decode(ours.recv(4096))
    pidfd = os.pidfd_open(hello["pid"])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert select.select([pidfd], [], [], ANSWER_TIMEOUT_S)[0] == [pidfd]
    os.close(pidfd)
    ours.close()
    theirs.close()


class Workshop:
    """A mover's insides without the process, so that a test can step in between."""

    def __init__(self, volume, payload_bytes=20000, block_count=16, arena=None, native=None):
        self.engine = Engine(*plain(block_count, payload_bytes))
        self.engine.fill()
        self.memories = Memories(HostDevice())
        mapping = map_memories(self.engine.fds, self.engine.memory_bytes)
        self.memories.engine.add(1, HostRegion(mapping, plane_views(mapping.bytes, self.engine.layout, mapping.offsets), native))
        self.staging = map_private(8 * MIB)
        self.volume = adopt_volume(*volume.fds, volume_uuid=UUID, slab_bytes=volume.slab_bytes, data_offset=volume.data_offset, thread_count=4)
        self.sent = []
        self.tools = Tools(self.memories, "host", self.staging, self.volume, self.sent.append)
        self.slot_bytes = slot_bytes_for(payload_bytes)

    def run(self, operation, records, **options):
        self.sent.clear()
        job = Job(job=1, move=5, operation=operation, slot_bytes=self.slot_bytes, blocks=b"", **options)
        piece = Slice(job, operation, records)
        run(self.tools, piece)
        return piece.reasons.tolist()

    def close(self):
        self.memories.engine.remove(1)
        self.staging.close()
        self.engine.close()


@pytest.fixture(params=["numpy", "as_built"])
def workshop(volume, request):
    workshop = Workshop(volume, native=_library() if request.param == "as_built" else None)
    assert workshop.run(Operation.EVICT, make_records(range(4), 20000)) == [0] * 4
    yield workshop
    workshop.close()


def _library():
    try:
        return load()
    except NativeUnavailableError as error:
        pytest.skip(f"the native library: {error}")


def _while_reading(monkeypatch, happen):
    real = slot_io.read

    def read(fd, buffers, offset):
        moved = real(fd, buffers, offset)
        happen()
        return moved

    monkeypatch.setattr(slot_io, "read", read)


def test_incident_2_a_fence_that_is_answered_during_the_read_stops_the_scatter(workshop, monkeypatch):
    _while_reading(monkeypatch, lambda: workshop.memories.engine.fence(5))
    before = workshop.engine.snapshot()
    assert workshop.run(Operation.RESTORE, make_records(range(4, 8), 20000)) == [Reason.CANCELLED] * 4
    assert workshop.engine.snapshot() == before


def test_an_unmap_that_is_answered_during_the_read_stops_the_scatter(workshop, monkeypatch):
    _while_reading(monkeypatch, lambda: workshop.memories.engine.remove(1))
    before = workshop.engine.snapshot()
    assert workshop.run(Operation.RESTORE, make_records(range(4, 8), 20000)) == [Reason.CANCELLED] * 4
    assert workshop.engine.snapshot() == before


def test_a_deadline_that_passes_during_the_read_stops_the_scatter(workshop, monkeypatch):
    deadline_ns = time.monotonic_ns() + 20_000_000_000

    def expire():
        monkeypatch.setattr("offloadd.mover.slices.time", SimpleNamespace(monotonic_ns=lambda: deadline_ns))

    _while_reading(monkeypatch, expire)
    before = workshop.engine.snapshot()
    assert workshop.run(Operation.RESTORE, make_records(range(4, 8), 20000), deadline_ns=deadline_ns) == [Reason.DEADLINE] * 4
    assert workshop.engine.snapshot() == before


@pytest.mark.parametrize(
    ("operation", "ended_by", "durable", "reason"),
    [
        (Operation.RESTORE, Reason.CANCELLED, False, Reason.CANCELLED),
        (Operation.RESTORE, Reason.DEADLINE, False, Reason.DEADLINE),
        (Operation.READ_ONLY, Reason.DEADLINE, False, Reason.DEADLINE),
        (Operation.EVICT, Reason.CANCELLED, False, Reason.CANCELLED),
        (Operation.EVICT, Reason.CANCELLED, True, Reason.CANCELLED),
        (Operation.EVICT, Reason.DEADLINE, True, Reason.DEADLINE),
        # It may have been answered STORED at its COPIED.
        (Operation.EVICT, Reason.DEADLINE, False, Reason.NONE),
    ],
)
def test_what_ends_while_it_waits_behind_other_ios_does_not_begin_its_own(workshop, monkeypatch, operation, ended_by, durable, reason):
    deadline_ns = time.monotonic_ns() + 20_000_000_000
    waits, begun = [], []

    def wait(room):
        assert room()
        waits.append(1)
        if ended_by == Reason.CANCELLED:
            workshop.memories.engine.fence(5)
        else:
            monkeypatch.setattr("offloadd.mover.slices.time", SimpleNamespace(monotonic_ns=lambda: deadline_ns))

    monkeypatch.setattr(workshop.volume.gate._changed, "wait_for", wait)
    for name in ("read", "write"):
        real = getattr(slot_io, name)
        monkeypatch.setattr(slot_io, name, lambda *arguments, real=real: begun.append(1) or real(*arguments))
    assert workshop.run(operation, make_records(range(4), 20000), deadline_ns=deadline_ns, durable=durable) == [reason] * 4
    assert waits == [1] and begun == ([] if reason else [1])


def test_a_fence_between_two_chunks_stops_a_long_restore(volume, monkeypatch):
    workshop = Workshop(volume, 17 * MIB, 2)
    workshop.run(Operation.EVICT, make_records([0], 17 * MIB))
    reads = []

    def fence_at_third():
        reads.append(1)
        if len(reads) == 3:
            workshop.memories.engine.fence(5)

    _while_reading(monkeypatch, fence_at_third)
    before = workshop.engine.read(1)
    assert workshop.run(Operation.RESTORE, make_records([1], 17 * MIB)) == [Reason.CANCELLED]
    after = workshop.engine.read(1)
    assert after[: 8 * MIB] == workshop.engine.read(0)[: 8 * MIB] and after[8 * MIB :] == before[8 * MIB :]
    workshop.close()


def test_the_header_of_a_long_block_is_written_last(volume, monkeypatch):
    workshop = Workshop(volume, 17 * MIB, 2)
    real, seen = slot_io.write, []

    def write(fd, buffers, offset):
        seen.append((offset - volume.offset(0, 0, workshop.slot_bytes), any(volume.read(0, 0, workshop.slot_bytes)[:4096]), len(workshop.sent)))
        return real(fd, buffers, offset)

    monkeypatch.setattr(slot_io, "write", write)
    assert workshop.run(Operation.EVICT, make_records([0], 17 * MIB)) == [0]
    assert [at for at, _, _ in seen] == [4096 + chunk * 4 * MIB for chunk in (1, 2, 3, 4)] + [0]
    assert not any(has_header for _, has_header, _ in seen)
    assert [sent for _, _, sent in seen] == [0, 0, 0, 0, 1]
    workshop.close()


def test_an_evict_is_copied_before_a_byte_is_written(workshop, monkeypatch):
    seen = []

    def write(fd, buffers, offset):
        seen.extend(workshop.sent)
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr(slot_io, "write", write)
    assert workshop.run(Operation.EVICT, make_records(range(4), 20000)) == [Reason.IO_ERROR] * 4
    assert seen == [Copied(job=1, count=4)] and isinstance(workshop.sent[-1], SliceDone)


def test_a_block_gathered_wrongly_is_neither_copied_nor_stored(workshop, volume, monkeypatch):
    real = handover.gather_blocks

    def gather(piece, regions, target, **checks):
        real(piece, regions, target, **checks)
        target.buffer[int(target.offsets[2]) + 777] ^= 1

    monkeypatch.setattr(handover, "gather_blocks", gather)
    assert workshop.run(Operation.EVICT, make_records(range(4), 20000), verify_target=2) == [0, 0, Reason.TARGET_MISMATCH, 0]
    assert workshop.sent[0] == Copied(job=1, count=3)
    assert not any(volume.read(0, 2, SLOT_BYTES)[:4096]) and any(volume.read(0, 3, SLOT_BYTES)[:4096])


def test_a_block_scattered_wrongly_is_told(workshop, monkeypatch):
    real = handover.scatter_blocks

    def scatter(piece, regions, source, chosen, **checks):
        real(piece, regions, source, chosen, **checks)
        workshop.engine.maps[0][5 * 20000 + 19999] ^= 1

    monkeypatch.setattr(handover, "scatter_blocks", scatter)
    records = make_records(range(4, 8), 20000)
    assert workshop.run(Operation.RESTORE, records, verify_target=1) == [0, Reason.TARGET_MISMATCH, 0, 0]
    assert workshop.run(Operation.RESTORE, records, verify_target=2) == [0] * 4, "position 1 is not in a sample of every second block"


def test_a_long_block_copied_wrongly_is_told(volume, monkeypatch):
    workshop = Workshop(volume, 17 * MIB, 2)
    real = long_work.scatter_blocks

    def scatter(piece, regions, source, chosen, first, last):
        real(piece, regions, source, chosen, first, last)
        if first:
            workshop.engine.maps[0][17 * MIB + last - 1] ^= 1

    monkeypatch.setattr(long_work, "scatter_blocks", scatter)
    workshop.run(Operation.EVICT, make_records([0], 17 * MIB))
    assert workshop.run(Operation.RESTORE, make_records([1], 17 * MIB), verify_target=1) == [Reason.TARGET_MISMATCH]
    workshop.close()


def test_an_unforeseen_exception_gives_every_block_a_reason(workshop, monkeypatch):
    monkeypatch.setattr(slot_io, "read", lambda *_: 1 / 0)
    assert workshop.run(Operation.RESTORE, make_records(range(4), 20000)) == [Reason.IO_ERROR] * 4


def _engine_memory():
    memory = EngineMemory(lambda: None)
    events = []
    mapping = SimpleNamespace(close=lambda: events.append("unmapped"))
    memory.add(1, HostRegion(mapping, ()))
    return memory, events


@pytest.mark.parametrize(
    "close_door", [lambda memory: memory.remove(1), lambda memory: memory.fence(9), lambda memory: memory.close()], ids=["unmap", "fence", "close"]
)
def test_closing_the_door_waits_for_the_copy_that_runs(close_door):
    memory, events = _engine_memory()
    with memory.borrow(9, [1]) as regions:
        assert regions is not None
        closer = threading.Thread(target=lambda: (close_door(memory), events.append("answered")))
        closer.start()
        # As soon as the closer has shut the door, nobody else gets in: then it is where it must wait.
        while True:
            with memory.borrow(9, [1]) as second:
                if second is None:
                    break
        closer.join(0.3)
        assert closer.is_alive() and events == []
        events.append("copied")
    closer.join(ANSWER_TIMEOUT_S)
    assert not closer.is_alive() and events[0] == "copied" and events[-1] == "answered"


def test_a_lane_whose_socket_closes_ends_its_threads_and_closes_its_files(volume):
    ours, theirs = socket_pair()
    fds = [os.dup(fd) for fd in volume.fds]
    opened = adopt_volume(*fds, volume_uuid=UUID, slab_bytes=volume.slab_bytes, data_offset=volume.data_offset, thread_count=4)
    lane = Lane(1, theirs, Memories(HostDevice()), opened, path="host", thread_count=4, staging_slot_bytes=8 * MIB)
    lane.open()
    ours.close()
    lane.join()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert theirs.fileno() == -1


def test_a_stopped_lane_ends_though_its_peer_stays():
    ours, theirs = socket_pair()
    lane = Lane(1, theirs, Memories(HostDevice()), None, path="ddr", thread_count=3, staging_slot_bytes=0)
    lane.open()
    lane.stop()
    lane.join()
    assert ours.recv(1) == b""
    ours.close()


def test_a_job_is_spread_over_all_threads_of_a_lane(volume, monkeypatch):
    """Four slices are in the volume's read at the same time, or none of them ever ends."""
    barrier = threading.Barrier(4, timeout=ANSWER_TIMEOUT_S)
    monkeypatch.setattr(slot_io, "read", lambda fd, buffers, offset: barrier.wait() * 0 + sum(buffer.nbytes for buffer in buffers))
    ours, theirs = socket_pair()
    ours.settimeout(ANSWER_TIMEOUT_S)
    opened = adopt_volume(*[os.dup(fd) for fd in volume.fds], volume_uuid=UUID, slab_bytes=volume.slab_bytes, data_offset=volume.data_offset, thread_count=4)
    lane = Lane(1, theirs, Memories(HostDevice()), opened, path="host", thread_count=4, staging_slot_bytes=8 * MIB)
    lane.open()
    peer = Peer(ours)
    outcome = peer.run(Operation.READ_ONLY, make_records(range(16), 20000, nonce=np.void(NONCE)), SLOT_BYTES)
    assert outcome.reasons == [0] * 16 and len(outcome.done) == 4
    ours.shutdown(socket.SHUT_RDWR)
    ours.close()
    lane.join()

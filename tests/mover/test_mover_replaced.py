"""A mover that is going to be replaced: it closes its mappings of engine memory whatever its main thread does; and what a volume that hangs holds of others."""

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest

from offloadd.ipc.channel import Channel, socket_pair
from offloadd.memory.memfd import create_sealed
from offloadd.model.enums import Reason
from offloadd.mover.device import HostDevice
from offloadd.mover.main import Mover as MoverCode
from offloadd.mover.messages import (
    CloseMemory,
    Control,
    ControlAnswer,
    Fenced,
    FenceMove,
    Hello,
    LastOrders,
    Mapped,
    MapRegion,
    MemoryClosed,
    NotMapped,
    Operation,
    Ping,
    PlaneSpec,
    Pong,
)
from offloadd.tiers.format import slot_bytes_for

from .mover_harness import ANSWER_TIMEOUT_S, Mover, VolumeFile, make_records

SLOT_BYTES = slot_bytes_for(20000)


def last_orders(send):
    """The front's end of the socket for them."""
    ours, theirs = socket_pair()
    ours.settimeout(ANSWER_TIMEOUT_S)
    send(LastOrders(), [theirs.fileno()])
    theirs.close()
    return Channel(ours, MemoryClosed)


def test_a_mover_answers_pings(mover):
    assert mover.ask(Ping()) == Pong()


def test_a_mover_closes_every_mapping_of_engine_memory_for_good_and_goes_on_without(mover, volume, make_engine):
    engine = make_engine()
    other = make_engine(number=2, seed=2)
    lane = mover.add_lane(volume)
    lane.run(Operation.EVICT, make_records(range(8), 20000), SLOT_BYTES)
    last = last_orders(mover.control.send)
    last.send(CloseMemory())
    assert last.receive() == (MemoryClosed(), [])
    assert "memfd:engine" not in Path(f"/proc/{mover.process.pid}/maps").read_text()
    before = engine.snapshot(), other.snapshot()
    for operation in (Operation.RESTORE, Operation.EVICT):
        assert lane.run(operation, make_records(range(8, 16), 20000), SLOT_BYTES).reasons == [Reason.CANCELLED] * 8
    # Also what comes later, such as a region that was on its way.
    answer = mover.map_region(engine, 3)
    assert isinstance(answer, NotMapped) and "being replaced" in answer.error
    assert (engine.snapshot(), other.snapshot()) == before
    last.close()


def test_last_orders_are_obeyed_while_the_main_thread_waits_for_a_copy_that_does_not_end():
    ours, theirs = socket_pair()
    ours.settimeout(ANSWER_TIMEOUT_S)
    code = MoverCode(Channel(theirs, Control), HostDevice())
    threading.Thread(target=code.serve, daemon=True).start()
    control = Channel(ours, ControlAnswer)
    assert isinstance(control.receive()[0], Hello)
    fd = create_sealed("engine", 4096)
    control.send(MapRegion(region=1, memory_bytes=(4096,), block_count=1, planes=(PlaneSpec(0, 0, 4096, 4096),)), [fd])
    assert control.receive()[0] == Mapped(region=1)
    last = last_orders(control.send)
    control.send(Ping())
    assert control.receive()[0] == Pong()
    memory = code._memories.engine
    with memory.borrow(9, [1]) as regions:
        assert regions is not None
        # It waits for this copy, and obeys nothing any more.
        control.send(FenceMove(move=9))
        control.send(Ping())
        last.send(CloseMemory())
        # Once the order has come no copy of whatever move begins. (`borrow` itself would wait for the main thread.)
        while not memory._closed:
            pass
        last.sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            last.receive()
    last.sock.settimeout(ANSWER_TIMEOUT_S)
    assert last.receive()[0] == MemoryClosed()
    assert control.receive()[0] == Fenced(move=9)
    os.close(fd)
    control.close()


def _files_by_thread(pid):
    """Names of the files that each thread of a process holds; threads that end meanwhile hold none."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        links = found[int(task.name)] = set()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for link in (task / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    links.add(str(link.readlink()))
    return found


def test_no_thread_holds_a_volume_that_is_not_its_own(mover, volume, tmp_path):
    other = VolumeFile(tmp_path / "other").create()
    lanes = [mover.add_lane(volume, threads=3), mover.add_lane(other, number=2, threads=3), mover.add_lane(number=3, threads=2)]
    pid = mover.process.pid
    held = {task: files & {str(volume.path), str(other.path)} for task, files in _files_by_thread(pid).items()}
    assert held[pid] == set(), "the main thread, and so the arena's, holds a volume"
    assert sorted(map(sorted, filter(None, held.values()))) == sorted([[str(volume.path)]] * 3 + [[str(other.path)]] * 3)
    # Lanes work, and end one by one.
    assert lanes[1].run(Operation.NULL, make_records(range(2), 20000), SLOT_BYTES).reasons == [0, 0]
    lanes[0].channel.close()
    while any(str(volume.path) in files for files in _files_by_thread(pid).values()):
        pass
    assert lanes[1].run(Operation.NULL, make_records(range(2), 20000), SLOT_BYTES).reasons == [0, 0]
    other.close()


def test_the_front_sees_the_end_of_every_lane_of_a_mover_that_is_killed(volume):
    mover = Mover()
    lanes = [mover.add_lane(volume), mover.add_lane(number=2)]
    mover.process.send_signal(signal.SIGKILL)
    assert [lane.channel.receive() for lane in lanes] == [None, None] and mover.control.receive() is None
    mover.process.wait(ANSWER_TIMEOUT_S)


def test_a_lane_that_ends_by_itself_is_seen_to_end_though_the_main_thread_has_a_handle_of_its_socket(mover, volume):
    lane = mover.add_lane(volume)
    lane.channel.sock.send(b"no message")
    assert lane.channel.receive() is None
    assert mover.ask(Ping()) == Pong()

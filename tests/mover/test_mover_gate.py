"""How many I/Os are in flight."""

import threading

import pytest

from offloadd.model.enums import Reason
from offloadd.mover.io_gate import BUSY_BYTES, CalledOffError, IoGate
from offloadd.units import MIB

from .mover_harness import ANSWER_TIMEOUT_S


def _wanted():
    return Reason.NONE


class _Io:
    """An I/O on a thread of its own, which ends when told to."""

    def __init__(self, gate, size_bytes):
        self.inside, self.end = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(gate, size_bytes))
        self.thread.start()

    def _run(self, gate, size_bytes):
        with gate.passing(size_bytes, _wanted):
            self.inside.set()
            self.end.wait(ANSWER_TIMEOUT_S)

    def finish(self):
        self.end.set()
        self.thread.join(ANSWER_TIMEOUT_S)


def test_only_so_many_long_ios_run_at_once_and_the_next_follows():
    gate = IoGate(long_count=2)
    first, second = _Io(gate, 16 * MIB), _Io(gate, 16 * MIB)
    assert first.inside.wait(ANSWER_TIMEOUT_S) and second.inside.wait(ANSWER_TIMEOUT_S)
    third = _Io(gate, 16 * MIB)
    assert not third.inside.wait(0.3)
    first.finish()
    assert third.inside.wait(ANSWER_TIMEOUT_S)
    second.finish()
    third.finish()


@pytest.mark.parametrize("size_bytes", [4096, BUSY_BYTES // 8])
def test_short_ios_all_run_at_once(size_bytes):
    gate = IoGate(long_count=1)
    ios = [_Io(gate, size_bytes) for _ in range(8)]
    assert all(io.inside.wait(ANSWER_TIMEOUT_S) for io in ios)
    for io in ios:
        io.finish()


def test_an_io_that_fails_makes_room():
    gate = IoGate(long_count=1)
    with pytest.raises(OSError), gate.passing(16 * MIB, _wanted):
        raise OSError
    with gate.passing(16 * MIB, _wanted):
        pass


def test_an_io_that_is_called_off_while_it_waits_for_room_is_not_begun():
    gate, reasons, told = IoGate(long_count=1), [], []
    running = _Io(gate, 16 * MIB)
    assert running.inside.wait(ANSWER_TIMEOUT_S)

    def wait():
        try:
            with gate.passing(16 * MIB, lambda: reasons[-1]):
                told.append("begun")
        except CalledOffError as error:
            told.append(error.reason)

    waiter = threading.Thread(target=wait)
    waiter.start()
    # It is asked only after the wait: there is nothing to be asked before.
    waiter.join(0.1)
    assert waiter.is_alive() and not told
    reasons.append(Reason.DEADLINE)
    running.finish()
    waiter.join(ANSWER_TIMEOUT_S)
    assert told == [Reason.DEADLINE]
    with gate.passing(16 * MIB, _wanted):
        told.append("room")
    assert told[-1] == "room", "what is not begun takes no room"

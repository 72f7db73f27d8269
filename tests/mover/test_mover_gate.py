"""How many I/Os are in flight."""

import threading

import pytest

from offloadd.mover.io_gate import BUSY_BYTES, IoGate
from offloadd.units import MIB

from .mover_harness import ANSWER_TIMEOUT_S


class _Io:
    """An I/O on a thread of its own, which ends when told to."""

    def __init__(self, gate, size_bytes):
        self.inside, self.end = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(gate, size_bytes))
        self.thread.start()

    def _run(self, gate, size_bytes):
        with gate.passing(size_bytes):
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
    with pytest.raises(OSError), gate.passing(16 * MIB):
        raise OSError
    with gate.passing(16 * MIB):
        pass

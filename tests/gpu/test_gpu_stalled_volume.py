"""COPIED never waits for a volume: evicts of a GPU's blocks are answered from the arena while every write to the volume hangs, and its lanes are stuck."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from offloadd.units import KIB, MIB

from ..standin.controls import Fault, wait_until
from ..standin_tests.child import Child
from ..system.daemon_process import DaemonProcess
from .conftest import Node, settled_gds
from .test_gpu_faults import control_of

#: Of a volume's lane: each has a staging slot.
THREADS = 4
COUNT, BLOCK_BYTES = 32, 32 * KIB
SMALL: dict[str, object] = {"block_count": COUNT, "memory_bytes": [COUNT * BLOCK_BYTES], "planes": [(0, 0, BLOCK_BYTES, BLOCK_BYTES)]}
#: Eight of them fill the arena.
LARGE_BYTES = 4 * MIB
LARGE: dict[str, object] = {"block_count": 24, "memory_bytes": [24 * LARGE_BYTES], "planes": [(0, 0, LARGE_BYTES, LARGE_BYTES)]}


class Stall:
    """A daemon whose volume takes no write any more, by whichever mover and way, until `end`."""

    def __init__(self, node: Node, daemon: DaemonProcess) -> None:
        control = control_of(node)
        gpu, host = daemon.worker_pid("mover cuda:0"), daemon.worker_pid("mover host")
        self._faults = ExitStack()
        self.bounce = self._enter(control.hang("pwritev", pid=gpu))
        self.gds = self._enter(control.hang("cuFileWrite", pid=gpu))
        self.spill = self._enter(control.hang("pwritev", pid=host))

    def _enter(self, fault: Fault) -> Fault:
        return self._faults.enter_context(fault)

    @property
    def waiting(self) -> tuple[int, int, int]:
        """Writes that hang now."""
        return self.bounce.waiting_now, self.gds.waiting_now, self.spill.waiting_now

    def end(self) -> None:
        """The volume works again."""
        self._faults.close()


@pytest.fixture
def daemon(standin_node: Node) -> DaemonProcess:
    daemon = standin_node.daemon(io_threads=THREADS, arena_bytes=32 * MIB, volume_bytes=256 * MIB)
    assert settled_gds(daemon) == (True, "")
    return daemon


@pytest.fixture
def make_stall(standin_node: Node, daemon: DaemonProcess) -> Iterator[Callable[[], Stall]]:
    made: list[Stall] = []

    def make() -> Stall:
        made.append(Stall(standin_node, daemon))
        return made[-1]

    yield make
    for stall in made:
        stall.end()


def ask(engine: Child, name: str, call: str) -> None:
    """Begin a request in a thread of the engine."""
    engine.run(f"{name} = Request(lambda: {call})")


def answered(engine: Child, name: str) -> bool:
    return bool(engine.run(f"result = {name}.answer is not None"))


def statuses(answer: Any) -> set[tuple[str, str]]:
    return {(outcome[0], outcome[1]) for outcome in answer["outcomes"]}


def stick_all_lanes(engine: Child, stall: Stall) -> None:
    """Durable evicts keep every thread of the GPU's two lanes to the volume in a write that does not end."""
    for path, prefix in (("BOUNCE", "b"), ("GDS", "g")):
        ask(
            engine, f"durable_{prefix}", f"engine.evict(range({THREADS}), [f'{prefix} {{number}}' for number in range({THREADS})], durable=True, path='{path}')"
        )
    wait_until(lambda: (stall.bounce.waiting_now, stall.gds.waiting_now) == (THREADS, THREADS), "a write in each thread")


@pytest.mark.parametrize("options", ["", "path='DDR', require_path=True", "tier='ARENA'"], ids=["auto", "ddr", "arena"])
def test_copied_is_answered_from_the_arena_while_every_write_hangs(
    standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None], make_stall: Callable[[], Stall], options: str
) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **SMALL)
    # The slabs are open: what hangs later is the data.
    engine.run("engine.write(0, 'first'); engine.evict([0], ['first'], durable=True)")
    stall = make_stall()
    engine.run(f"for number in range({THREADS}): engine.write(number, f'b {{number}}')")
    stick_all_lanes(engine, stall)
    for turn in range(3):
        # The second one comes when the spill of the first hangs, too.
        evicted, restored, wrong = engine.run(f"""
            names = [f"copied {turn} {{number}}" for number in range(8)]
            for number, name in enumerate(names):
                engine.write(8 + number, name)
            evicted = engine.evict(range(8, 16), names, {options})
            for number in range(8):
                engine.write(8 + number, "other")
            restored = engine.restore(range(16, 24), names)
            result = [evicted, restored, engine.wrong(range(16, 24), names)]
        """)
        assert statuses(evicted) == {("STORED", "NONE")} and evicted["paths"] == [["ARENA", "DDR", 8]]
        assert statuses(restored) == {("RESTORED", "NONE")} and restored["paths"] == [["ARENA", "DDR", 8]] and wrong == []
        if options != "tier='ARENA'":
            wait_until(lambda: stall.spill.waiting_now > 0, "the spill's write")
    assert stall.waiting[:2] == (THREADS, THREADS)
    assert not answered(engine, "durable_b") and not answered(engine, "durable_g")
    stall.end()
    assert statuses(engine.run("result = durable_b.finish()")) == {("STORED", "NONE")}
    engine.run("durable_g.finish()")
    restored, wrong = engine.run(f"""
        restored = engine.restore(range(24, 24 + {THREADS}), [f"b {{number}}" for number in range({THREADS})])
        result = [restored, engine.wrong(range(24, 24 + {THREADS}), [f"b {{number}}" for number in range({THREADS})])]
    """)
    assert statuses(restored) == {("RESTORED", "NONE")} and wrong == []


def test_what_a_full_arena_does_not_take_is_copied_into_free_staging_slots_and_no_further(
    standin_node: Node, daemon: DaemonProcess, make_engine: Callable[..., None], make_stall: Callable[[], Stall]
) -> None:
    engine = standin_node.engine()
    make_engine(engine, daemon, **LARGE)
    engine.run("engine.write(0, 'first'); engine.evict([0], ['first'], durable=True)")
    stall = make_stall()

    def evict(first: int, count: int, prefix: str, options: str = "") -> Any:
        return engine.run(f"""
            for number in range({first}, {first + count}):
                engine.write(number, f"{prefix} {{number}}")
            answer = engine.evict(range({first}, {first + count}), [f"{prefix} {{number}}" for number in range({first}, {first + count})], {options})
            for number in range({first}, {first + count}):
                engine.write(number, "other")
            result = answer
        """)

    full = evict(0, 8, "arena")
    assert statuses(full) == {("STORED", "NONE")} and full["paths"] == [["ARENA", "DDR", 8]]
    wait_until(lambda: stall.spill.waiting_now > 0, "the spill's write")
    # The arena is full of blocks that wait for their spill. Whoever wants it and nothing else is told so, at once.
    for options in ("tier='ARENA'", "path='DDR', require_path=True"):
        assert statuses(evict(8, 1, "refused", options)) == {("REJECTED", "TIER_FULL")}
    # The others go into the staging slots of the volume's lane, and are answered though no write ends.
    for number in range(THREADS):
        overflow = evict(8 + number, 1, "staged")
        assert statuses(overflow) == {("STORED", "NONE")} and overflow["paths"][0][0] == "VOLUME"
        # Half of a lane's threads are in long writes at a time; the others wait for their turn, with their slots full.
        wait_until(lambda number=number: sum(stall.waiting[:2]) == min(number + 1, THREADS // 2), "the write of the staging slot")
    # Nowhere is left: the answer comes at the deadline, and the source may be reused.
    late = evict(12, 1, "late", "deadline_s=1.0")
    assert statuses(late) == {("FAILED", "DEADLINE")}
    stall.end()
    kept, lost, wrong = engine.run("""
        names = [f"arena {number}" for number in range(8)] + [f"staged {number}" for number in range(8, 12)]
        kept = engine.restore(range(12, 24), names)
        wrong = engine.wrong(range(12, 24), names)
        result = [kept, engine.restore([0], ["late 12"]), wrong]
    """)
    assert statuses(kept) == {("RESTORED", "NONE")} and wrong == []
    assert statuses(lost) == {("NOT_FOUND", "NONE")}, "what was answered as failed is restored"
    assert daemon.counters().get("faults", 0) == 0

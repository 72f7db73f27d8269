"""A mover that is lost while its I/O hangs: its requests are answered, its successor goes on, and its slots are nobody else's until its I/O is over.

Real movers' code over a real file; the test holds the I/O of the first one, and says when it is lost.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offloadd.catalog.slab import RESERVED
from offloadd.model.enums import EvictStatus, Reason, RestoreStatus

from ..mover.mover_harness import ANSWER_TIMEOUT_S
from .inside import Engine, Hold, close_inside, make_inside
from .test_incidents import Scene

COUNT = 8


def names_of(what: str, count: int = COUNT) -> list[str]:
    return [f"{what} {number}" for number in range(count)]


class Node(Scene):
    def lose_the_mover(self) -> None:
        """It has closed its mappings of engine memory, another one is started, and its I/O goes on."""
        link: Any = self.offload.core.host.mover
        link.process.mover._memories.engine.close()
        link._on_lost()
        self.lost, link.process._channel = link.process._channel, None
        link.process.start()

    def slots(self, names: list[str]) -> set[tuple[int, int]]:
        catalog = self.offload.core.catalog
        sources = catalog.volume_sources(catalog.lookup(self.engine.batch(np.arange(len(names)), names).keys))
        return set(zip(sources.slab.tolist(), sources.slot.tolist(), strict=True))

    def expect(self, names: list[str]) -> np.ndarray[Any, Any]:
        return np.stack([np.random.default_rng(list(name.encode())).integers(0, 256, self.engine.bytes.shape[1], dtype=np.uint8) for name in names])

    async def store(self, first: int, names: list[str]) -> Any:
        self.engine.bytes[first : first + len(names)] = self.expect(names)
        return await self.evict(first, names)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    offload, volumes = await make_inside(tmp_path)
    made = Node(offload, volumes, await Engine(offload, 64).register())
    yield made
    made.lost.close()
    await close_inside(offload, volumes)


class HoldOne(Hold):
    """Holds the I/O of the present mover, and not of its successor."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        process: Any = node.offload.core.host.mover.process
        self._threads = {thread for lane in process.mover._lanes for thread in lane._threads}
        self._seen: set[threading.Thread] = set()
        self.holds = self._of_mine
        self.hold_io()

    def _of_mine(self, *_: Any) -> bool:
        if threading.current_thread() not in self._threads:
            return False
        self._seen.add(threading.current_thread())
        return True

    async def all_held(self) -> None:
        """Each thread of the lane is in an I/O."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while self._seen != self._threads:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture
async def hold(node: Node, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HoldOne]:
    made = HoldOne(node, monkeypatch)
    yield made
    made.open()


def told(answer: Any) -> set[tuple[int, int]]:
    return set(zip(answer.status.tolist(), answer.reason.tolist(), strict=True))


async def test_slots_that_a_lost_mover_may_still_write_are_given_to_nobody_else(node: Node, hold: HoldOne) -> None:
    pool = node.offload.core.catalog.volumes[0]
    await node.store(0, names_of("before"))
    hold.close()
    evict = asyncio.create_task(node.store(8, names_of("lost")))
    await hold.all_held()
    reserved = {(slab.index, slot) for slab in pool.slabs for slot in np.flatnonzero(slab.rows == RESERVED).tolist()}
    assert len(reserved) == COUNT
    node.lose_the_mover()
    assert told(await evict) == {(EvictStatus.FAILED, Reason.WORKER_LOST)}
    volume = node.volumes[0]
    held = node.offload.core.left_behind(volume)  # type: ignore[arg-type]
    assert held.slots == COUNT and volume.health.suspected
    # Its successor fills the whole volume, and more than that: what is older is reclaimed, but not what may still be written.
    for turn in range(40):
        names = names_of(f"after {turn}", 16)
        assert told(await node.store(16, names)) == {(EvictStatus.STORED, 0)}
        assert not node.slots(names) & reserved, turn
    last = names_of("after 39", 16)
    hold.open()
    # The late writes end, and come where nothing else was put.
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while node.offload.core.left_behind(volume).jobs:  # type: ignore[arg-type]  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    answer = await node.restore(32, last)
    assert told(answer) == {(RestoreStatus.RESTORED, 0)} and (node.engine.bytes[32:48] == node.expect(last)).all()
    assert told(await node.restore(48, names_of("lost"))) == {(RestoreStatus.NOT_FOUND, 0)}, "what was answered FAILED became visible"


async def test_a_restore_of_a_lost_mover_writes_nothing_after_its_answer_and_its_blocks_stay_where_they_are(node: Node, hold: HoldOne) -> None:
    names = names_of("stored")
    await node.store(0, names)
    hold.close()
    restore = asyncio.create_task(node.restore(8, names))
    await hold.all_held()
    node.lose_the_mover()
    assert told(await restore) == {(RestoreStatus.FAILED, Reason.WORKER_LOST)}
    node.engine.bytes[8:16] = 0x77
    rows = node.offload.core.catalog.lookup(node.engine.batch(np.arange(COUNT), names).keys)
    assert (node.offload.core.catalog._pins[rows] == 1).all(), "what may still be read may be reclaimed"
    answer = await node.restore(16, names)
    assert told(answer) == {(RestoreStatus.RESTORED, 0)} and (node.engine.bytes[16:24] == node.expect(names)).all()
    hold.open()
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while node.offload.core.left_behind(node.volumes[0]).jobs:  # type: ignore[arg-type]  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert (node.engine.bytes[8:16] == 0x77).all(), "a destination was written after its restore was answered"
    assert (node.offload.core.catalog._pins[rows] == 0).all()

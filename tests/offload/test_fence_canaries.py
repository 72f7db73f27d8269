"""P6: after a request was answered no byte of its engine's memory is read or written for it, however late its I/O ends."""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offloadd import clock
from offloadd.errors import DeadlineExpired
from offloadd.model.enums import AckLevel, EvictStatus, RestoreStatus
from offloadd.model.enums import Path as Way
from offloadd.model.requests import EvictOptions, RestoreOptions

from ..mover.mover_harness import ANSWER_TIMEOUT_S
from ..torture import Rounds
from .inside import PAYLOAD_BYTES, Engine, Hold, InsideOffload, close_inside, make_inside

SEED = int(os.environ.get("OFFLOADD_TEST_SEED", "20"))
#: Requests of a round, and blocks of each.
REQUESTS_MAX = 3
BLOCKS_MAX = 12
STORED = [f"stored {number}" for number in range(40)]
ENDS = ("cancel", "deadline", "hang-up", "kill")

CANARY = 0xC5
#: As many canaries in a row in a written slot are no chance: 2^-512.
CANARY_RUN = bytes([CANARY]) * 64


class Canaries:
    """What was read of engines' memory after the answer: a write of canaries to a volume."""

    def __init__(self) -> None:
        self.read_count = 0

    def look(self, _fd: int, buffers: Any, _offset: int) -> None:
        self.read_count += sum(CANARY_RUN in buffer.tobytes() for buffer in buffers)


class Round:
    """Requests of one engine that are all under way when their end comes."""

    def __init__(self, number: int, offload: InsideOffload, engine: Engine) -> None:
        self.random = random.Random(f"{SEED} {number}")
        self.number = number
        self.end = self.random.choice(ENDS)
        self._offload = offload
        self._engine = engine
        self.tasks = [asyncio.ensure_future(self._request(index)) for index in range(self.random.randint(1, REQUESTS_MAX))]
        self.unproven = self.end in ("hang-up", "kill")

    def _deadline_s(self) -> float:
        return clock.monotonic_s() + (self.random.uniform(0.01, 0.05) if self.end == "deadline" else ANSWER_TIMEOUT_S)

    async def _request(self, index: int) -> None:
        engine, count = self._engine, self.random.randint(1, BLOCKS_MAX)
        indices = np.arange(index * BLOCKS_MAX, index * BLOCKS_MAX + count)
        session, name = engine.session, f"r {index}"
        if self.random.random() < 0.5:
            batch = engine.batch(indices, [f"{self.number} {index} {block}" for block in range(count)])
            options = EvictOptions(
                deadline_s=self._deadline_s(),
                ack=self.random.choice((AckLevel.COPIED, AckLevel.DURABLE)),
                path=Way.HOST,
                request_id=name,
            )
            answer = await self._offload.evictor.evict(session, [batch], options)
            self.unproven |= EvictStatus.QUARANTINED in answer.status
            return
        batch = engine.batch(indices, self.random.sample(STORED, count))
        restore = RestoreOptions(deadline_s=self._deadline_s(), path=Way.HOST, request_id=name)
        async for _, _, answer in self._offload.restorer.restore(session, [batch], restore):
            self.unproven |= RestoreStatus.QUARANTINED in answer.status

    async def end_all(self) -> None:
        """When it returns each request was answered, or nobody waits for it, and what can't be proven is unregistered."""
        if self.end == "cancel":
            for index in range(len(self.tasks)):
                self._offload.core.cancel(self._engine.session, f"r {index}")
        elif self.end == "hang-up":
            for task in self.tasks:
                task.cancel()
        elif self.end == "kill":
            self._offload.sessions.end(self._engine.session, "its process died")
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        # On a busy machine a short deadline passes before the request is looked at.
        expected = {"hang-up": asyncio.CancelledError, "deadline": DeadlineExpired}.get(self.end, type(None))
        assert all(result is None or isinstance(result, expected) for result in results), results
        if self.end == "kill":
            await asyncio.gather(*self._offload.core.host.mover._unmapping.values())
        elif self.unproven:
            # The protocol's rule for QUARANTINED, and for a call whose answer nobody heard.
            await self._engine.unregister()


async def _store(offload: InsideOffload, engine: Engine) -> None:
    engine.bytes[:] = np.random.default_rng(SEED).integers(0, CANARY, engine.bytes.shape, dtype=np.uint8)
    for first in range(0, len(STORED), engine.block_count):
        names = STORED[first : first + engine.block_count]
        options = EvictOptions(deadline_s=clock.monotonic_s() + ANSWER_TIMEOUT_S, ack=AckLevel.DURABLE, keep_until_s=clock.monotonic_s() + 1e6)
        answer = await offload.evictor.evict(engine.session, [engine.batch(np.arange(len(names)), names)], options)
        assert (answer.status == EvictStatus.STORED).all()


async def _play(number: int, offload: InsideOffload, engine: Engine, hold: Hold, canaries: Canaries) -> Engine:
    """One round; the engine of the next."""
    engine.bytes[:] = number % 100
    hold.close()
    this = Round(number, offload, engine)
    if this.end != "deadline":
        # At a short deadline the answer may be there before any I/O is.
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await hold.held.wait()
    await this.end_all()
    engine.bytes[:] = CANARY
    canaries.read_count = 0
    hold.open()
    await offload.core.idle()
    where = f"round {number} of seed {SEED}, ended by {this.end}"
    changed = np.flatnonzero((engine.bytes != CANARY).any(axis=1))
    assert changed.size == 0, f"{where}: blocks {changed.tolist()} were written after the answer"
    assert canaries.read_count == 0, f"{where}: blocks were read after the answer"
    if this.end == "kill":
        return await Engine(offload, engine.block_count).register()
    return await engine.register() if this.unproven else engine


@pytest.mark.torture("P6")
async def test_engine_memory_is_not_touched_after_the_answer_however_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: Rounds) -> None:
    offload, volumes = await make_inside(tmp_path)
    canaries = Canaries()
    hold = Hold(monkeypatch)
    hold.hold_io(canaries.look)
    await _store(offload, await Engine(offload, 10, "library").register())
    engine = await Engine(offload, REQUESTS_MAX * BLOCKS_MAX).register()
    assert engine.bytes.nbytes == REQUESTS_MAX * BLOCKS_MAX * PAYLOAD_BYTES
    for number in range(rounds(500, 10_000, "rounds")):
        engine = await _play(number, offload, engine, hold, canaries)
    # What was held and called off so often is as good as new.
    options = RestoreOptions(deadline_s=clock.monotonic_s() + ANSWER_TIMEOUT_S)
    async for _, _, answer in offload.restorer.restore(engine.session, [engine.batch(np.arange(12), STORED[:12])], options):
        last = answer
    assert (last.status == RestoreStatus.RESTORED).all()
    await close_inside(offload, volumes)

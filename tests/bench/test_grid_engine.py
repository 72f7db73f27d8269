"""The engine of the grid asks for what a case says, keeps as many requests in flight, and is not deceived by a daemon that moves nothing."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from bench.grid.engine import GridEngine, _answer
from bench.support.rows import Operation
from offloadd.client import (
    AckLevel,
    Blocks,
    EvictOutcome,
    EvictResult,
    EvictStatus,
    HostMemory,
    Namespace,
    Path,
    PathUse,
    Plane,
    Reason,
    Region,
    RestoreOutcome,
    RestoreResult,
    RestoreStatus,
    StageTimes,
    Tier,
)
from offloadd.errors import PathUnavailable

COUNT = 4
SHAPE = {"plane_count": 2, "piece_bytes": 512, "block_count": 4 * COUNT, "scattered": True, "namespace": {"model": "test"}}


@dataclass
class Daemon:
    """Keeps blocks by name, as a client sees it. `lazy`: says so without moving anything. `fails`: the outcome of the last block. `refuses`: raised."""

    lazy: bool = False
    fails: Reason = Reason.NONE
    refuses: Exception | None = None
    stored: dict[bytes, bytes] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    in_flight: list[set[int]] = field(default_factory=list)
    in_flight_most: int = 0

    async def register_region(self, *, block_count: int, planes: Sequence[Plane], memories: Sequence[HostMemory], namespace: Namespace) -> Region:
        return Region("host", 0, block_count, tuple(planes), tuple(memories), namespace, b"region", 1024, 8192, b"namespace")

    def _pieces(self, region: Region, index: int) -> list[np.ndarray[Any, Any]]:
        memory = region.memories[0]
        assert isinstance(memory, HostMemory)
        return [memory.numpy(np.uint8, (plane.block_bytes,), plane.offset_bytes + index * plane.block_stride_bytes) for plane in region.planes]

    async def _request(self, blocks: Blocks, options: dict[str, Any]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.asked.append(options)
        self.names += blocks.hashes
        mine = set(blocks.indices)
        assert not any(mine & other for other in self.in_flight), "a block is in two requests at once"
        self.in_flight.append(mine)
        self.in_flight_most = max(self.in_flight_most, len(self.in_flight))
        for _ in range(5):
            await asyncio.sleep(0)
        self.in_flight.remove(mine)

    def _told(self, blocks: Blocks, options: dict[str, Any], good: Any, bad: Any) -> dict[str, Any]:
        count = len(blocks.indices)
        outcomes = [good] * count if self.fails is Reason.NONE else [good] * (count - 1) + [bad]
        use = PathUse(Tier.VOLUME, options["path"], count, 1024 * count, 8192 * count)
        return {"outcomes": tuple(outcomes), "paths": (use,), "times": StageTimes(total_s=0.5)}

    async def evict(self, blocks: Blocks, **options: Any) -> EvictResult:
        await self._request(blocks, options)
        for index, name in zip(blocks.indices, blocks.hashes, strict=True):
            self.stored.setdefault(name, b"".join(piece.tobytes() for piece in self._pieces(blocks.region, index)))
        good, bad = (EvictOutcome(status, self.fails, Tier.VOLUME) for status in (EvictStatus.STORED, EvictStatus.REJECTED))
        return EvictResult(**self._told(blocks, options, good, bad))

    async def restore(self, blocks: Blocks, **options: Any) -> RestoreResult:
        await self._request(blocks, options)
        for index, name in zip(blocks.indices, blocks.hashes, strict=True):
            content = self.stored[name]
            for number, piece in enumerate(self._pieces(blocks.region, index)):
                if not self.lazy:
                    piece[:] = np.frombuffer(content[512 * number : 512 * (number + 1)], dtype=np.uint8)
        good, bad = (RestoreOutcome(status, self.fails, Tier.VOLUME) for status in (RestoreStatus.RESTORED, RestoreStatus.DATA_LOSS))
        return RestoreResult(**self._told(blocks, options, good, bad))


async def engine_of(daemon: Daemon) -> GridEngine:
    engine = GridEngine(daemon)  # type: ignore[arg-type]
    await engine.register(**SHAPE)  # type: ignore[arg-type]
    return engine


CASE: dict[str, Any] = {"path": "host", "count": COUNT, "depth": 2}


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("lazy", [False, True])
async def test_a_daemon_that_moves_nothing_is_found_out(operation: Operation, lazy: bool) -> None:
    engine = await engine_of(Daemon(lazy=lazy))
    await engine.store(**CASE)
    await engine.run(operation=operation, request_count=6, **CASE)
    assert await engine.verify(operation=operation, **CASE) == {"wrong": 2 * COUNT if lazy else 0, "blocks": 2 * COUNT}


async def test_a_daemon_that_keeps_other_bytes_is_found_out() -> None:
    daemon = Daemon()
    engine = await engine_of(daemon)
    await engine.store(**CASE)
    name = next(iter(daemon.stored))
    daemon.stored[name] = bytes([daemon.stored[name][0] ^ 1]) + daemon.stored[name][1:]
    assert (await engine.verify(operation="restore", **CASE))["wrong"] == 1


@pytest.mark.parametrize(("depth", "requests"), [(1, 3), (2, 6), (4, 8)])
async def test_as_many_requests_are_in_flight_as_the_case_says_each_with_blocks_of_its_own(depth: int, requests: int) -> None:
    daemon = Daemon()
    engine = await engine_of(daemon)
    answer = await engine.run(operation="evict", path="host", count=COUNT, depth=depth, request_count=requests)
    assert daemon.in_flight_most == depth and len(answer["seconds"]) == requests
    assert len(set(daemon.names)) == len(daemon.names) == requests * COUNT, "an evict of a block that is there moves nothing"
    assert answer["ways"] == {"host": 1024 * requests * COUNT} and answer["stages"]["total_s"] == [0.5] * requests
    assert answer["end"] >= answer["begin"]


@pytest.mark.parametrize(
    ("path", "ack", "tier"), [("host", "DURABLE", "VOLUME"), ("bounce", "DURABLE", "VOLUME"), ("gds", "DURABLE", "VOLUME"), ("ddr", "COPIED", "ARENA")]
)
async def test_the_path_is_required_in_both_directions(path: str, ack: str, tier: str) -> None:
    daemon = Daemon()
    engine = await engine_of(daemon)
    await engine.store(path=path, count=1, depth=1)
    await engine.run(operation="evict", path=path, count=1, depth=1, request_count=1)
    for asked in daemon.asked:
        assert (asked["path"], asked["require_path"], asked["ack"], asked["tier"]) == (Path[path.upper()], True, AckLevel[ack], Tier[tier])
    daemon.asked.clear()
    await engine.run(operation="restore", path=path, count=1, depth=1, request_count=1)
    assert [(asked["path"], asked["require_path"]) for asked in daemon.asked] == [(Path[path.upper()], True)]


async def test_restores_of_one_tier_do_not_find_the_blocks_of_the_other() -> None:
    engine = await engine_of(Daemon())
    await engine.store(path="ddr", count=COUNT, depth=1)
    with pytest.raises(BaseExceptionGroup) as caught:
        await engine.run(operation="restore", path="host", count=COUNT, depth=1, request_count=1)
    assert isinstance(caught.value.exceptions[0], KeyError)


@pytest.mark.parametrize(
    ("operation", "said"), [("evict", "1 of 4 blocks were not stored: REJECTED, TIER_FULL"), ("restore", "1 of 4 blocks were not restored")]
)
async def test_a_block_that_did_not_move_refuses_the_case(operation: str, said: str) -> None:
    daemon = Daemon()
    engine = await engine_of(daemon)
    await engine.store(**CASE)
    daemon.fails = Reason.TIER_FULL
    answer = await _answer(engine, {"command": "run", "operation": operation, "request_count": 2, **CASE})
    assert said in answer["refused"]


async def test_what_the_daemon_refuses_is_told_and_other_errors_are_errors() -> None:
    daemon = Daemon(refuses=PathUnavailable("path gds is not available: it bounced"))
    engine = await engine_of(daemon)
    run = {"operation": "evict", "request_count": 2, **CASE}
    assert await _answer(engine, {"command": "run", **run}) == {"refused": "path gds is not available: it bounced"}
    daemon.refuses = ZeroDivisionError("ours")
    assert "ours" in (await _answer(engine, {"command": "run", **run}))["error"]

"""An engine that does everything that may go wrong, many times, and then dies with requests under way.

    python -m tests.system.soak_client RUNTIME_DIR SEED REQUESTS

Evicts and restores, with what they restored compared; lookups with leases, prefetches, keeps and releases; requests that are wrong, cancelled by id, hung up
on, or past their deadline; regions that come and go; sessions that end and begin. It prints what came of its requests as one line of JSON, and kills itself.
"""

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from google.protobuf.duration_pb2 import Duration

from offloadd.client import HostMemory
from offloadd.units import KIB
from offloadd.v1 import offload_pb2 as pb

from .light_client import LightClient

BLOCK_BYTES = 8 * KIB
#: Blocks that are restored into, and evicted from; behind them those whose requests end badly, so that nothing is known of their memory.
BLOCKS, BAD_BLOCKS = 16, 16
#: Names that blocks are evicted under, over and over: more than all tiers hold.
NAMES = 6000
#: Blocks of one request.
BLOCKS_MAX = 4
#: Engines in this process, each with one request at a time.
ENGINES = 8
#: Requests of one engine between two sessions.
SESSION_REQUESTS = 60


def hash_of(name: int) -> bytes:
    return hashlib.sha256(b"soak %d" % name).digest()


class Engine:
    """One engine: requests one after the other, by lot."""

    def __init__(self, runtime_dir: Path, number: int, seed: str, told: Counter[str]) -> None:
        self._runtime_dir = runtime_dir
        self._number = number
        self._random = random.Random(seed)
        self._told = told
        self._serial = 0
        self._memory = HostMemory.allocate((BLOCKS + BAD_BLOCKS) * BLOCK_BYTES)
        self._bytes = self._memory.numpy(np.uint64, (BLOCKS + BAD_BLOCKS, BLOCK_BYTES // 8))
        self._deeds: list[tuple[int, Callable[[], Awaitable[int]]]] = [
            (22, self._evict),
            (6, lambda: self._evict(ack=pb.ACK_LEVEL_DURABLE)),
            (4, lambda: self._evict(keep=True, keep_ttl=Duration(nanos=500_000_000))),
            (2, lambda: self._evict(tier=pb.TIER_VOLUME, path=pb.PATH_HOST)),
            (26, self._restore),
            (3, lambda: self._restore(consume=True)),
            (14, self._look_up),
            (3, self._prefetch),
            (3, self._release),
            (6, self._err),
            (4, self._cancel),
            (3, self._hang_up),
            (3, self._come_late),
            (1, self._register_again),
        ]

    async def run(self, budget: "list[int]") -> None:
        """Until the budget of requests, which all engines share, is used up."""
        while budget[0] > 0:
            self.client = LightClient(self._runtime_dir, self._memory, BLOCK_BYTES, model="soak")
            await self.client.join(f"soak {os.getpid()} {self._number}")
            for _ in range(SESSION_REQUESTS):
                if budget[0] <= 0:
                    return
                (deed,) = self._random.choices([deed for _, deed in self._deeds], [weight for weight, _ in self._deeds])
                # Not in one statement: that would read the budget before the wait, and write it behind what others did meanwhile.
                used = await deed()
                budget[0] -= used
            if budget[0] > 0:
                await self.client.leave()
                self._told["sessions ended"] += 1

    def _names(self) -> list[int]:
        # A run of neighbours, as a sequence's blocks are.
        first = self._random.randrange(NAMES)
        return [(first + offset) % NAMES for offset in range(self._random.randint(1, BLOCKS_MAX))]

    def _selector(self) -> pb.ShardSelector:
        return pb.ShardSelector(region_id=self.client.region_id)

    def _bad_blocks(self) -> pb.BlockSpan:
        """Sources whose request may end badly: names of their own, which nobody restores."""
        self._serial += 1
        hashes = [hashlib.sha256(b"bad %d %d %d %d" % (os.getpid(), self._number, self._serial, index)).digest() for index in range(BLOCKS_MAX)]
        return self.client.span(BLOCKS + self._random.randrange(BAD_BLOCKS - BLOCKS_MAX), hashes)

    async def _evict(self, **options: Any) -> int:
        names = self._names()
        for index, name in enumerate(names):
            self._bytes[index] = name
        request = pb.EvictRequest(spans=[self.client.span(0, [hash_of(name) for name in names])], **options)
        answer = await self.client.call(self.client.stub.Evict, request)
        for outcome in answer.outcomes:
            self._told[f"evict {pb.EvictStatus.Name(outcome.status)} {pb.Reason.Name(outcome.reason)}"] += 1
        return 1

    async def _restore(self, **options: Any) -> int:
        names = self._names()
        self._bytes[:BLOCKS] = NAMES
        request = pb.RestoreRequest(spans=[self.client.span(0, [hash_of(name) for name in names])], **options)
        outcomes: list[Any] = []
        async for part in self.client.call(self.client.stub.Restore, request):
            outcomes += part.outcomes
        assert len(outcomes) == len(names)
        for index, (name, outcome) in enumerate(zip(names, outcomes, strict=True)):
            self._told[f"restore {pb.RestoreStatus.Name(outcome.status)} {pb.Reason.Name(outcome.reason)}"] += 1
            if outcome.status == pb.RESTORE_STATUS_RESTORED and not (self._bytes[index] == name).all():
                self._told["WRONG BYTES"] += 1
        return 1

    async def _look_up(self) -> int:
        lease = Duration(nanos=200_000_000) if self._random.random() < 0.3 else None
        request = pb.LookupRequest(shards=[self._selector()], block_hashes=[hash_of(name) for name in self._names()], lease=lease)
        self._told["lookup held"] += (await self.client.call(self.client.stub.Lookup, request)).held_count
        return 1

    async def _prefetch(self) -> int:
        request = pb.PrefetchRequest(shards=[self._selector()], block_hashes=[hash_of(name) for name in self._names()])
        self._told["prefetch queued"] += (await self.client.call(self.client.stub.Prefetch, request)).queued_count
        return 1

    async def _release(self) -> int:
        if self._random.random() < 0.5:
            request = pb.ReleaseRequest(all=True)
        else:
            request = pb.ReleaseRequest(shards=[self._selector()], block_hashes=[hash_of(name) for name in self._names()])
        self._told["released"] += (await self.client.call(self.client.stub.Release, request)).released_count
        return 1

    async def _err(self) -> int:
        span, stub = self.client.span, self.client.stub
        wrong: tuple[Callable[[], tuple[Any, Any]], ...] = (
            lambda: (stub.Evict, pb.EvictRequest(spans=[pb.BlockSpan(region_id=b"x" * 16, start=0, count=1, block_hashes=[b"a"])])),
            lambda: (stub.Evict, pb.EvictRequest(spans=[span(BLOCKS + BAD_BLOCKS, [b"a"])])),
            lambda: (stub.Evict, pb.EvictRequest()),
            lambda: (stub.Lookup, pb.LookupRequest(block_hashes=[b"a"])),
            lambda: (stub.Lookup, pb.LookupRequest(shards=[self._selector()], block_hashes=[b"a" * 65])),
            lambda: (stub.Evict, pb.EvictRequest(spans=[span(0, [b"a"])], path=pb.PATH_GDS, require_path=True)),
            lambda: (stub.RegisterRegion, pb.RegisterRegionRequest(device="host", block_count=1)),
            lambda: (stub.UnregisterRegion, pb.UnregisterRegionRequest(region_id=b"no such region")),
            # Longer than a message may be.
            lambda: (stub.Lookup, pb.LookupRequest(block_hashes=[b"x" * 200_000] * 6)),
        )
        try:
            await self.client.call(*self._random.choice(wrong)())
        except grpc.aio.AioRpcError as error:
            self._told[f"error {error.code().name}"] += 1
        return 1

    async def _cancel(self) -> int:
        """A request that is cancelled by its id while it runs, or just before or after."""
        self._serial += 1
        name = f"r-{self._serial}"
        request = pb.EvictRequest(spans=[self._bad_blocks()], ack=pb.ACK_LEVEL_DURABLE, request_id=name)
        evict = self.client.call(self.client.stub.Evict, request)
        calls, found = 1, False
        while not (found or evict.done()):
            found = (await self.client.call(self.client.stub.Cancel, pb.CancelRequest(request_id=name))).found
            calls += 1
        for outcome in (await evict).outcomes:
            self._told[f"cancelled {pb.EvictStatus.Name(outcome.status)} {pb.Reason.Name(outcome.reason)}"] += 1
        self._told[f"cancel found {found}"] += 1
        return calls

    async def _hang_up(self) -> int:
        """A call that its client cancels, at once or a moment later."""
        evict = self.client.call(self.client.stub.Evict, pb.EvictRequest(spans=[self._bad_blocks()], ack=pb.ACK_LEVEL_DURABLE))
        if self._random.random() < 0.7:
            await asyncio.sleep(self._random.uniform(0, 0.003))
        evict.cancel()
        try:
            await evict
        except asyncio.CancelledError:
            self._told["hung up on"] += 1
        return 1

    async def _come_late(self) -> int:
        """A deadline that passes before the answer, or before the request has even arrived."""
        deadline = Duration(nanos=self._random.choice((1_000, 300_000, 1_000_000, 3_000_000)))
        request = pb.EvictRequest(spans=[self._bad_blocks()], ack=pb.ACK_LEVEL_DURABLE, deadline=deadline)
        try:
            for outcome in (await self.client.call(self.client.stub.Evict, request)).outcomes:
                self._told[f"late {pb.EvictStatus.Name(outcome.status)} {pb.Reason.Name(outcome.reason)}"] += 1
        except grpc.aio.AioRpcError as error:
            self._told[f"late {error.code().name}"] += 1
        return 1

    async def _register_again(self) -> int:
        await self.client.call(self.client.stub.UnregisterRegion, pb.UnregisterRegionRequest(region_id=self.client.region_id))
        await self.client.register()
        self._told["registered again"] += 1
        return 2

    async def die_at_work(self) -> None:
        """Leave requests of every kind under way."""
        for _ in range(6):
            ack = self._random.choice((pb.ACK_LEVEL_COPIED, pb.ACK_LEVEL_DURABLE))
            self.client.call(self.client.stub.Evict, pb.EvictRequest(spans=[self._bad_blocks()], ack=ack, keep=True))
            restore = self.client.call(self.client.stub.Restore, pb.RestoreRequest(spans=[self.client.span(0, [hash_of(name) for name in self._names()])]))
            del restore
        await asyncio.sleep(self._random.uniform(0, 0.003))


async def _run(runtime_dir: Path, seed: str, requests: int) -> None:
    told: Counter[str] = Counter()
    budget = [requests]
    engines = [Engine(runtime_dir, number, f"{seed} {number}", told) for number in range(ENGINES)]
    await asyncio.gather(*(engine.run(budget) for engine in engines))
    told["requests"] = requests - budget[0]
    print(json.dumps(told), flush=True)
    await asyncio.gather(*(engine.die_at_work() for engine in engines))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(_run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))

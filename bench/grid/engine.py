"""An engine in a process of its own: KV memory of a model on the host or a GPU, and requests of its scheduler, as many in flight as it is told."""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import msgspec
import numpy as np

from bench.grid.kv_memory import CudaKv, HostKv, Memory, Pattern, Span
from bench.grid.page_locked_copy import PageLockedCopy
from bench.support.bare_kvikio import BareKvikio, not_past_the_host
from bench.support.client import block_hash
from bench.support.ios import Io
from bench.support.outcomes import not_moved
from bench.support.rows import Operation
from bench.support.ways import way_of
from offloadd.client import AckLevel, AsyncClient, Blocks, EvictResult, Namespace, Path, Region, RestoreResult, Tier
from offloadd.cuda.device import Device
from offloadd.cuda.driver import CudaError
from offloadd.cuda.gds_setup import GdsUnavailable
from offloadd.errors import OffloaddError

Answer = dict[str, Any]

DEADLINE_S = 300.0
#: Names of blocks that are written once and restored many times lie below, those of blocks that are only evicted above.
FRESH_NAMES = 1 << 60
STAGES = ("queue_s", "copy_s", "checksum_s", "io_s", "total_s")


class Refused(Exception):
    """The daemon did not do what was asked, and said why: an outcome of the case, not a fault of the benchmark."""


class GridEngine:
    """One region, its content, and the commands. Times are seconds, measured around the client library's calls."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._device: Device | None = None
        self._memory: Memory
        self._region: Region
        self._span: Span
        self._pattern: Pattern
        #: Block indices in the order in which requests take them.
        self._order: list[int] = []
        self._fresh = itertools.count(FRESH_NAMES)
        #: Of the latest evicts, by the place of the request among those in flight.
        self._evicted: dict[int, list[bytes]] = {}
        self._copies: dict[int, PageLockedCopy] = {}
        self._kvikio: BareKvikio | None = None

    async def open_gpu(self, *, gpu: str) -> Answer:
        """Take a GPU for the region to come; how many bytes of it are free."""
        self._device = Device.open(gpu)
        return {"free_bytes": self._device.free_bytes(), "name": self._device.name}

    async def register(self, *, plane_count: int, piece_bytes: int, block_count: int, scattered: bool, namespace: dict[str, Any]) -> Answer:
        """Register a region of blocks that can be told apart."""
        self._span = Span(plane_count, block_count, piece_bytes)
        self._memory = HostKv(self._span) if self._device is None else CudaKv(self._device, self._span)
        self._pattern = Pattern(self._span)
        self._pattern.fill(self._memory)
        self._order = list(range(block_count))
        if scattered:
            random.Random(block_count).shuffle(self._order)
        self._region = await self._client.register_region(
            block_count=block_count, planes=self._span.planes, memories=[self._memory.exported], namespace=Namespace(**namespace)
        )
        return {"slot_bytes": self._region.slot_bytes, "namespace_id": self._region.namespace_id.hex()}

    def _indices(self, place: int, count: int) -> list[int]:
        """The blocks of the request at this place among those in flight."""
        return self._order[place * count : (place + 1) * count]

    def _names(self, tier: Tier, place: int, count: int) -> list[bytes]:
        """Of blocks that are there to be restored; the bytes of a block depend on its index, and so on `count`."""
        first = ((int(tier) * len(self._order) + count) * len(self._order) + place) * len(self._order)
        return [block_hash(number) for number in range(first, first + count)]

    async def store(self, *, path: str, count: int, depth: int) -> Answer:
        """Have stored what the restores of a case want, where its path reads."""
        tier = _tier_of(path)
        for place in range(depth):
            # Those of a case before, with fewer requests in flight, are there already.
            await self._evict(Blocks(self._region, self._indices(place, count), self._names(tier, place, count)), path, or_there=True)
        return {}

    async def run(self, *, operation: str, path: str, count: int, depth: int, request_count: int) -> Answer:
        """Requests one after the other at each of `depth` places. `begin` and `end`: of all of them, on the clock that all processes share."""
        requests = self._requests(Operation(operation), path, count, depth, request_count)
        seconds: list[float] = []
        stages: dict[str, list[float]] = {name: [] for name in STAGES}
        ways: dict[str, int] = {}

        async def at_place(place: int) -> None:
            for blocks in requests[place::depth]:
                start = time.perf_counter()
                answer = await (self._evict if operation == Operation.EVICT else self._restore)(blocks, path)
                seconds.append(time.perf_counter() - start)
                for name, values in stages.items():
                    values.append(getattr(answer.times, name))
                for use in answer.paths:
                    ways[way_of(use)] = ways.get(way_of(use), 0) + use.payload_bytes

        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for place in range(depth):
                group.create_task(at_place(place))
        return {"seconds": seconds, "begin": begin, "end": time.monotonic(), "stages": stages, "ways": ways}

    def _requests(self, operation: Operation, path: str, count: int, depth: int, request_count: int) -> list[Blocks]:
        """Made before the clock runs: an engine has its hashes at hand. The i-th is for place i modulo `depth`, whose blocks are its own."""
        found = []
        for number in range(request_count):
            place = number % depth
            if operation is Operation.EVICT:
                names = self._evicted[place] = [block_hash(next(self._fresh)) for _ in range(count)]
            else:
                names = self._names(_tier_of(path), place, count)
            found.append(Blocks(self._region, self._indices(place, count), names))
        return found

    async def _evict(self, blocks: Blocks, path: str, *, or_there: bool = False) -> EvictResult:
        ddr = path == "ddr"
        answer = await self._client.evict(
            blocks,
            ack=AckLevel.COPIED if ddr else AckLevel.DURABLE,
            tier=Tier.ARENA if ddr else Tier.VOLUME,
            path=Path[path.upper()],
            require_path=True,
            deadline_s=DEADLINE_S,
        )
        if why := not_moved(answer, or_there=or_there):
            raise Refused(why)
        return answer

    async def _restore(self, blocks: Blocks, path: str) -> RestoreResult:
        answer = await self._client.restore(blocks, path=Path[path.upper()], require_path=True, deadline_s=DEADLINE_S)
        if why := not_moved(answer):
            raise Refused(why)
        return answer

    async def verify(self, *, operation: str, path: str, count: int, depth: int) -> Answer:
        """Wipe the blocks of a case, restore them, and compare every byte; of an evict, those that it evicted last. How many were wrong."""
        chosen = np.array([index for place in range(depth) for index in self._indices(place, count)])
        self._pattern.wipe(self._memory, chosen)
        for place in range(depth):
            names = self._evicted[place] if operation == Operation.EVICT else self._names(_tier_of(path), place, count)
            await self._restore(Blocks(self._region, self._indices(place, count), names), path)
        return {"wrong": self._pattern.wrong(self._memory, chosen), "blocks": len(chosen)}

    async def copy_page_locked(self, *, size_bytes: int, total_bytes: int, to_host: bool) -> Answer:
        """Copies between page-locked memory and the engine's GPU."""
        assert self._device is not None, "open_gpu first"
        if size_bytes not in self._copies:
            self._copies[size_bytes] = PageLockedCopy(self._device, size_bytes)
        return {"seconds": self._copies[size_bytes].run(total_bytes, to_host=to_host)}

    async def forget_copies(self) -> Answer:
        """Give the memory of `copy_page_locked` back."""
        for copies in self._copies.values():
            copies.close()
        self._copies.clear()
        return {}

    async def bare_kvikio(self, *, paths: list[str], ios: list[tuple[int, int, int]], threads: int, writes: bool) -> Answer:
        """The I/Os by KvikIO alone; (volume, offset, bytes) each. Refused where they did not all go past the host: then they bound nothing that does."""
        assert self._device is not None, "open_gpu first"
        if self._kvikio is None:
            self._kvikio = BareKvikio(self._device)
        try:
            seconds, ways = self._kvikio.run(paths, [Io(*io) for io in ios], threads=threads, writes=writes)
        except (RuntimeError, OSError) as error:
            # What KvikIO raises. There is no ceiling then, but there still is a case.
            raise Refused(f"KvikIO: {error}") from error
        if why := not_past_the_host(ways):
            raise Refused(why)
        return {"seconds": seconds}


def _tier_of(path: str) -> Tier:
    return Tier.ARENA if path == "ddr" else Tier.VOLUME


async def serve(runtime_dir: FilePath, instance: str) -> None:
    """Obey commands until the standard input ends."""
    async with await AsyncClient.connect(runtime_dir, instance=instance, process="bench", timeout_s=60) as client:
        engine = GridEngine(client)
        _say({"tenant": client.tenant})
        # Read in a thread: the session's stream lives in the event loop.
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            arguments: dict[str, Any] = msgspec.json.decode(line)
            _say(await _answer(engine, arguments))


async def _answer(engine: GridEngine, arguments: dict[str, Any]) -> Answer:
    """What came of one command: an answer, `refused` with the reason, or `error` for what the commanding process must not go on after."""
    try:
        answer: Answer = await getattr(engine, arguments.pop("command"))(**arguments)
        return answer
    except Exception as error:
        leaves = list(_leaves(error))
        faults = [one for one in leaves if not isinstance(one, Refused | OffloaddError | CudaError | GdsUnavailable)]
        return {"error": f"{type(faults[0]).__name__}: {faults[0]}"} if faults else {"refused": str(leaves[0])}


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group's tasks, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


def _say(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Serve."""
    asyncio.run(serve(FilePath(sys.argv[1]), sys.argv[2]))


if __name__ == "__main__":
    main()

"""An engine in a process of its own: it does what it is told over its standard input, one JSON line a command, and answers with one line."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.support.machine import ROOT
from bench.support.mover import layout_of
from offloadd.client import AckLevel, Blocks, Client, EvictStatus, HostMemory, Namespace, Region, Tier, convert
from offloadd.client import Path as Way
from offloadd.memory.mapping import map_private
from offloadd.model.runtime import GRPC_SOCKET
from offloadd.tiers.volume_io import open_read_only, read_full

Answer = dict[str, Any]

NAMESPACE = Namespace(model="bench", weights="bench", engine="bench", block_tokens=16)


def block_hash(number: int) -> bytes:
    """The content name of block `number`."""
    return hashlib.sha256(b"bench %d" % number).digest()


class ClientProcess:
    """The other end: a context manager that starts the engine and commands it. `ask` waits for the answer; `tell` and `answer` do it in two steps.

    `module`: whose `main` obeys the commands.
    """

    def __init__(self, runtime_dir: Path, instance: str, *, module: str = "bench.support.client") -> None:
        self._process = subprocess.Popen([sys.executable, "-m", module, str(runtime_dir), instance], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self.tenant: str = self.answer()["tenant"]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, command: str, **arguments: Any) -> None:
        """Have it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode({"command": command, **arguments}) + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Answer:
        """Wait for what came of it. RuntimeError if it failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine process ended with status {self._process.wait(10)}")
        answer: Answer = msgspec.json.decode(line)
        if "error" in answer:
            raise RuntimeError(f"engine: {answer['error']}")
        return answer

    def ask(self, command: str, **arguments: Any) -> Answer:
        """`tell` and `answer`."""
        self.tell(command, **arguments)
        return self.answer()

    def __enter__(self) -> "ClientProcess":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Engine:
    """One region, and the commands. Times are seconds, measured around the client library's calls."""

    def __init__(self, runtime_dir: Path, client: Client) -> None:
        self._client = client
        self._channel = grpc.insecure_channel(f"unix:{runtime_dir / GRPC_SOCKET}", options=[("grpc.use_local_subchannel_pool", 1)])
        # Its methods are attributes that the generated class makes at run time.
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._memory: HostMemory | None = None
        self._region: Region | None = None

    def _the_region(self) -> Region:
        assert self._region is not None, "register first"
        return self._region

    def _blocks(self, first: int, count: int) -> Blocks:
        return Blocks(self._the_region(), range(first, first + count), [block_hash(number) for number in range(first, first + count)])

    def register(self, *, block_bytes: int, block_count: int, plane_count: int = 1, fill: bool = True) -> Answer:
        """Register a region; `fill`: with bytes that tell blocks apart."""
        layout = layout_of(block_bytes, block_count, plane_count)
        self._memory = HostMemory.allocate(block_bytes * block_count)
        if fill:
            self._memory.numpy(np.uint64, (block_bytes * block_count // 8,))[:] = self._pattern(block_bytes * block_count // 8)
        self._region = self._client.register_region(block_count=block_count, planes=layout.planes, memories=[self._memory], namespace=NAMESPACE)
        return {"payload_bytes": self._region.payload_bytes, "slot_bytes": self._region.slot_bytes, "namespace_id": self._region.namespace_id.hex()}

    @staticmethod
    def _pattern(word_count: int) -> Any:
        return np.random.default_rng(7).integers(0, 1 << 63, word_count, dtype=np.uint64)

    def evict(self, *, first: int, count: int, tier: int = 0, durable: bool = False) -> Answer:
        """Evict blocks."""
        blocks = self._blocks(first, count)
        start = time.perf_counter()
        result = self._client.evict(blocks, ack=AckLevel.DURABLE if durable else AckLevel.COPIED, tier=Tier(tier), deadline_s=300)
        seconds = time.perf_counter() - start
        fresh = sum(outcome.status == EvictStatus.STORED for outcome in result.outcomes)
        return {"seconds": seconds, "stored_count": result.stored_count, "fresh_count": fresh}

    def restore(self, *, firsts: list[int], count: int, path: int = 0) -> Answer:
        """Restore `count` blocks from each of `firsts` on, one request after the other. `stages`: what the daemon says of its own time."""
        seconds, restored = [], 0
        stages: dict[str, list[float]] = {"total_s": [], "queue_s": [], "io_s": [], "checksum_s": [], "copy_s": []}
        for first in firsts:
            blocks = self._blocks(first, count)
            start = time.perf_counter()
            result = self._client.restore(blocks, path=Way(path), deadline_s=300)
            seconds.append(time.perf_counter() - start)
            restored += result.restored_count
            for name, values in stages.items():
                values.append(getattr(result.times, name))
        return {"seconds": seconds, "restored_count": restored, "stages": stages}

    def singles(self, *, volume: str, offsets: list[int], size_bytes: int, firsts: list[int], path: int) -> Answer:
        """An empty call, a read of a slot past the daemon, and a restore of one block, in turn, so that each finds the machine as the others do."""
        empty: list[float] = []
        reads: list[float] = []
        restores: Answer = {"seconds": [], "restored_count": 0, "stages": {}}
        fd, _ = open_read_only(volume)
        staging = map_private(size_bytes)
        try:
            for offset, first in zip(offsets, firsts, strict=True):
                empty.append(self._check_health())
                start = time.perf_counter()
                read_full(fd, memoryview(staging.bytes.data), offset, "slot")
                reads.append(time.perf_counter() - start)
                one = self.restore(firsts=[first], count=1, path=path)
                restores["seconds"] += one["seconds"]
                restores["restored_count"] += one["restored_count"]
                for name, values in one["stages"].items():
                    restores["stages"].setdefault(name, []).extend(values)
        finally:
            os.close(fd)
            staging.close()
        return {"empty": empty, "slot_read": reads, **restores}

    def check(self, *, count: int, path: int = 0) -> Answer:
        """Wipe the memory, restore, and compare every byte with what was evicted."""
        assert self._memory is not None
        words = self._memory.numpy(np.uint64, (self._memory.memory_bytes // 8,))
        words[:] = 0
        result = self._client.restore(self._blocks(0, count), path=Way(path), deadline_s=300)
        return {"restored_count": result.restored_count, "equal": bool((words == self._pattern(words.shape[0])).all())}

    def empty(self, *, rounds: int) -> Answer:
        """Calls that do nothing: `grpc.health.v1.Health/Check`."""
        return {"seconds": [self._check_health() for _ in range(rounds)]}

    def health_for(self, *, seconds: float, pause_s: float = 0.005) -> Answer:
        """Health checks with a pause between them, for some time."""
        found = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            found.append(self._check_health())
            time.sleep(pause_s)
        return {"seconds": found}

    def _check_health(self) -> float:
        start = time.perf_counter()
        self._health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        return time.perf_counter() - start

    def lookup(self, *, firsts: list[int], count: int, membership: bool = False) -> Answer:
        """Look up `count` blocks from each of `firsts` on."""
        seconds, held = [], 0
        # Made before: the empty calls that these are compared with follow one another without a pause as well.
        prepared = [[block_hash(number) for number in range(first, first + count)] for first in firsts]
        for hashes in prepared:
            start = time.perf_counter()
            result = self._client.lookup([self._the_region()], hashes, membership=membership)
            seconds.append(time.perf_counter() - start)
            held += result.held_count
        return {"seconds": seconds, "held_count": held}

    def lookup_call(self, *, firsts: list[int], count: int) -> Answer:
        """As `lookup`, but the call alone: requests made before, answers left as they come."""
        link = self._client._live()
        seconds, held = [], 0
        requests = [
            convert.lookup_request(
                [self._the_region()],
                [block_hash(number) for number in range(first, first + count)],
                membership=False,
                lease_s=None,
                prefill_tokens_per_s=0.0,
            )
            for first in firsts
        ]
        for request in requests:
            start = time.perf_counter()
            answer = link.stub.Lookup(request, metadata=link.metadata, timeout=60)
            seconds.append(time.perf_counter() - start)
            held += answer.held_count
        return {"seconds": seconds, "held_count": held}

    def restore_for(self, *, seconds: float, stored_count: int, count: int, offset: int) -> Answer:
        """Restore requests one after the other for some time, over the first `stored_count` blocks."""
        requests = restored = 0
        starts = list(range(0, stored_count - count + 1, count))
        prepared = {first: self._blocks(first, count) for first in starts}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            result = self._client.restore(prepared[starts[(offset + requests) % len(starts)]], deadline_s=300)
            restored += result.restored_count
            requests += 1
        return {"requests": requests, "restored_count": restored}


def main(kind: type[Engine] = Engine) -> None:
    """Serve commands until the standard input ends."""
    runtime_dir = Path(sys.argv[1])
    with Client.connect(runtime_dir, instance=sys.argv[2], process="bench") as client:
        engine = kind(runtime_dir, client)
        _say({"tenant": client.tenant})
        for line in sys.stdin.buffer:
            arguments = msgspec.json.decode(line)
            handler: Callable[..., Answer] = getattr(engine, arguments.pop("command"))
            try:
                _say(handler(**arguments))
            except Exception as error:
                # The commanding process is told and decides; here nothing can be mended.
                _say({"error": f"{type(error).__name__}: {error}"})


def _say(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

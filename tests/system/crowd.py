"""Many light clients in one process: an attached socket, a gRPC connection and a region each. A test starts some and tells them what to do, line by line.

python -m tests.system.crowd RUNTIME_DIR COUNT INSTANCE
    → {"attached": …, "refused": {…}}
{"calls": 10, "blocks": 1, "per_s": 0}          each client calls Evict so often, all at once or, with per_s, spread so that all together make so many a second
    → {"ok": …, "codes": {"RESOURCE_EXHAUSTED": …}, "refused_s": [sorted times], "ok_s": [...], "hints_ms": [...], "messages": [...]}
"""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio

from offloadd.client import HostMemory
from offloadd.daemon.app import raise_file_limit
from offloadd.errors import OffloaddError
from offloadd.model.status import RETRY_AFTER_KEY
from offloadd.v1 import offload_pb2 as pb

from .light_client import LightClient

ROOT = Path(__file__).parents[2]
#: Small, so that a region may have as many blocks as a request may name.
BLOCK_BYTES = 16
BLOCKS = 8192


_SAME = [b"same %27d" % block for block in range(BLOCKS)]


class Member(LightClient):
    """One of them."""

    def __init__(self, runtime_dir: Path, number: int, memory: HostMemory) -> None:
        super().__init__(runtime_dir, memory, BLOCK_BYTES, model="crowd")
        self._number = number
        self._sequence = 0

    async def evict(self, blocks: int, outcomes: "Outcomes") -> None:
        """One evict of new blocks."""
        self._sequence += 1
        # The first hash is new; the others are the same each time, since to make thousands would cost more than the call.
        hashes = [b"%32d" % (self._number << 32 | self._sequence), *_SAME[: blocks - 1]]
        request = pb.EvictRequest(spans=[self.span(0, hashes)], ack=pb.ACK_LEVEL_COPIED)
        start_s = time.monotonic()
        try:
            await self.call(self.stub.Evict, request)
        except grpc.aio.AioRpcError as error:
            outcomes.refused(error, time.monotonic() - start_s)
        else:
            outcomes.ok_s.append(time.monotonic() - start_s)


class Outcomes:
    """What became of the calls."""

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self.refused_s: list[float] = []
        self.ok_s: list[float] = []
        self.hints_ms: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def refused(self, error: grpc.aio.AioRpcError, seconds: float) -> None:
        self.codes[error.code().name] += 1
        self.refused_s.append(seconds)
        trailing: Any = error.trailing_metadata() or ()
        self.hints_ms[next((str(value) for key, value in trailing if key == RETRY_AFTER_KEY), "none")] += 1
        # Without its numbers and names: how many kinds of refusals there were.
        self.messages[(error.details() or "").rpartition("; ")[0].rpartition("; ")[2].partition(" is ")[0]] += 1

    def line(self) -> dict[str, Any]:
        return {
            "ok": len(self.ok_s),
            "codes": self.codes,
            "refused_s": sorted(self.refused_s),
            "ok_s": sorted(self.ok_s),
            "hints_ms": self.hints_ms,
            "messages": self.messages,
        }


async def _all_call(members: list[Member], calls: int, blocks: int, per_s: float) -> Outcomes:
    outcomes = Outcomes()
    if not per_s:
        await asyncio.gather(*(member.evict(blocks, outcomes) for _ in range(calls) for member in members))
        return outcomes
    tasks = []
    start_s = time.monotonic()
    for number in range(calls * len(members)):
        await asyncio.sleep(max(0.0, start_s + number / per_s - time.monotonic()))
        tasks.append(asyncio.ensure_future(members[number % len(members)].evict(blocks, outcomes)))
    await asyncio.gather(*tasks)
    return outcomes


async def _serve(runtime_dir: Path, count: int, instance: str) -> None:
    memory = HostMemory.allocate(BLOCKS * BLOCK_BYTES)
    members, refused = [], Counter[str]()

    async def join(number: int) -> None:
        member = Member(runtime_dir, number, memory)
        try:
            await member.join(f"{instance} {number}")
        except (OffloaddError, grpc.aio.AioRpcError) as error:
            refused[f"{type(error).__name__}: {error}"[:200]] += 1
        else:
            members.append(member)

    await asyncio.gather(*(join(number) for number in range(count)))
    _say({"attached": len(members), "refused": refused})
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        _say((await _all_call(members, order["calls"], order["blocks"], order["per_s"])).line())


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


class Crowd:
    """The test's end of one such process."""

    def __init__(self, runtime_dir: Path, count: int, instance: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.crowd", str(runtime_dir), str(count), instance],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """Its next line, which may take as long as the calls do."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the crowd's process ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def order(self, *, calls: int, blocks: int = 1, per_s: float = 0.0) -> None:
        """Let each client call so often; `answer` tells what became of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"calls": calls, "blocks": blocks, "per_s": per_s}) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


if __name__ == "__main__":
    raise_file_limit()
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))

"""An engine among others: restores that are timed while others are at work, and loads that run until they are told to stop. As a program, its process."""

import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.support.client import NAMESPACE, Answer, Engine, block_hash, main
from bench.support.mover import layout_of
from offloadd.client import AckLevel, Blocks, Client, EvictResult, EvictStatus, HostMemory, Region, RestoreStatus, Tier
from offloadd.client import Path as Way

DEADLINE_S = 300.0
#: Names of blocks that are evicted once and never restored; those of the restored ones lie below.
FRESH_NAMES = 1 << 50
#: Names of blocks that are kept in the arena alone. One that has a copy on a volume, too, may lose that in the arena, and "from the arena" would be none.
ARENA_NAMES = 1 << 40


def kept_name(path: int, number: int) -> int:
    """The name of the kept block with this number that a restore by this path reads."""
    return number + (ARENA_NAMES if path == Way.DDR else 0)


class Load:
    """Requests by several threads, one after the other in each, until `end`. `work(thread)` carries out one and returns its payload bytes."""

    def __init__(self, work: Callable[[int], int], thread_count: int) -> None:
        self._work = work
        self._stop = threading.Event()
        self._moved = [0] * thread_count
        self._errors: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(thread_count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        try:
            while not self._stop.is_set():
                self._moved[number] += self._work(number)
        except Exception as error:
            # The commanding process is told when it asks.
            self._errors.append(f"{type(error).__name__}: {error}")

    def moved_bytes(self) -> int:
        """By requests that are over. RuntimeError if one failed."""
        if self._errors:
            raise RuntimeError(self._errors[0])
        return sum(self._moved)

    def end(self) -> int:
        """Wait for the requests under way; bytes of all."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self.moved_bytes()


class Contender(Engine):
    """One region, and the commands. The blocks that it restores are those that it has kept, from number 0 on."""

    def __init__(self, runtime_dir: Path, client: Client) -> None:
        super().__init__(runtime_dir, client)
        self._runtime_dir = runtime_dir
        self._fresh = itertools.count(FRESH_NAMES)
        self._load: Load | None = None
        self._long: threading.Thread | None = None
        self._long_s = 0.0
        self._crowd: list[tuple[Client, HostMemory, Region]] = []

    def _named(self, index: int, name: int, count: int) -> Blocks:
        return Blocks(self._the_region(), range(index, index + count), [block_hash(number) for number in range(name, name + count)])

    def _fresh_blocks(self, index: int, count: int) -> Blocks:
        hashes = [block_hash(next(self._fresh)) for _ in range(count)]
        return Blocks(self._the_region(), range(index, index + count), hashes)

    # -- alone -----------------------------------------------------------------------------------------------------------------------

    def keep(self, *, count: int, volume: bool) -> Answer:
        """Evict the first `count` blocks to a tier, where they stay."""
        for first in range(0, count, 512):
            blocks = self._named(first, kept_name(Way.HOST if volume else Way.DDR, first), min(512, count - first))
            ack, tier = (AckLevel.DURABLE, Tier.VOLUME) if volume else (AckLevel.COPIED, Tier.ARENA)
            result = self._client.evict(blocks, ack=ack, tier=tier, keep=True, keep_ttl_s=3600, deadline_s=DEADLINE_S)
            _all_stored(result)
        return {}

    def stored(self, *, count: int, volume: bool) -> Answer:
        """Evict `count` blocks of new names from the first on; seconds to the answer, and what the daemon says of them."""
        blocks = self._fresh_blocks(0, count)
        start = time.perf_counter()
        result = self._client.evict(blocks, ack=AckLevel.DURABLE if volume else AckLevel.COPIED, deadline_s=DEADLINE_S)
        seconds = time.perf_counter() - start
        _all_stored(result)
        return {"seconds": seconds, "total_s": result.times.total_s}

    def series(self, *, seconds: float, requests_max: int, count: int, stored_count: int, path: int, pause_s: float, seed: int) -> Answer:
        """Restores of `count` blocks of the kept ones from anywhere, with pauses; seconds of each."""
        randomness = random.Random(seed)
        found: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and len(found) < requests_max:
            blocks = self._named(0, kept_name(path, randomness.randrange(stored_count - count + 1)), count)
            start = time.perf_counter()
            result = self._client.restore(blocks, path=Way(path), require_path=True, deadline_s=DEADLINE_S)
            found.append(time.perf_counter() - start)
            if result.restored_count != count:
                raise RuntimeError(f"{result.restored_count} of {count} blocks were restored: {result.outcomes[0]}")
            time.sleep(pause_s)
        return {"seconds": found}

    # -- loads -----------------------------------------------------------------------------------------------------------------------

    def begin_restores(self, *, threads: int, count: int, stored_count: int, path: int) -> Answer:
        """Restore kept blocks from now on, `count` a request, each thread into its own part of the region where there is room for all."""
        region_count = self._the_region().block_count
        starts = itertools.cycle(range(0, stored_count - count + 1, count))
        lock = threading.Lock()

        def one(thread: int) -> int:
            with lock:
                name = next(starts)
            blocks = self._named(thread * count % (region_count - count + 1), kept_name(path, name), count)
            result = self._client.restore(blocks, path=Way(path), require_path=True, deadline_s=DEADLINE_S)
            if result.restored_count != count:
                raise RuntimeError(f"{result.restored_count} of {count} blocks were restored: {result.outcomes[0]}")
            return count * self._the_region().payload_bytes

        self._load = Load(one, threads)
        return {}

    def begin_evicts(self, *, threads: int, count: int, volume: bool) -> Answer:
        """Evict blocks of ever new names from now on, `count` a request, each thread from its own part of the region."""
        ack, tier = (AckLevel.DURABLE, Tier.VOLUME) if volume else (AckLevel.COPIED, Tier.ARENA)
        lock = threading.Lock()

        def one(thread: int) -> int:
            with lock:
                blocks = self._fresh_blocks(thread * count, count)
            _all_stored(self._client.evict(blocks, ack=ack, tier=tier, deadline_s=DEADLINE_S))
            return count * self._the_region().payload_bytes

        self._load = Load(one, threads)
        return {}

    def moved(self) -> Answer:
        """Bytes that the load has moved so far."""
        assert self._load is not None
        return {"bytes": self._load.moved_bytes()}

    def end(self) -> Answer:
        """End the load."""
        assert self._load is not None
        load, self._load = self._load, None
        return {"bytes": load.end()}

    # -- one long restore, and many small ones ---------------------------------------------------------------------------------------

    def begin_long(self, *, count: int, path: int) -> Answer:
        """Restore so many kept blocks in one request; answered when its first block is there."""
        first = threading.Event()
        blocks = self._named(0, kept_name(path, 0), count)

        def work() -> None:
            start = time.perf_counter()
            restored = 0
            try:
                for part in self._client.restore_stream(blocks, path=Way(path), require_path=True, deadline_s=DEADLINE_S):
                    restored += sum(outcome.status == RestoreStatus.RESTORED for outcome in part.outcomes)
                    first.set()
                self._long_s = time.perf_counter() - start if restored == count else -1.0
            finally:
                first.set()

        self._long_s = -1.0
        self._long = threading.Thread(target=work)
        self._long.start()
        first.wait(DEADLINE_S)
        return {}

    def end_long(self) -> Answer:
        """Wait for it; the seconds that it took."""
        assert self._long is not None
        self._long.join()
        if self._long_s < 0:
            raise RuntimeError("the long restore has not restored all of its blocks")
        return {"seconds": self._long_s}

    def gather_crowd(self, *, size: int, block_bytes: int, count: int) -> Answer:
        """Engine instances with a region of `count` blocks each."""
        layout = layout_of(block_bytes, count, 1)
        for number in range(size):
            client = Client.connect(self._runtime_dir, instance=f"small-{number}", process="bench")
            memory = HostMemory.allocate(block_bytes * count)
            region = client.register_region(block_count=count, planes=layout.planes, memories=[memory], namespace=NAMESPACE)
            self._crowd.append((client, memory, region))
        return {}

    def crowd(self, *, count: int, path: int, name: int) -> Answer:
        """A restore of `count` blocks by each of them, all at once; seconds to the first block of each, and to its end."""
        found: list[tuple[float, float]] = []
        together = threading.Barrier(len(self._crowd))

        def one(number: int) -> None:
            client, _, region = self._crowd[number]
            names = [block_hash(kept_name(path, name + number * count + place)) for place in range(count)]
            together.wait()
            start = time.perf_counter()
            first_s, restored = 0.0, 0
            for part in client.restore_stream(Blocks(region, range(count), names), path=Way(path), require_path=True, deadline_s=DEADLINE_S):
                first_s = first_s or time.perf_counter() - start
                restored += sum(outcome.status == RestoreStatus.RESTORED for outcome in part.outcomes)
            if restored == count:
                found.append((first_s, time.perf_counter() - start))

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(self._crowd))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(found) != len(threads):
            raise RuntimeError(f"{len(found)} of {len(threads)} small restores restored all of their blocks")
        return {"first_s": [first for first, _ in found], "seconds": [seconds for _, seconds in found]}

    def disperse(self) -> Answer:
        """End the crowd."""
        for client, _, _ in self._crowd:
            client.close()
        self._crowd.clear()
        return {}


def _all_stored(result: EvictResult) -> None:
    bad = [outcome for outcome in result.outcomes if outcome.status not in (EvictStatus.STORED, EvictStatus.DUPLICATE)]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(result.outcomes)} blocks were not stored: {bad[0]}")


if __name__ == "__main__":
    main(Contender)

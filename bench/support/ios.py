"""The I/Os of ceilings: in which pieces a lane would make them, and over as many threads."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.support.mover import STAGING_SLOT_BYTES, THREADS, parts_of
from offloadd.model.slots import BLOCK_DTYPE
from offloadd.mover.messages import Job, Operation
from offloadd.mover.slices import cut


@dataclass(frozen=True, slots=True)
class Io:
    """One I/O of a volume, by its number."""

    volume: int
    offset: int
    size_bytes: int


def slices_of(slots: Sequence[int], slot_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the I/Os that a lane makes of the slots at these offsets, cut by the mover itself."""
    records = np.zeros(len(slots), dtype=BLOCK_DTYPE)
    # Two slots are neighbours in a slab exactly if one begins where the other ends: quotients that differ by one, and the same remainder.
    records["slot"], records["slab"] = np.divmod(np.asarray(slots, dtype=np.int64), slot_bytes)
    for part in parts_of(records, slot_bytes):
        job = Job(job=1, move=1, operation=Operation.READ_ONLY, slot_bytes=slot_bytes, blocks=part.tobytes())
        for piece in cut(job, thread_count=THREADS, staging_slot_bytes=STAGING_SLOT_BYTES):
            first = piece.records[0]
            offset, size_bytes = int(first["slot"]) * slot_bytes + int(first["slab"]), len(piece.records) * slot_bytes
            # A slot longer than a staging slot travels in several I/Os.
            for at in range(0, size_bytes, STAGING_SLOT_BYTES):
                yield offset + at, min(STAGING_SLOT_BYTES, size_bytes - at)


def over_threads(thread_count: int, items: Sequence[Io], work: Callable[[int, Io], None]) -> float:
    """Seconds of all items, in their order, each by the next thread that is free. A single thread is this one: handing over costs as much as a short read."""
    left = iter(items)
    lock = threading.Lock()
    faults: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            while not faults:
                with lock:
                    item = next(left, None)
                if item is None:
                    return
                work(thread, item)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, thread_count)]
    # A lane's threads are there when its job comes: starting ours is no part of the time, or the ceiling would be lower than it is.
    with lock:
        for thread in threads:
            thread.start()
        start = time.perf_counter()
    run(0)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if faults:
        raise faults[0]
    return seconds

"""Which ceiling bounds a case, ready to be run in turn with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from bench.grid.ceilings import Memcpy, NoCeiling, RawIo
from bench.grid.node import Engines, Skip
from bench.grid.volumes import GridVolume
from bench.support.bare_kvikio import THREADS_MAX
from bench.support.rows import Case, Operation


class Ceiling(Protocol):
    """`name` says what it does."""

    name: str

    def run(self, request_count: int) -> float:
        """Seconds of as many bytes as so many requests of the case move, on every GPU of it."""


class GpuCopies:
    """Page-locked copies of every GPU at once."""

    def __init__(self, case: Case, engines: Engines) -> None:
        self._case = case
        self._engines = engines
        self._to_host = case.operation is Operation.EVICT
        self.name = "page-locked copies, GPU to host" if self._to_host else "page-locked copies, host to GPU"

    def run(self, request_count: int) -> float:
        """See `Ceiling`."""
        size = self._case.payload_bytes
        answers = self._engines.all("copy_page_locked", size_bytes=size, total_bytes=size * request_count, to_host=self._to_host)
        return max(float(answer["seconds"]) for answer in answers)


class GpuKvikio:
    """KvikIO alone, with the I/Os that the raw ceiling of the case would make; each GPU does its share."""

    def __init__(self, raw: RawIo, engines: Engines) -> None:
        self._raw = raw
        self._engines = engines
        self.name = "bare KvikIO writes and a sync" if raw.writes else "bare KvikIO reads"

    def run(self, request_count: int) -> float:
        """See `Ceiling`."""
        processes = self._engines.processes
        ios = self._raw.ios(request_count * len(processes))
        # Threads share the I/Os of one GPU; requests of the GPUs come one after the other in the list.
        share = -(-len(ios) // len(processes))
        for number, process in enumerate(processes):
            mine = [(io.volume, io.offset, io.size_bytes) for io in ios[number * share : (number + 1) * share]]
            process.tell(
                "bare_kvikio",
                paths=self._raw.paths,
                ios=mine,
                threads=min(THREADS_MAX, self._raw.thread_count),
                writes=self._raw.writes,
            )
        answers = [process.answer() for process in processes]
        for answer in answers:
            if "refused" in answer:
                raise NoCeiling(answer["refused"])
        return max(float(answer["seconds"]) for answer in answers)


class RawOfAll:
    """Raw I/Os of all GPUs' requests together."""

    def __init__(self, raw: RawIo, case: Case) -> None:
        self._raw = raw
        self._engine_count = max(1, case.gpu_count)
        self.name = raw.name

    def run(self, request_count: int) -> float:
        """See `Ceiling`."""
        return self._raw.run(request_count * self._engine_count)


@contextmanager
def bound_of(case: Case, volumes: Sequence[GridVolume], engines: Engines) -> Iterator[Ceiling]:
    """The ceiling of the case. Raises NoCeiling where there is none, OSError where no room is left for it."""
    if case.path == "ddr":
        if case.gpu_count:
            try:
                yield GpuCopies(case, engines)
            finally:
                engines.all("forget_copies")
            return
        with Memcpy(case) as memcpy:
            yield memcpy
        return
    with RawIo(case, volumes) as raw:
        yield GpuKvikio(raw, engines) if case.path == "gds" else RawOfAll(raw, case)


def seconds_of(ceiling: Ceiling, request_count: int) -> float:
    """`Ceiling.run`, whatever ends it told as NoCeiling."""
    try:
        return ceiling.run(request_count)
    except (Skip, OSError) as error:
        raise NoCeiling(f"{ceiling.name}: {error}") from error

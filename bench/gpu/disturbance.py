"""What restores at full rate cost a decode step on the same GPU: steps alone and beside restores of a mover, in turn, by each path, without and with MPS.

Engine memory, mover and load live in processes that `environment` reaches, and this module's own is one of them: a process that goes through MPS and one that
does not can't share memory.
"""

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from bench.gpu import mps
from bench.gpu.device import EngineMemory, Gpu, uses_mps
from bench.gpu.figures import Figures
from bench.gpu.moves import arena_memory, arena_way, gpu_mover, opened
from bench.support.cpu import cpu_seconds
from bench.support.gpu_load import LoadProcess
from bench.support.mover import LaneEnd, MoverProcess, Records, layout_of, make_records
from bench.support.process import Answer, Commanded, CommandedError, Handler, obey
from bench.support.report import Target
from bench.support.restoring import make_volume
from bench.support.rows import Case, Row, quantiles_of
from bench.support.rows import Operation as Direction
from bench.support.stats import Summary
from bench.support.workload import Blocks
from offloadd.model.enums import Way
from offloadd.mover.messages import ArenaLocked, Operation
from offloadd.tiers.format import Geometry, slot_bytes_for
from offloadd.tiers.volume_io import VolumeFile
from offloadd.units import SECTOR_BYTES, align_up

#: Of the p99 alone.
P99_RATIO_MAX = 1.05
PATHS = ("ddr", "bounce", "gds")
#: Steps of one turn: some 2 s. Turns alone and beside restores change so often.
STEPS, TURNS = 400, 4
#: What gpu_cross_layer's blocks are: 640 KiB hold 16 tokens of one rank.
MODEL, TENSOR_PARALLEL, KV_DTYPE, BLOCK_TOKENS = "llama-3-70b", 8, "bf16", 16
#: A restore of 320 MiB takes 10 to 100 ms.
FIRST_RESTORE_TIMEOUT_S = 120.0


class _Restores:
    """Restores one after the other on a thread, from the `with` statement (entered when the first has ended) to its end."""

    def __init__(self, lane: LaneEnd, operation: Operation, records: Records, slot_bytes: int) -> None:
        self._lane, self._operation, self._records, self._slot_bytes = lane, operation, records, slot_bytes
        self._enough = threading.Event()
        self._first = threading.Event()
        self._failure: Exception | None = None
        #: When each began, its seconds, and nanoseconds of all by stage.
        self.spans: list[tuple[float, float]] = []
        self.stage_ns: dict[str, int] = {}
        self.slice_count = self.bounced_count = 0
        self.way_bytes: dict[Way, int] = {}

    def _work(self) -> None:
        try:
            while not self._enough.is_set():
                self._one()
                self._first.set()
        except Exception as error:
            self._failure = error
            self._first.set()

    def _one(self) -> None:
        start = time.perf_counter()
        self.spans.append((start, self._seconds()))
        for stage, nanoseconds in self._lane.stage_ns.items():
            self.stage_ns[stage] = self.stage_ns.get(stage, 0) + nanoseconds

    def _seconds(self) -> float:
        """Of one restore of all blocks."""
        seconds = self._lane.run(self._operation, self._records, self._slot_bytes)
        self.slice_count += self._lane.slice_count
        self.bounced_count += self._lane.bounced_count
        for way, size_bytes in self._lane.way_bytes.items():
            self.way_bytes[way] = self.way_bytes.get(way, 0) + size_bytes
        return seconds

    def alone(self, count: int) -> list[float]:
        """Seconds of each of so many restores with nothing beside them; not among those of the thread."""
        return [self._seconds() for _ in range(count)]

    def since(self, begin: float) -> list[float]:
        """Seconds of those that ended later."""
        return [seconds for start, seconds in self.spans if start + seconds > begin]

    def __enter__(self) -> "_Restores":
        self._enough.clear()
        self._first.clear()
        self._thread = threading.Thread(target=self._work, name="restores")
        self._thread.start()
        if not self._first.wait(FIRST_RESTORE_TIMEOUT_S):
            raise TimeoutError(f"no restore ended within {FIRST_RESTORE_TIMEOUT_S} s")
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure


class _Node:
    """The child's side: one GPU with engine memory, a mover with a lane for each path, and the load."""

    def __init__(
        self, work: Blocks, engine: EngineMemory, mover: MoverProcess, locked: ArenaLocked, decode: LoadProcess, file: VolumeFile, geometry: Geometry
    ) -> None:
        self._work, self._engine, self._mover, self._locked, self._decode = work, engine, mover, locked, decode
        self._file, self._geometry = file, geometry
        self._records = make_records(work.block_bytes, work.block_count)
        self._lanes = iter(range(1, len(PATHS) + 1))

    def measure(self, command: Answer) -> Answer:
        """Steps alone and beside restores by one path. Raises LaneRefusedError where there is no such way."""
        path, steps, turns = str(command["path"]), int(command["steps"]), int(command["turns"])
        restores = self._restores(path)
        idle: list[float] = []
        alone: list[float] = []
        beside: list[float] = []
        seconds: list[float] = []
        cpu_s = idle_cpu_s = 0.0
        for _ in range(turns):
            alone += self._decode.run(steps)
            before = cpu_seconds([self._mover.pid])
            idle += restores.alone(self._work.round_count)
            between = cpu_seconds([self._mover.pid])
            with restores:
                begin = time.perf_counter()
                beside += self._decode.run(steps)
            idle_cpu_s += between - before
            cpu_s += cpu_seconds([self._mover.pid]) - between
            # Not those with no step beside them yet.
            seconds += restores.since(begin)
        if restores.bounced_count:
            raise RuntimeError(f"{restores.bounced_count} of {restores.slice_count} slices bounced: these were no restores by {path}")
        return {
            "alone": alone,
            "beside": beside,
            "idle": idle,
            "restores": seconds,
            "cpu_s_per_restore": cpu_s / len(restores.spans),
            "idle_cpu_s_per_restore": idle_cpu_s / len(idle),
            "proven": self._proven(path, restores),
            "stages_ms": {name.replace("_ns", "_ms"): value / 1e6 / len(restores.spans) for name, value in restores.stage_ns.items()},
            "way": self._way(path, restores),
        }

    def _restores(self, path: str) -> _Restores:
        volume = path != "ddr"
        slot_bytes = slot_bytes_for(self._work.block_bytes) if volume else align_up(self._work.block_bytes, SECTOR_BYTES)
        number = next(self._lanes)
        lane = self._mover.add_lane(number, self._file, self._geometry, path=path) if volume else self._mover.add_lane(number)
        out, back = (Operation.EVICT, Operation.RESTORE) if volume else (Operation.ARENA_EVICT, Operation.ARENA_RESTORE)
        lane.run(out, self._records, slot_bytes)
        self._engine.wipe()
        lane.run(back, self._records, slot_bytes)
        self._engine.require_original(f"{out.name} and {back.name} by {path}")
        return _Restores(lane, back, self._records, slot_bytes)

    @staticmethod
    def _proven(path: str, restores: _Restores) -> dict[str, float]:
        """Shares of the payload by the way that it went."""
        total = sum(restores.way_bytes.values())
        return {path if way is Way.PLAIN else way.label: size_bytes / total for way, size_bytes in restores.way_bytes.items()}

    def _way(self, path: str, restores: _Restores) -> str:
        if path == "gds":
            return f"gds: 0 of {restores.slice_count} slices bounced, by cuFile's and KvikIO's counts"
        if path == "bounce":
            return "bounce: O_DIRECT into page-locked staging slots, copy engines"
        return arena_way([self._locked])


def _begin(setup: Answer, held: contextlib.ExitStack) -> tuple[Answer, Handler]:
    work = msgspec.convert(setup["work"], Blocks)
    path = Path(setup["directory"]) / f"disturbance-{os.getpid()}.volume"
    gpu = held.enter_context(Gpu(setup["device"]))
    geometry = make_volume(path, work)
    held.callback(path.unlink, missing_ok=True)
    engine = held.enter_context(EngineMemory(gpu, layout_of(work.block_bytes, work.block_count, work.plane_count)))
    arena_fd, arena = held.enter_context(arena_memory(work))
    decode = held.enter_context(LoadProcess(gpu.device.uuid, tiny=setup["tiny"]))
    file = held.enter_context(opened(path))
    mover = held.enter_context(gpu_mover(gpu, engine))
    node = _Node(work, engine, mover, mover.map_locked_arena(arena_fd, arena.bytes.nbytes), decode, file, geometry)
    told = {"mps": uses_mps(gpu.device), "load": decode.kind, "weight_bytes": decode.weight_bytes, "kv_bytes": decode.kv_bytes}
    return told, node.measure


def decode_steps(figures: Figures, device: str, work: Blocks, directory: Path) -> None:
    """A figure a path, without MPS, and with it where its control daemon runs."""
    _under(figures, device, work, directory, "without MPS", mps.environment_without(directory), through_mps=False)
    why = mps.why_not()
    if why:
        figures.skip("decode step p99 beside restores, with MPS", why)
        return
    _under(figures, device, work, directory, "with MPS", os.environ, through_mps=True)


def _under(figures: Figures, device: str, work: Blocks, directory: Path, title: str, environment: Mapping[str, str], *, through_mps: bool) -> None:
    what = f"decode step p99 beside restores, {title}"
    setup = {"device": device, "work": msgspec.to_builtins(work), "directory": str(directory), "tiny": figures.tiny}
    try:
        with Commanded("bench.gpu.disturbance", setup, environment) as node:
            if node.ready["mps"] != through_mps:
                said = "go through MPS" if node.ready["mps"] else "do not go through MPS"
                figures.skip(what, f"contexts of processes that were started so {said}, says the driver")
                return
            steps, turns = (5, 1) if figures.tiny else (STEPS, TURNS)
            for path in PATHS:
                figures.say(f"decode steps alone and beside restores by {path}, {title}")
                try:
                    found = node.ask(path=path, steps=steps, turns=turns)
                except CommandedError as error:
                    figures.skip(f"decode step p99 beside restores by {path}, {title}", str(error))
                    figures.add_row(Row(_case(work, path, title), skipped=str(error)))
                    continue
                _tell(figures, work, path, title, node.ready, found)
                _tell_rows(figures, work, path, title, found)
    except CommandedError as error:
        figures.skip(what, str(error))


def _tell(figures: Figures, work: Blocks, path: str, title: str, ready: Answer, found: Answer) -> None:
    alone, beside = Summary.of(found["alone"]), Summary.of(found["beside"])
    rate, idle_rate = (work.payload_bytes / Summary.of(found[name]).median / 1e9 for name in ("restores", "idle"))
    figures.add(
        f"decode step p99 beside restores by {path}, {title}",
        beside.p99 * 1e3,
        "ms",
        way=found["way"],
        ceiling=alone.p99 * 1e3,
        ratio=beside.p99 / alone.p99,
        target=Target(P99_RATIO_MAX, at_least=False, on_ratio=True),
        detail={
            "ceiling": "p99 of the same steps with nothing beside them, in turn",
            "load": f"{ready['load']}, {ready['weight_bytes']} bytes of weights and {ready['kv_bytes']} of KV a step",
            "restore_gb_per_s": rate,
            "restore_gb_per_s_without_steps": idle_rate,
            "restore_count": len(found["restores"]),
            **alone.detail(1e3, "alone_ms_"),
            **beside.detail(1e3, "beside_ms_"),
            **found["stages_ms"],
        },
    )
    figures.add(
        f"restores by {path} beside decode steps, {title}",
        rate,
        "GB/s",
        way=found["way"],
        ceiling=idle_rate,
        ratio=rate / idle_rate,
        detail={"ceiling": "the same restores with no step beside them, in turn", **Summary.of(found["restores"]).detail(1e3, "ms_")},
    )


def _case(work: Blocks, path: str, title: str, *, background: str = "decode steps") -> Case:
    """Of a preempted sequence's restore, as the workload file describes it. Without and with MPS are two machines to a mover, so each has rows alone, too."""
    return Case(
        model=f"{MODEL}, mover alone, {title}",
        tensor_parallel=TENSOR_PARALLEL,
        kv_dtype=KV_DTYPE,
        block_tokens=BLOCK_TOKENS,
        block_bytes=work.block_bytes,
        tokens=BLOCK_TOKENS * work.block_count,
        block_count=work.block_count,
        operation=Direction.RESTORE,
        path=path,
        gpu_count=1,
        background=background,
    )


def _tell_rows(figures: Figures, work: Blocks, path: str, title: str, found: Answer) -> None:
    """The restores alone and beside decode steps, as rows of a grid."""
    alone = _row(work, _case(work, path, title, background=""), found["idle"], found["idle_cpu_s_per_restore"], found["proven"])
    figures.add_row(msgspec.structs.replace(alone, ceiling="none: that of the path is measured with it alone"))
    beside = _row(work, _case(work, path, title), found["restores"], found["cpu_s_per_restore"], found["proven"])
    ceiling = {"ceiling": "the same restores with no step beside them", "ceiling_gb_per_s": alone.gb_per_s, "ratio": beside.gb_per_s / alone.gb_per_s}
    figures.add_row(msgspec.structs.replace(beside, **ceiling))


def _row(work: Blocks, case: Case, seconds: list[float], cpu_s: float, proven: dict[str, float]) -> Row:
    return Row(
        case,
        proven=proven,
        request_count=len(seconds),
        seconds=quantiles_of(seconds),
        gb_per_s=work.payload_bytes * len(seconds) / sum(seconds) / 1e9,
        cpu_s_per_gb=cpu_s / work.payload_bytes * 1e9,
        memory_note="not counted here",
    )


if __name__ == "__main__":
    obey(_begin)

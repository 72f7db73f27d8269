"""`offloadd demo`: a daemon and an engine's memory on this machine, every tier and path that it has, with the ceiling beside each figure."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path as FilePath

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from offloadd.client import AckLevel, AdminClient, Blocks, Client, HostMemory, Namespace, Path, PathCapability, Plane, Region, Tier
from offloadd.config import MoverConfig, VolumeConfig
from offloadd.errors import OffloaddError, Unavailable
from offloadd.tiers.volume_file import format_volume
from offloadd.tiers.volume_io import allocate
from offloadd.units import MIB, align_up, format_bytes

#: Llama-3-8B in bf16: K and V of 32 layers, 8 KV heads of 128 elements of 2 bytes.
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
BLOCK_TOKENS = 16
BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS

#: What `offloadd demo` does without options: 256 MiB of KV, restored often enough for a p99 of single blocks.
TOKENS = 2048
ROUNDS = 15
BLOCK_RESTORES_PER_ROUND = 13
#: As the daemon reads a volume by default.
CEILING_THREADS: int = VolumeConfig.model_fields["io_threads"].default
CEILING_SLICE_BYTES: int = MoverConfig.model_fields["staging_slot_bytes"].default

SLAB_BYTES = 128 * MIB
#: Free space to ask for beyond the volume itself.
SPARE_BYTES = 256 * MIB
START_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Figures:
    """What one (tier, path) pair showed; seconds. `verified` counts whole sequences compared byte for byte."""

    tier: Tier
    path: Path
    evict_s: float = 0.0
    ack: str = ""
    sequence_s: list[float] = field(default_factory=list)
    block_s: list[float] = field(default_factory=list)
    ceiling_s: list[float] = field(default_factory=list)
    ceiling_name: str = ""
    verified: int = 0


@dataclass(frozen=True, slots=True)
class _Size:
    """How much the demo moves. The tiers hold the two sequences that are evicted into each, and a slab more."""

    tokens: int
    rounds: int

    @property
    def block_count(self) -> int:
        return self.tokens // BLOCK_TOKENS

    @property
    def sequence_bytes(self) -> int:
        return self.block_count * BLOCK_BYTES

    @property
    def tier_bytes(self) -> int:
        return align_up(2 * self.sequence_bytes + self.sequence_bytes // 8, SLAB_BYTES) + 2 * SLAB_BYTES

    @property
    def block_rounds(self) -> int:
        return self.rounds * BLOCK_RESTORES_PER_ROUND


class _Demo:
    def __init__(self, folder: FilePath, size: _Size) -> None:
        self.folder = folder
        self.size = size
        self.volume = folder / "volume"
        # Socket paths are limited to 107 bytes; a checkout may lie deep.
        self.runtime_dir = FilePath(tempfile.mkdtemp(prefix="offloadd-demo-"))
        self.log = folder / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None

    # -- the daemon ------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        free = shutil.disk_usage(self.folder).free
        needed = self.size.tier_bytes + SPARE_BYTES
        if free < needed:
            raise Unavailable(f"{self.folder} has {format_bytes(free)} free; the demo needs {format_bytes(needed)}")
        format_volume(str(self.volume), volume_bytes=self.size.tier_bytes, slab_bytes=SLAB_BYTES)
        config = self.folder / "offloadd.toml"
        config.write_text(
            f'[daemon]\nruntime_dir = "{self.runtime_dir}"\nlog_format = "json"\nmetrics_listen = "127.0.0.1:0"\n'
            f'[arena]\narena_bytes = {self.size.tier_bytes}\n[[volume]]\npath = "{self.volume}"\n'
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "offloadd", "serve", "--config", str(config)], stdout=log, stderr=log)
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise Unavailable(f"the daemon ended with status {self.process.returncode}; its last words: {self._last_words()}")
            try:
                with AdminClient(self.runtime_dir) as admin:
                    if any(volume.state in ("serving", "recovering") for volume in admin.status().volumes):
                        return
            except OffloaddError:
                pass
            time.sleep(0.05)
        raise Unavailable(f"the daemon was not ready within {START_TIMEOUT_S:.0f} s; its last words: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "none"

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)
        self.volume.unlink(missing_ok=True)

    # -- the engine ------------------------------------------------------------------------------------------------------------------

    def run(self, progress: Progress) -> tuple[list[Figures], tuple[PathCapability, ...]]:
        task = progress.add_task("starting a daemon", total=2 + 2 * (self.size.rounds + 3))
        self.start()
        with Client.connect(self.runtime_dir, instance="demo", timeout_s=START_TIMEOUT_S) as client:
            progress.update(task, advance=1, description=f"filling {format_bytes(self.size.sequence_bytes)} of KV cache")
            engine = _Engine(client, self.size.block_count)
            progress.update(task, advance=1)
            figures = [
                self._measure(
                    engine, Figures(Tier.ARENA, Path.DDR, ack="copied", ceiling_name="memcpy"), AckLevel.COPIED, _memcpy_ceiling(engine), progress, task
                ),
                self._measure(
                    engine,
                    Figures(Tier.VOLUME, Path.HOST, ack="durable", ceiling_name="raw O_DIRECT read"),
                    AckLevel.DURABLE,
                    _read_ceiling(self.volume, self.size.sequence_bytes),
                    progress,
                    task,
                ),
            ]
            return figures, client.capabilities().paths

    def _measure(self, engine: "_Engine", figures: Figures, ack: AckLevel, ceiling: Callable[[], float], progress: Progress, task: object) -> Figures:
        name = f"{figures.tier.name.lower()} by path {figures.path.name.lower()}"

        def say(what: str) -> None:
            progress.update(task, advance=1, description=f"{name}: {what}")  # type: ignore[arg-type]

        # A first evict under other names, so that slabs are cut and pages are there when the clock runs.
        engine.evict(figures, ack, "warm-up")
        say("evicting one sequence")
        figures.evict_s = engine.evict(figures, ack, "demo")
        say("restoring one block at a time")
        for number in range(self.size.block_rounds):
            figures.block_s.append(engine.restore(figures, [number % self.size.block_count]))
        for number in range(self.size.rounds):
            say(f"restoring the sequence, {number + 1} of {self.size.rounds}")
            engine.wipe()
            figures.ceiling_s.append(ceiling())
            figures.sequence_s.append(engine.restore(figures, list(range(self.size.block_count))))
            engine.verify()
            figures.verified += 1
        say("done")
        return figures


class _Engine:
    """The memory of one engine: a sequence in the first half of its blocks, room for its restored copy in the second."""

    def __init__(self, client: Client, block_count: int) -> None:
        self.client = client
        self.block_count = block_count
        self.memory = HostMemory.allocate(2 * block_count * BLOCK_BYTES, name="demo-kv")
        self.blocks = self.memory.numpy(np.uint8, (2 * block_count, BLOCK_BYTES))
        self.source, self.target = self.blocks[:block_count], self.blocks[block_count:]
        self.source[:] = np.random.default_rng(8).integers(0, 256, self.source.shape, dtype=np.uint8)
        self.target[:] = 0
        self.region: Region = client.register_region(
            block_count=2 * block_count,
            planes=[Plane(0, 0, BLOCK_BYTES, BLOCK_BYTES)],
            memories=[self.memory],
            namespace=Namespace(model="llama-3-8b", weights="demo", engine="demo", kv_dtype="bfloat16", block_tokens=BLOCK_TOKENS, layout="cross-layer"),
        )

    def _hashes(self, figures: Figures, name: str, numbers: list[int]) -> list[bytes]:
        return [hashlib.sha256(f"{name}/{figures.tier.name}/{number}".encode()).digest() for number in numbers]

    def evict(self, figures: Figures, ack: AckLevel, name: str) -> float:
        numbers = list(range(self.block_count))
        start = time.perf_counter()
        answer = self.client.evict(
            Blocks(self.region, numbers, self._hashes(figures, name, numbers)), ack=ack, tier=figures.tier, path=figures.path, require_path=True, deadline_s=120
        )
        seconds = time.perf_counter() - start
        if not answer.all_stored:
            worst = next(outcome for outcome in answer.outcomes if not outcome.stored)
            raise Unavailable(f"a block was not stored: {worst.status.name}, {worst.reason.name}")
        return seconds

    def restore(self, figures: Figures, numbers: list[int]) -> float:
        # Into other blocks, in another order: what a resumed request gets.
        targets = [2 * self.block_count - 1 - number for number in numbers]
        start = time.perf_counter()
        answer = self.client.restore(Blocks(self.region, targets, self._hashes(figures, "demo", numbers)), path=figures.path, require_path=True)
        seconds = time.perf_counter() - start
        if answer.restored_count != len(numbers):
            worst = next(outcome for outcome in answer.outcomes if not outcome.restored)
            raise Unavailable(f"a block was not restored: {worst.status.name}, {worst.reason.name}")
        ways = [(use.tier, use.path) for use in answer.paths]
        if ways != [(figures.tier, figures.path)]:
            raise Unavailable(f"the bytes went another way than asked: {ways}")
        return seconds

    def wipe(self) -> None:
        self.target[:] = 0

    def verify(self) -> None:
        if not np.array_equal(self.target[::-1], self.source):
            raise AssertionError("a restored byte differs from the one evicted: this must never happen; please report it")


def _memcpy_ceiling(engine: _Engine) -> Callable[[], float]:
    """Copies as many bytes within memory, with as many threads as a lane has."""
    scratch: npt.NDArray[np.uint8] = np.zeros(engine.source.shape, dtype=np.uint8)
    parts = [slice(number, number + 8) for number in range(0, engine.block_count, 8)]

    def copy(part: slice) -> None:
        np.copyto(scratch[part], engine.source[part])

    return _timed(lambda pool: list(pool.map(copy, parts)))


def _read_ceiling(volume: FilePath, sequence_bytes: int) -> Callable[[], float]:
    """Reads as many bytes of the volume file, O_DIRECT, with as many threads as a lane has and slices as long as a staging slot."""
    fd = os.open(volume, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    buffers = [allocate(CEILING_SLICE_BYTES) for _ in range(CEILING_THREADS)]
    offsets = list(range(SLAB_BYTES, SLAB_BYTES + sequence_bytes, CEILING_SLICE_BYTES))

    def read(thread: int) -> None:
        for offset in offsets[thread::CEILING_THREADS]:
            if os.preadv(fd, [buffers[thread]], offset) != CEILING_SLICE_BYTES:
                raise Unavailable(f"{volume}: short read at {offset}")

    return _timed(lambda pool: list(pool.map(read, range(CEILING_THREADS))))


def _timed(work: Callable[[ThreadPoolExecutor], object]) -> Callable[[], float]:
    pool = ThreadPoolExecutor(CEILING_THREADS)

    def run() -> float:
        start = time.perf_counter()
        work(pool)
        return time.perf_counter() - start

    return run


# -- the picture ---------------------------------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _milliseconds(seconds: list[float]) -> str:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return f"{_number(p50)} / {_number(p99)}"


def _way(tier: Tier, path: Path) -> str:
    return f"{tier.name.lower()}, {path.name.lower()}"


def _table(figures: list[Figures], payload: int) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tier, path\nreally taken", no_wrap=True)
    for heading in ("evict\nGB/s", "restore\nGB/s", "ceiling\nGB/s", "of the\nceiling", "sequence\nms p50 / p99", "one block\nms p50 / p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in figures:
        restore, ceiling = float(np.median(one.sequence_s)), float(np.median(one.ceiling_s))
        # The ratio of neighbours in time, so that a disk or a machine that drifts does not make it.
        ratio = float(np.median(np.array(one.ceiling_s) / np.array(one.sequence_s)))
        table.add_row(
            _way(one.tier, one.path),
            f"{payload / one.evict_s / 1e9:.2f}",
            f"[bold green]{payload / restore / 1e9:.2f}[/]",
            f"{payload / ceiling / 1e9:.2f}",
            f"{ratio:.0%}",
            _milliseconds(one.sequence_s),
            _milliseconds(one.block_s),
        )
    return table


def run(tokens: int = TOKENS, rounds: int = ROUNDS) -> int:
    """Run the demo in `.demo` under the working directory; the exit status. `tokens` in the sequence, at least one block; `rounds` whole restores."""
    size = _Size(tokens=max(tokens, BLOCK_TOKENS), rounds=max(rounds, 1))
    console = Console(highlight=False)
    folder = FilePath.cwd() / ".demo"
    folder.mkdir(exist_ok=True)
    sequence = f"{size.block_count} blocks of {BLOCK_TOKENS} tokens, {format_bytes(BLOCK_BYTES)} each, {format_bytes(size.sequence_bytes)} in all"
    console.print(
        f"[bold]offloadd demo[/]: a sequence of {size.tokens:,} tokens, shaped like Llama-3-8B in bf16:\n"
        f"{sequence}. Evicted, kept by a daemon,\n"
        "restored into other blocks, compared byte for byte.\n"
    )
    demo = _Demo(folder, size)
    columns = (TextColumn("{task.description:<48}"), BarColumn(bar_width=20), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            figures, paths = demo.run(progress)
    finally:
        demo.stop()
    console.print(_table(figures, size.sequence_bytes))
    shown = {(one.tier, one.path) for one in figures}
    for path in paths:
        if (path.tier, path.path) not in shown:
            why = f"not available: {path.note}" if path.note else f"not tried: the demo's blocks lie in host memory, this way serves {path.device}"
            console.print(f"[dim]{_way(path.tier, path.path):<16}{why}[/]")
    sequences = sum(one.verified for one in figures)
    console.print(
        f"\n[green]✔[/] {sequences} sequences ({format_bytes(sequences * size.sequence_bytes)}) compared: every byte as it was evicted.\n"
        "[dim]evict: acknowledged when copied (arena), when synced (volume). ceiling: memcpy\n"
        f"(arena), raw O_DIRECT reads of the same file (volume); {CEILING_THREADS} threads, in turn with\n"
        "the restores; 'of the ceiling' is the median of the pairs. p99: of "
        f"{size.rounds} sequences,\nof {size.block_rounds} blocks. {os.cpu_count()} cores. The daemon's log is in {folder}.[/]"
    )
    return 0

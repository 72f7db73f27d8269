"""Which copies a region's moves go by: the copy engines, or kernels where those were measured to be better by far.

Copy engines are the default, and all that is used until a shape was measured. Measured is in the background, some milliseconds for each new shape of a region,
when the region is mapped: in each direction, with places on the host and on the GPU.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from offloadd.cuda.copies import CopyEngines
from offloadd.cuda.device import Device
from offloadd.cuda.region import CudaRegion, Indices, Places
from offloadd.cuda.sample import sample_of
from offloadd.cuda.streams import Stream
from offloadd.mover.copy_bench import Case, CopyBench, Move
from offloadd.mover.messages import ChosenMove, CopiesChosen, KernelsFailed
from offloadd.units import format_bytes

if TYPE_CHECKING:
    from offloadd.transfer.kernels.base import DeviceKernels
    from offloadd.transfer.kernels.copies import KernelCopies

Mode = Literal["auto", "engines", "kernels"]

#: Kernels must be so many times as fast as the copy engines. They take the SMs from decode, and without MPS kernels of two processes take turns, so that a
#: decode step waits for up to LAUNCH_S_MAX; a smaller gain is not worth that, nor is it safe from the noise of a measurement of milliseconds.
KERNELS_GAIN_MIN = 1.25

#: Shapes that one mover measures: a node has a few models, and clients may not fill memory with them, nor a GPU's time.
SHAPES_MAX = 64


class RegionCopies:
    """`Copies` of one region, each move as was chosen for it. Any thread may call."""

    def __init__(self, choice: "CopyChoice", region: CudaRegion, sample: CudaRegion | None) -> None:
        """See `CopyChoice.of`."""
        self._choice = choice
        self._region = region
        self._cases = {} if sample is None else {(out, on_device): Case(sample, out, on_device) for out in (False, True) for on_device in (False, True)}

    def gather(self, block_indices: Indices, target: Places, stream: Stream, *, first: int = 0, last: int | None = None) -> None:
        """Out of engine memory; see `Copies`."""
        self._move(True, block_indices, target, stream, first, last)

    def scatter(self, block_indices: Indices, source: Places, stream: Stream, *, first: int = 0, last: int | None = None) -> None:
        """Into engine memory; see `Copies`."""
        self._move(False, block_indices, source, stream, first, last)

    def _move(self, out: bool, block_indices: Indices, places: Places, stream: Stream, first: int, last: int | None) -> None:
        choice, region = self._choice, self._region
        kernels, bytes_per_s = choice.kernels_for(self._cases.get((out, places.on_device)))
        if kernels is not None and kernels.takes(region, len(block_indices), places):
            by_kernels = kernels.gather if out else kernels.scatter
            by_kernels(region, block_indices, places, stream, first=first, last=last, bytes_per_s=bytes_per_s)
        else:
            by_engines = choice.engines.gather if out else choice.engines.scatter
            by_engines(region, block_indices, places, stream, first=first, last=last)


class CopyChoice:
    """All that a mover has measured. Any thread may call."""

    def __init__(
        self,
        *,
        device: Device,
        engines: CopyEngines,
        mode: Mode,
        open_kernels: "Callable[[], DeviceKernels]",
        copying: Callable[[], AbstractContextManager[Stream]],
        tell: Callable[[CopiesChosen | KernelsFailed], None],
    ) -> None:
        """`mode`: "engines" and "kernels" are a choice already. `open_kernels`: compile them, or raise OSError that says why not.

        `copying`: see `CopyBench`. `tell`: the front, from any thread.
        """
        self.engines = engines
        self._device = device
        self._mode = mode
        self._open_kernels = open_kernels
        self._copying = copying
        self._tell = tell
        self._samples: dict[CudaRegion, CudaRegion] = {}
        self._chosen: dict[Case, ChosenMove] = {}
        self._kernels: KernelCopies | None = None
        self._measuring = False
        self._to_measure: queue.SimpleQueue[CudaRegion] = queue.SimpleQueue()
        self._started = threading.Lock()

    def of(self, region: CudaRegion) -> RegionCopies:
        """The copies of a region that was just mapped. Its shape is measured soon, unless it was; what has no sample goes by the copy engines."""
        sample = None if self._mode == "engines" else sample_of(region)
        if sample is None or (sample not in self._samples and len(self._samples) >= SHAPES_MAX):
            return RegionCopies(self, region, None)
        # One object for all regions of a shape, so that a look-up for a slice compares no planes.
        sample = self._samples.setdefault(sample, sample)
        self._to_measure.put(sample)
        if self._started.acquire(blocking=False):
            threading.Thread(target=self._measure_all, name="copy-choice", daemon=True).start()
        return RegionCopies(self, region, sample)

    def kernels_for(self, case: Case | None) -> "tuple[KernelCopies | None, float]":
        """The kernels if such moves go by them, and their measured rate in bytes a second, 0 if there is none. `case`: None for what has no sample."""
        kernels = self._kernels
        if kernels is None or case is None:
            return None, 0.0
        chosen = self._chosen.get(case)
        if self._mode == "kernels":
            return kernels, 0.0 if chosen is None else chosen.kernels_bytes_per_s
        return (kernels, chosen.kernels_bytes_per_s) if chosen is not None and chosen.kernels else (None, 0.0)

    def blame(self, why: str) -> None:
        """The context is lost. If kernels may be why, tell: later movers shall not end the same way, one after the other."""
        if self._mode != "auto":
            return
        chosen = any(chosen.kernels for chosen in list(self._chosen.values()))
        if chosen or self._measuring:
            self._tell(KernelsFailed(why=why, chosen=chosen))

    def _measure_all(self) -> None:
        try:
            # Not before it is needed: the kernels' modules are many.
            from offloadd.transfer.kernels.copies import KernelCopies

            kernels = KernelCopies(self._device, self._open_kernels())
            bench = CopyBench(self._device, self._copying)
        except OSError as error:
            self._mode = "engines"
            self._tell(CopiesChosen(note=f"all copies go by the copy engines: {error}"))
            return
        self._kernels = kernels
        while True:
            sample = self._to_measure.get()
            try:
                moves = [self._measured(Case(sample, out, on_device), kernels, bench) for on_device in (False, True) for out in (True, False)]
                self._tell(CopiesChosen(shape=_shape(sample), moves=tuple(moves)))
            except OSError as error:
                self._tell(CopiesChosen(shape=_shape(sample), note=f"copies could not be measured: {error}"))

    def _measured(self, case: Case, kernels: "KernelCopies", bench: CopyBench) -> ChosenMove:
        """Measure a case, unless it was. Raises OSError when the driver refuses a move."""
        if (known := self._chosen.get(case)) is not None:
            return known
        region, indices, places = bench.move_of(case)
        if not kernels.takes(region, len(indices), places):
            return ChosenMove(name=case.name, kernels=False)
        moves: list[Move] = [kernels.gather if case.out else kernels.scatter]
        if self._mode == "auto":
            moves.append(self.engines.gather if case.out else self.engines.scatter)
        self._measuring = True
        try:
            kernels_bytes_per_s, *others = bench.rates(case, moves)
        finally:
            self._measuring = False
        engines_bytes_per_s = others[0] if others else 0.0
        better = are_better(kernels_bytes_per_s, engines_bytes_per_s)
        chosen = self._chosen[case] = ChosenMove(case.name, better, kernels_bytes_per_s, engines_bytes_per_s)
        return chosen


def are_better(kernels_bytes_per_s: float, engines_bytes_per_s: float) -> bool:
    """Whether kernels that move so fast are worth what they take from decode."""
    return kernels_bytes_per_s >= KERNELS_GAIN_MIN * engines_bytes_per_s


def _shape(sample: CudaRegion) -> str:
    pieces: Counter[int] = Counter()
    for group in sample.groups:
        pieces[group.piece_bytes] += group.plane_count
    return ", ".join(f"{count} pieces of {format_bytes(piece_bytes)}" for piece_bytes, count in sorted(pieces.items()))

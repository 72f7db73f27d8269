"""Gather and scatter by copy engines: the CUDA twin of `offloadd.transfer.gather`, queued on a stream instead of done at once.

Kernels do the same (`offloadd.transfer.kernels.copies`); which of the two a mover takes is `offloadd.mover.copy_choice`.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from offloadd.cuda.batch import BatchCopy
from offloadd.cuda.copy_plan import CopyPlan, Rectangles, plan_copies
from offloadd.cuda.device import Device
from offloadd.cuda.driver import check, load
from offloadd.cuda.region import CudaRegion, Indices, Places
from offloadd.cuda.streams import Stream

#: Rows from which on a rectangle is a 2D copy of its own. Over the stand-in driver, queuing one takes about 1.2 µs and an entry of a batch 0.04 µs; what either
#: costs a copy engine was not measured yet. Too small a number makes many calls for a region of many small groups, too large a one makes long batches of short
#: pieces.
ROWS_MIN = 8


class Copies(Protocol):
    """Copies between engine memory and ours on one device. Any thread may call, each with a stream of its own, and anew when what it queued has ended."""

    def gather(self, region: CudaRegion, block_indices: Indices, target: Places, stream: Stream, *, first: int = 0, last: int | None = None) -> None:
        """Queue copies of payload bytes `first` to `last` (default: all) of each block out of engine memory; byte `first` goes to `target.offsets[i]`.

        Returns when the copies are queued: both sides must stay as they are until the stream has come past. Blocks may not stand twice in a scatter, nor
        places in a gather: copies have no order. Raises ValueError before any byte moves for numbers that are out of range (see `check_move`). CudaError: the
        driver refused a copy; earlier ones of the call may be queued, so synchronize before the memory is used again.
        """

    def scatter(self, region: CudaRegion, block_indices: Indices, source: Places, stream: Stream, *, first: int = 0, last: int | None = None) -> None:
        """Queue copies of payload bytes `first` to `last` (default: all) of each block into engine memory; otherwise as `gather`."""


class CopyEngines:
    """See `Copies`."""

    def __init__(self, *, batch: BatchCopy | None, rows_min: int, pitch_bytes_max: int) -> None:
        """See `of`. `batch`: None on drivers before 12.8; `rows_min` and `pitch_bytes_max` as of `plan_copies`."""
        self._batch = batch
        self._rows_min = rows_min
        self._pitch_bytes_max = pitch_bytes_max

    @classmethod
    def of(cls, device: Device) -> "CopyEngines":
        """As the driver and the device allow."""
        batch = BatchCopy.find()
        # Without batches every single copy is a call, so two rows are worth a rectangle.
        return cls(batch=batch, rows_min=2 if batch is None else ROWS_MIN, pitch_bytes_max=device.pitch_bytes_max)

    def gather(self, region: CudaRegion, block_indices: Indices, target: Places, stream: Stream, *, first: int = 0, last: int | None = None) -> None:
        """See `Copies`."""
        self._queue(
            plan_copies(region, block_indices, target, first, last, rows_min=self._rows_min, pitch_bytes_max=self._pitch_bytes_max), target, stream, out=True
        )

    def scatter(self, region: CudaRegion, block_indices: Indices, source: Places, stream: Stream, *, first: int = 0, last: int | None = None) -> None:
        """See `Copies`."""
        self._queue(
            plan_copies(region, block_indices, source, first, last, rows_min=self._rows_min, pitch_bytes_max=self._pitch_bytes_max), source, stream, out=False
        )

    def _queue(self, plan: CopyPlan, places: Places, stream: Stream, *, out: bool) -> None:
        stream.device.make_current()
        cu = load()
        for copy in _copies_2d(cu, plan.rectangles, places, out):
            check(
                cu.cuMemcpy2DAsync(copy, stream.handle),
                f"queue a copy of {copy.Height} rows of {copy.WidthInBytes} bytes, {copy.srcPitch} to {copy.dstPitch} bytes apart, on {stream.device}",
            )
        targets, sources = (plan.ours, plan.engine) if out else (plan.engine, plan.ours)
        if not len(plan.sizes):
            return
        if self._batch is not None:
            self._batch.copy(targets, sources, plan.sizes, stream)
            return
        for target, source, size_bytes in zip(targets.tolist(), sources.tolist(), plan.sizes.tolist(), strict=True):
            check(cu.cuMemcpyAsync(target, source, size_bytes, stream.handle), f"queue a copy of {size_bytes} bytes on {stream.device}")


def _copies_2d(cu: Any, rectangles: list[Rectangles], places: Places, out: bool) -> Iterator[Any]:
    """One descriptor, filled anew for each copy: the driver reads it within the call, and making one costs more than the call."""
    copy = cu.CUDA_MEMCPY2D()
    engine_side, our_side = ("src", "dst") if out else ("dst", "src")
    device = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    setattr(copy, f"{engine_side}MemoryType", device)
    setattr(copy, f"{our_side}MemoryType", device if places.on_device else cu.CUmemorytype.CU_MEMORYTYPE_HOST)
    engine_address, our_address = f"{engine_side}Device", f"{our_side}Device" if places.on_device else f"{our_side}Host"
    for some in rectangles:
        setattr(copy, f"{engine_side}Pitch", some.engine_pitch_bytes)
        setattr(copy, f"{our_side}Pitch", some.our_pitch_bytes)
        copy.WidthInBytes, copy.Height = some.row_bytes, some.row_count
        for engine, ours in zip(some.engine.tolist(), some.ours.tolist(), strict=True):
            setattr(copy, engine_address, engine)
            setattr(copy, our_address, ours)
            yield copy

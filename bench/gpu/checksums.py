"""CRC32C by kernels over blocks that lie in GPU memory, and the one checksum of all of them that follows."""

import contextlib
import time
from functools import reduce

import numpy as np

from bench.gpu.device import Gpu, Timed
from bench.gpu.figures import Figures
from bench.support.report import Target
from bench.support.stats import Paired, Summary
from bench.support.workload import Blocks
from offloadd.tiers.format import slot_bytes_for
from offloadd.transfer.checksum import crc32c
from offloadd.transfer.combine import combine
from offloadd.transfer.kernels.base import DeviceKernels, Slots
from offloadd.units import SECTOR_BYTES

#: What the design counts on.
GB_PER_S_MIN = 200.0


def checksums(figures: Figures, gpu: Gpu, work: Blocks, kernels: DeviceKernels) -> None:
    """CRC32C of all blocks in their slots, and of the blocks as one run of bytes."""
    count, slot_bytes = work.block_count, slot_bytes_for(work.block_bytes)
    staged_bytes = np.random.default_rng(9).integers(0, 256, (count, slot_bytes), dtype=np.uint8)
    payloads = staged_bytes[:, SECTOR_BYTES : SECTOR_BYTES + work.block_bytes]
    expected = np.array([crc32c(np.ascontiguousarray(payload)) for payload in payloads], dtype=np.uint32)
    with contextlib.ExitStack() as held:
        staged, lengths = gpu.upload(staged_bytes), gpu.upload(np.full(count, work.block_bytes, dtype=np.uint64))
        crcs, copied = gpu.allocate(4 * count), gpu.allocate(work.payload_bytes)
        for memory in (staged, lengths, crcs, copied):
            held.callback(memory.close)
        slots = Slots(staged.address, slot_bytes, SECTOR_BYTES)
        found = np.zeros(count, dtype=np.uint32)

        def kernel() -> None:
            kernels.checksums(slots, count, lengths.address, work.block_bytes, crcs.address, stream=gpu.handle)

        def plain() -> None:
            gpu.queue_copy(copied.address, staged.address, work.payload_bytes)

        def as_one() -> tuple[float, int]:
            start = time.perf_counter()
            gpu.time(kernel)
            gpu.get(crcs.address, found)
            whole = reduce(lambda one, other: combine(one, other, work.block_bytes), found.tolist())
            return time.perf_counter() - start, whole

        _, whole = as_one()
        if (found != expected).any() or whole != crc32c(np.ascontiguousarray(payloads)):
            raise RuntimeError(f"{int((found != expected).sum())} of {count} checksums by the kernel differ from those by the CPU")
        calls, plain_calls = gpu.calls_for(kernel), gpu.calls_for(plain)
        plains: list[Timed] = []
        kernel_times: list[Timed] = []
        wholes: list[float] = []
        for _ in range(work.round_count * work.start_count):
            plains.append(gpu.time(plain, plain_calls))
            kernel_times.append(gpu.time(kernel, calls))
            wholes.append(as_one()[0])
    seconds, ceiling = [one.seconds for one in kernel_times], [one.seconds for one in plains]
    way = "kernels on the GPU; equal to the CPU's checksums"
    for name, series, target in (
        ("CRC32C of each block by kernels", seconds, Target(GB_PER_S_MIN)),
        ("CRC32C of all as one: kernels, fetched, combined on the host", wholes, None),
    ):
        pairs = Paired.of(ceiling, series)
        figures.add(
            f"{work.name}: {name}",
            work.payload_bytes / Summary.of(series).median / 1e9,
            "GB/s",
            way=way,
            ceiling=work.payload_bytes / Summary.of(ceiling).median / 1e9,
            ratio=pairs.ratio,
            target=target,
            detail={"ceiling": "one device-to-device copy, which reads as much and writes as much", **Summary.of(series).detail(1e3, "ms_"), **pairs.detail},
        )

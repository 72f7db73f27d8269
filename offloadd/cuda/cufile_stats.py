"""Which way bytes went between GPU memory and a volume: cuFile's and KvikIO's own counts, and what follows from two readings of them."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from offloadd.model.enums import Way

GPUS_MAX = 16
_LEVEL_PER_GPU = 3
_COUNT = ctypes.c_uint64


class PerGpuStats(ctypes.Structure):
    """CUfilePerGpuStats_t of cufile.h 1.20, field by field."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("read_bytes", _COUNT),
        ("read_bw_bytes_per_sec", _COUNT),
        ("read_utilization", _COUNT),
        ("read_duration_us", _COUNT),
        ("n_total_reads", _COUNT),
        ("n_p2p_reads", _COUNT),
        ("n_nvfs_reads", _COUNT),
        ("n_posix_reads", _COUNT),
        ("n_unaligned_reads", _COUNT),
        ("n_dr_reads", _COUNT),
        ("n_sparse_regions", _COUNT),
        ("n_inline_regions", _COUNT),
        ("n_reads_err", _COUNT),
        ("writes_bytes", _COUNT),
        ("write_bw_bytes_per_sec", _COUNT),
        ("write_utilization", _COUNT),
        ("write_duration_us", _COUNT),
        ("n_total_writes", _COUNT),
        ("n_p2p_writes", _COUNT),
        ("n_nvfs_writes", _COUNT),
        ("n_posix_writes", _COUNT),
        ("n_unaligned_writes", _COUNT),
        ("n_dr_writes", _COUNT),
        ("n_writes_err", _COUNT),
        ("n_mmap", _COUNT),
        ("n_mmap_ok", _COUNT),
        ("n_mmap_err", _COUNT),
        ("n_mmap_free", _COUNT),
        ("reg_bytes", _COUNT),
    )


class StatsLevel3(ctypes.Structure):
    """CUfileStatsLevel3_t. What belongs to no GPU (level 2, 1136 bytes) is not told apart here."""

    _fields_ = (("detailed", _COUNT * 142), ("num_gpus", ctypes.c_uint32), ("per_gpu_stats", PerGpuStats * GPUS_MAX))


class _Status(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))


class StatsUnavailable(Exception):
    """The libraries give no counts, so no way can be proved."""


@dataclass(frozen=True, slots=True)
class IoCounts:
    """I/Os of one direction that have ended, by the way they took; `failed`: those that cuFile gave an error for."""

    nvfs: int = 0
    p2p: int = 0
    posix: int = 0
    failed: int = 0

    def __add__(self, other: "IoCounts") -> "IoCounts":
        return IoCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __sub__(self, other: "IoCounts") -> "IoCounts":
        return IoCounts(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))

    @property
    def done(self) -> int:
        """Those that did not fail."""
        return self.nvfs + self.p2p + self.posix


@dataclass(frozen=True, slots=True)
class GpuCounts:
    """What cuFile counted for one GPU in this process. `uuid`: as `Device.uuid`."""

    uuid: str
    reads: IoCounts
    writes: IoCounts


class CufileStats:
    """cuFile's statistics of this process. Any thread may read."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """See `start`."""
        self._library = library

    @classmethod
    def start(cls) -> "CufileStats":
        """Begin to count. The driver of cuFile must be open: so the counts are of the very library that KvikIO uses. Raises StatsUnavailable."""
        try:
            library = ctypes.CDLL("libcufile.so.0", mode=os.RTLD_NOLOAD)
        except OSError as error:
            raise StatsUnavailable(f"libcufile.so.0 is not loaded in this process ({error})") from error
        stats = cls(library)
        stats._call("cuFileSetStatsLevel", _LEVEL_PER_GPU)
        stats._call("cuFileStatsStart")
        return stats

    def read(self) -> tuple[GpuCounts, ...]:
        """The counts so far, of each GPU that cuFile knows. Takes some microseconds. Raises StatsUnavailable."""
        raw = StatsLevel3()
        self._call("cuFileGetStatsL3", ctypes.byref(raw))
        if raw.num_gpus > GPUS_MAX:
            raise StatsUnavailable(f"cuFile counts for {raw.num_gpus} GPUs; at most {GPUS_MAX} fit the layout that is known here")
        return tuple(_gpu_counts(raw.per_gpu_stats[number]) for number in range(raw.num_gpus))

    def stop(self) -> None:
        """Count no more. Raises StatsUnavailable."""
        self._call("cuFileStatsStop")

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise StatsUnavailable(f"libcufile has no {name}: it is too old to tell which way bytes went (1.20 does)") from error
        function.restype = _Status
        status = function(*arguments)
        if status.err:
            raise StatsUnavailable(f"{name} failed with cuFile error {status.err}")


def _gpu_counts(raw: PerGpuStats) -> GpuCounts:
    digits = bytes(raw.uuid).hex()
    return GpuCounts(
        uuid=f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}",
        reads=IoCounts(raw.n_nvfs_reads, raw.n_p2p_reads, raw.n_posix_reads, raw.n_reads_err),
        writes=IoCounts(raw.n_nvfs_writes, raw.n_p2p_writes, raw.n_posix_writes, raw.n_writes_err),
    )


@dataclass(frozen=True, slots=True)
class PathCounts:
    """I/Os of this process that have ended: by cuFile's counts, and `kvikio_posix` that KvikIO did without cuFile (of both directions, failed ones too)."""

    reads: IoCounts = IoCounts()
    writes: IoCounts = IoCounts()
    kvikio_posix: int = 0

    def __sub__(self, before: "PathCounts") -> "PathCounts":
        return PathCounts(self.reads - before.reads, self.writes - before.writes, self.kvikio_posix - before.kvikio_posix)

    def count(self, way: Way) -> int:
        """I/Os that went that way."""
        both = self.reads + self.writes
        counts = {Way.GDS_NVFS: both.nvfs, Way.GDS_P2P: both.p2p, Way.CUFILE_POSIX: both.posix, Way.KVIKIO_POSIX: self.kvikio_posix}
        return counts.get(way, 0)

    @property
    def way(self) -> Way:
        """The worst way that any of them went, UNPROVEN if none was counted. See `Proof` for what it says about a single transfer."""
        return next((way for way in reversed(Way) if self.count(way)), Way.UNPROVEN)


class Proof:
    """Proof of the way that transfers went, from counts of the whole process. Any thread may ask.

    cuFile counts I/Os; it does not say which. So a difference of two snapshots covers every I/O, of all threads and volumes, that ended between them, and one
    transfer can be named only by what holds for all: if `since(before).way` is W, then each transfer that began after `before` was taken and ended before now
    went by W or a better way. Claimed is thus never better than true. With several transfers in flight one that bounced makes all that overlap it look bounced;
    which of them it was can't be told.
    """

    def __init__(self, stats: CufileStats, monitor: Any, close: Callable[[], None]) -> None:
        """See `start`."""
        self._stats = stats
        self._monitor = monitor
        self._close = close

    @classmethod
    def start(cls) -> "Proof":
        """Begin to count; as of `CufileStats.start`. Raises StatsUnavailable."""
        import kvikio

        if not hasattr(kvikio, "SummaryMonitor"):
            raise StatsUnavailable(f"KvikIO {kvikio.__version__} has no SummaryMonitor, so what it does without cuFile can't be seen; 26.10 has it")
        stats = CufileStats.start()
        monitor = kvikio.SummaryMonitor()

        def close() -> None:
            monitor.stop()
            stats.stop()

        return cls(stats, monitor, close)

    def snapshot(self) -> PathCounts:
        """What has ended until now. Raises StatsUnavailable."""
        gpus = self._stats.read()
        backends = self._monitor.get().by_backend
        return PathCounts(
            reads=sum((gpu.reads for gpu in gpus), IoCounts()),
            writes=sum((gpu.writes for gpu in gpus), IoCounts()),
            # "GDS" there means no more than that the I/O was handed to cuFile.
            kvikio_posix=sum(totals["num_ops"] for name, totals in backends.items() if name != "GDS"),
        )

    def since(self, before: PathCounts) -> PathCounts:
        """What has ended since a snapshot. Raises StatsUnavailable."""
        return self.snapshot() - before

    def close(self) -> None:
        """Count no more. Raises StatsUnavailable."""
        self._close()

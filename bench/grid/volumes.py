"""The volumes of one configuration: files of the benchmark's own, or those that the user gave, which are never formatted."""

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offloadd.errors import InvalidRequest, VolumeBusy, VolumeNotEmpty
from offloadd.tiers.format import Geometry, geometry_of, slot_count_for
from offloadd.tiers.slab_header import read_slab_headers
from offloadd.tiers.superblock import read_superblock
from offloadd.tiers.volume_file import format_volume
from offloadd.tiers.volume_io import open_read_only
from offloadd.units import MIB, SECTOR_BYTES

#: Namespaces of one run: a region of each model and GPU.
NAMESPACE_COUNT = 1024
#: Share of a file system's free room that files of the benchmark may take.
ROOM_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class GridVolume:
    """One volume. `scratch`: a file beside it for the ceiling of writes, removed at the end; None for a device, which only its daemon may write to."""

    path: Path
    geometry: Geometry
    scratch: Path | None

    def slots(self, slot_bytes: int) -> int:
        """Slots of this size that it has room for."""
        return self.geometry.slab_count * slot_count_for(self.geometry.slab_bytes, slot_bytes)

    def written_slots(self, slot_bytes: int, count: int) -> list[int]:
        """Offsets of the first `count` slots, or as many as there are, in slabs that a daemon has cut into slots of this size: what a restore reads."""
        fd, _ = open_read_only(str(self.path))
        try:
            headers = read_slab_headers(fd, self.geometry, range(self.geometry.slab_count), threads=4)
        finally:
            os.close(fd)
        found: list[int] = []
        for header in headers:
            if header is not None and header.cut and header.slot_bytes == slot_bytes:
                found += [self.geometry.slot_offset(header.slab, slot, slot_bytes) for slot in range(min(header.slot_count, count - len(found)))]
        return found


def refuse_given(path: Path) -> None:
    """Raise unless nothing is there yet or it is a volume without a cut slab: blocks of the benchmark would push others out.

    VolumeForeign and VolumeDamaged: no volume. VolumeBusy: a daemon has it open. VolumeNotEmpty, InvalidRequest: no directory for a new file. OSError.
    """
    if not os.path.lexists(path):
        if not path.parent.is_dir():
            raise InvalidRequest(f"{path.parent} is no directory, so no volume can be made in it")
        return
    fd, locked = open_read_only(str(path))
    try:
        if locked:
            raise VolumeBusy(f"{path} is open in another process")
        geometry = geometry_of(read_superblock(fd, str(path)).record)
        cut_count = sum(header is None or header.cut for header in read_slab_headers(fd, geometry, range(geometry.slab_count), threads=4))
    finally:
        os.close(fd)
    if cut_count:
        raise VolumeNotEmpty(
            f"{path} is a volume with {cut_count} of {geometry.slab_count} slabs cut, whose blocks the benchmark's would push out; if nothing there is needed: "
            f"offloadd volume format {path} --force-blocks"
        )


@contextmanager
def opened(paths: Sequence[Path], directory: Path, *, count: int, volume_bytes: int, slab_bytes: int) -> Iterator[list[GridVolume]]:
    """The first `count` of `paths`, or files in `directory`. New ones get `volume_bytes` or what there is room for, and are removed at the end.

    Raises InvalidRequest where there is no room for a single slab.
    """
    chosen = list(paths[:count]) or [directory / f"grid-{number}.volume" for number in range(count)]
    ours: list[Path] = []
    found: list[GridVolume] = []
    try:
        for path in chosen:
            if os.path.lexists(path):
                geometry = _geometry(path)
            else:
                size = min(volume_bytes, room_for_new(path, chosen))
                if size < slab_bytes + 4 * MIB:
                    raise InvalidRequest(f"{path.parent} has room for {size} bytes; one slab of {slab_bytes} bytes is the least")
                geometry = format_volume(str(path), volume_bytes=size // SECTOR_BYTES * SECTOR_BYTES, slab_bytes=slab_bytes, namespace_count=NAMESPACE_COUNT)
                ours.append(path)
            found.append(GridVolume(path, geometry, None if stat.S_ISBLK(path.stat().st_mode) else path.with_name(f"{path.name}.ceiling")))
        yield found
    finally:
        for path in ours:
            path.unlink(missing_ok=True)


def room_for_new(path: Path, others: Sequence[Path]) -> int:
    """Bytes that a new file may take: an even share of what its file system has free, beside the other new files there and one to write a ceiling into."""
    device = path.parent.stat().st_dev
    sharing = sum(not os.path.lexists(other) and other.parent.stat().st_dev == device for other in others)
    return int(shutil.disk_usage(path.parent).free * ROOM_SHARE / (2 * max(1, sharing)))


def _geometry(path: Path) -> Geometry:
    fd, _ = open_read_only(str(path))
    try:
        return geometry_of(read_superblock(fd, str(path)).record)
    finally:
        os.close(fd)

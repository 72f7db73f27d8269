"""Devices: the movers of the node, and the lanes that each of them serves."""

from dataclasses import dataclass, field

from offloadd.errors import PathUnavailable
from offloadd.model.enums import Path
from offloadd.offload.lanes import Lane
from offloadd.offload.mover_link import MoverLink

#: Name of the device whose blocks lie in host memory. There always is one: it moves blocks between the tiers, too.
HOST = "host"


@dataclass(slots=True)
class Device:
    """One mover and its lanes. `volume_paths`: the ways between its memory and volumes, the one that AUTO takes first."""

    name: str
    mover: MoverLink
    volume_paths: tuple[Path, ...]
    arena_lane: Lane | None = None
    #: By the volume's ordinal and the path.
    volume_lanes: dict[tuple[int, Path], Lane] = field(default_factory=dict)

    def volume_path(self, path: Path) -> Path:
        """The way to volumes that a request with this path takes."""
        return path if path in self.volume_paths else self.volume_paths[0]

    def volume_lane(self, volume: int, path: Path = Path.AUTO) -> Lane | None:
        """The lane to a volume by this path; None while the volume is not served."""
        return self.volume_lanes.get((volume, self.volume_path(path)))

    def lanes(self) -> list[Lane]:
        """All lanes."""
        return [*([self.arena_lane] if self.arena_lane is not None else []), *self.volume_lanes.values()]

    def refuse_path(self, path: Path, *, require: bool, allowed: tuple[Path, ...], what: str) -> Path:
        """The path to take: `path` if it is one of those allowed and this device has it; else AUTO, or `PathUnavailable` when it is required."""
        mine = tuple(one for one in allowed if one == Path.DDR or one in self.volume_paths)
        if path == Path.AUTO or path in mine:
            return path
        if require:
            why = f"{what} of device {self.name} goes by {', '.join(one.name.lower() for one in mine) or 'no path'}"
            if path in (Path.GDS, Path.BOUNCE) and self.name == HOST:
                why = f"device {self.name} is no CUDA device"
            raise PathUnavailable(f"path {path.name.lower()} is not available: {why}")
        return Path.AUTO

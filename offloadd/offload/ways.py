"""Which ways there are between devices and tiers, and why not: what `GetCapabilities`, the status and the metrics tell."""

from dataclasses import dataclass

from offloadd.model.enums import Path, Tier
from offloadd.offload.bandwidth import Route
from offloadd.offload.core import Core
from offloadd.offload.devices import HOST, Device
from offloadd.offload.measure import Measurer


@dataclass(frozen=True, slots=True)
class VolumeRoute:
    """A route between a GPU and one volume. `note`: why it is not served, or what a measurement did not go well by."""

    route: Route
    volume: str
    available: bool
    note: str


@dataclass(frozen=True, slots=True)
class WayNote:
    """One (device, tier, path): whether requests may take it, and why not."""

    device: str
    tier: Tier
    path: Path
    available: bool
    note: str
    #: Of a GPU's way to volumes.
    volumes: tuple[VolumeRoute, ...] = ()


class Ways:
    """Looks; changes nothing. Event-loop owned."""

    def __init__(self, core: Core, measurer: Measurer) -> None:
        self._core = core
        self._measurer = measurer

    def notes(self) -> list[WayNote]:
        """Every way with whether it works on this node, and why not."""
        volume = bool(self._core.serving_volumes())
        no_volume = "" if volume else "no volume is serving"
        arena = self._core.host.arena_lane is not None
        no_arena = "" if arena else "arena.arena_bytes is 0"
        notes = [
            WayNote(HOST, Tier.ARENA, Path.DDR, arena, no_arena),
            WayNote(HOST, Tier.VOLUME, Path.HOST, volume, no_volume),
        ]
        gpus = [device for device in self._core.devices.values() if device.is_gpu]
        for device in gpus:
            usable = not device.note
            notes += [
                WayNote(device.name, Tier.ARENA, Path.DDR, usable and arena, device.note or no_arena),
            ]
            for path in device.volume_paths:
                served = usable and volume and device.has_path(path)
                why = device.note or no_volume or device.refusal(path)
                notes.append(WayNote(device.name, Tier.VOLUME, path, served, why, self._volume_routes(device, path)))
        if not gpus:
            notes += [WayNote("cuda", Tier.VOLUME, path, False, "no CUDA device") for path in (Path.BOUNCE, Path.GDS)]
        return notes

    def volume_routes(self) -> list[VolumeRoute]:
        """Every route between a GPU and a volume that is open."""
        gpus = [device for device in self._core.devices.values() if device.is_gpu]
        return [route for device in gpus for path in device.volume_paths for route in self._volume_routes(device, path)]

    def _volume_routes(self, device: Device, path: Path) -> tuple[VolumeRoute, ...]:
        routes = []
        for volume in self._core.volumes:
            if volume.opened is None:
                continue
            route = Route(device.name, volume.ordinal, path)
            refusal = device.refusals.get((volume.ordinal, path), "")
            note = device.note or refusal or self._core.bandwidths.failure(route) or self._measurer.note(device.name, volume.ordinal)
            served = not device.note and (volume.ordinal, path) in device.volume_lanes
            routes.append(VolumeRoute(route, volume.options.path, served, note))
        return tuple(routes)

"""Devices: the movers of the node, and the lanes that each of them serves."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from offloadd.catalog.victims import ANY_NODE
from offloadd.errors import InvalidRequest, PathUnavailable
from offloadd.model.device_event import EventName
from offloadd.model.enums import Path
from offloadd.offload.lanes import Lane
from offloadd.offload.mover_link import MoverLink
from offloadd.tiers.format import LONG_SLOT_BYTES

#: Name of the device whose blocks lie in host memory. There always is one: it moves blocks between the tiers, too.
HOST = "host"


@dataclass(slots=True)
class Device:
    """One mover and its lanes. `volume_paths`: the ways that there may be between its memory and volumes.

    A GPU is known by the name that the configuration gives it (`cuda:N` or its UUID) and by its UUID.
    """

    name: str
    mover: MoverLink
    volume_paths: tuple[Path, ...]
    arena_lane: Lane | None = None
    #: Those that are served, by the volume's ordinal and the path.
    volume_lanes: dict[tuple[int, Path], Lane] = field(default_factory=dict)
    #: Why a way to a volume is not served.
    refusals: dict[tuple[int, Path], str] = field(default_factory=dict)

    @property
    def uuid(self) -> str:
        """Of a GPU, once its mover has told it; else empty."""
        hello = self.mover.hello
        return hello.uuid if hello is not None else ""

    @property
    def memory_node(self) -> int:
        """The NUMA node whose memory is nearest to it; ANY_NODE while that is not known, and where there is nothing to choose."""
        hello = self.mover.hello
        return hello.memory_node if hello is not None else ANY_NODE

    @property
    def is_gpu(self) -> bool:
        """Whether its regions are CUDA memory."""
        return self.name != HOST

    @property
    def note(self) -> str:
        """Why the device can't be used; empty if it can."""
        hello = self.mover.hello
        return hello.note if hello is not None else "its mover is starting"

    def refuse_twin(self, others: Iterable["Device"], uuid: str) -> str:
        """Why this device may not be served when its GPU has this UUID: another one has it already. Two movers would each hold a context and staging slots of
        one GPU, and a region would be known to one of them alone. Empty if there is none."""
        twin = next((one for one in others if one is not self and uuid and one.uuid == uuid), None)
        if twin is None:
            return ""
        return f"{self.name} is the same GPU as {twin.name} ({uuid}), which is served already; gpu.devices names it twice: take one of the two out"

    def volume_lane(self, volume: int, path: Path = Path.AUTO, slot_bytes: int = 0) -> Lane | None:
        """The lane to a volume by this path if it is served, else by another; None while the volume is not served at all.

        Slots that are longer than a staging slot do not go by `gds`.
        """
        others = [one for one in self.volume_paths if one != path]
        for one in (path, *others):
            lane = self.volume_lanes.get((volume, one))
            if lane is not None and (one != Path.GDS or slot_bytes <= LONG_SLOT_BYTES):
                return lane
        return None

    def has_path(self, path: Path) -> bool:
        """Whether some volume is served by this path."""
        return any(one == path for _, one in self.volume_lanes)

    def refusal(self, path: Path) -> str:
        """Why no volume is served by this path; empty if one is, or if there is no volume."""
        return "" if self.has_path(path) else next((why for (_, one), why in self.refusals.items() if one == path), "")

    def settled(self, volume: int, lane: Lane, why: str) -> None:
        """The mover serves a lane to a volume (`why` empty), or does not."""
        key = (volume, lane.path)
        if why:
            self.volume_lanes.pop(key, None)
            self.refusals[key] = why
            # Jobs that waited for a mover that was away.
            lane.disconnect()
        else:
            self.volume_lanes[key] = lane
            self.refusals.pop(key, None)

    def refuse(self, volume: int, path: Path, why: str) -> None:
        """No new job goes by this way, until the mover is started again; those that it has end."""
        self.volume_lanes.pop((volume, path), None)
        self.refusals[volume, path] = why

    def lanes(self) -> list[Lane]:
        """All lanes."""
        return [*([self.arena_lane] if self.arena_lane is not None else []), *self.volume_lanes.values()]

    def refuse_event(self, event: EventName, field_name: str) -> None:
        """Raise `InvalidRequest` for a CUDA event or flag that copies on the host should wait for."""
        if event and not self.is_gpu:
            raise InvalidRequest(f"{field_name} is for regions on a GPU; this one is on device {self.name}")

    def refuse_path(self, path: Path, *, require: bool, allowed: tuple[Path, ...], what: str, slot_bytes: int) -> Path:
        """The path to take: `path` if it is one of those allowed and this device has it; else AUTO, or `PathUnavailable` when it is required."""
        if path == Path.GDS and slot_bytes > LONG_SLOT_BYTES:
            if require:
                raise PathUnavailable(f"path gds is not available for blocks whose slots have {slot_bytes} bytes; {LONG_SLOT_BYTES} is the most")
            return Path.AUTO
        mine = tuple(one for one in allowed if one == Path.DDR or self.has_path(one))
        if path == Path.AUTO or path in mine:
            return path
        if require:
            why = f"{what} of device {self.name} goes by {', '.join(one.name.lower() for one in mine) or 'no path'}"
            if path in (Path.GDS, Path.BOUNCE) and not self.is_gpu:
                why = f"device {self.name} is no CUDA device"
            elif refusal := self.refusal(path):
                why = refusal
            raise PathUnavailable(f"path {path.name.lower()} is not available: {why}")
        return Path.AUTO

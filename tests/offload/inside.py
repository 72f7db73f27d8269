"""The front and the host's mover in one process, over a real file: a test holds the mover's I/O and copies, and no process has to be waited for."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.support.daemon import make_config
from bench.support.fakes import NONCE, add_volume, grant
from offloadd import clock
from offloadd.catalog.index import keys_array
from offloadd.daemon.app import settings_of
from offloadd.ipc.channel import AsyncChannel, Channel, socket_pair
from offloadd.memory.memfd import create_sealed, map_shared
from offloadd.model.namespace import Namespace
from offloadd.model.region import Layout, Plane
from offloadd.model.requests import BlockBatch
from offloadd.mover import slot_io
from offloadd.mover.device import HostDevice
from offloadd.mover.main import Mover
from offloadd.mover.messages import Control, ControlAnswer
from offloadd.offload.mover_link import MoverLink
from offloadd.offload.namespaces import NamespaceEntry
from offloadd.offload.regions import Region
from offloadd.offload.service import Offload
from offloadd.offload.sessions import Session
from offloadd.offload.volume_health import HealthOptions, VolumeHealth
from offloadd.units import MIB

from ..mover.mover_harness import ANSWER_TIMEOUT_S, UUID, VolumeFile
from .test_moves_in_order import Quiet

PAYLOAD_BYTES = 20000
NAMESPACE = Namespace(tenant="uid:1", model="m", weights="w")


class MoverThread:
    """Stands where a `MoverLink` has its process: the mover's own code, on threads of this one."""

    name, pid, restart_count, arguments = "mover host", 0, 0, ()

    def __init__(self, link: MoverLink) -> None:
        self._link = link
        self._channel: AsyncChannel[ControlAnswer] | None = None
        self.mover: Mover | None = None

    @property
    def alive(self) -> bool:
        return self._channel is not None

    def start(self) -> None:
        ours, theirs = socket_pair()
        self.mover = Mover(Channel(theirs, Control), HostDevice())
        threading.Thread(target=self.mover.serve, daemon=True).start()
        self._channel = AsyncChannel(ours, ControlAnswer, on_message=self._link._on_message, on_close=lambda: None)
        self._link._tell()

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        assert self._channel is not None
        self._channel.send(message, fds)

    def after_sent(self, callback: Callable[[], None]) -> None:
        assert self._channel is not None
        self._channel.after_sent(callback)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


class Volume:
    """Stands where the front has a `VolumeLink`: a real file, and a keeper that grants every wish at once."""

    serving, scanning, slab_failures, scan_until_s, failure, state = True, False, 0, 0.0, "", "serving"

    def __init__(self, offload: Offload, file: VolumeFile) -> None:
        self.file = file
        self.pool = add_volume(offload.core.catalog, slab_count=file.slab_count, slab_bytes=file.slab_bytes)
        self.ordinal = offload.core.catalog.volumes.index(self.pool)
        self.options = SimpleNamespace(path=str(file.path), io_threads=2, evict_bytes_per_s_max=0, write_bytes_per_day_max=0)
        self.opened = SimpleNamespace(volume_uuid=UUID, slab_bytes=file.slab_bytes, data_offset=file.data_offset, scratch_offset=0, scratch_bytes=0)
        self.slabs_changed = asyncio.Event()
        self.health = VolumeHealth(HealthOptions(), lambda: None)

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(self.file.fds)

    async def add_namespace(self, entry: NamespaceEntry) -> None:
        entry.on_volumes[self.ordinal] = (5, 6)

    def nonce(self, slab: int) -> bytes:
        return NONCE

    def grant_wishes(self) -> None:
        if grant(self.pool):
            changed, self.slabs_changed = self.slabs_changed, asyncio.Event()
            changed.set()


class InsideOffload(Offload):
    """Its movers are threads."""

    def _mover(self, device: str) -> MoverLink:
        link = super()._mover(device)
        link.process = MoverThread(link)  # type: ignore[assignment]
        return link


class Engine:
    """One session with one region of `block_count` blocks. Its memory outlives it, as a test looks at it afterwards."""

    def __init__(self, offload: Offload, block_count: int, instance: str = "engine") -> None:
        self._offload = offload
        self.session: Session = offload.sessions.create(tenant="uid:1", instance=instance, uid=1, pid=1)
        size_bytes = block_count * PAYLOAD_BYTES
        fd = create_sealed("engine", size_bytes)
        self._map = map_shared(fd, size_bytes)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8).reshape(block_count, PAYLOAD_BYTES)
        self.memory_id = offload.sessions.attach_memory(self.session, fd, size_bytes)
        self.block_count = block_count

    async def register(self) -> "Engine":
        layout = Layout(self.block_count, (Plane(0, 0, PAYLOAD_BYTES, PAYLOAD_BYTES),))
        self.region: Region = await self._offload.register_region(
            self.session,
            device="host",
            layout=layout,
            memories=(self.memory_id,),
            cache_group=0,
            namespace=NAMESPACE,
            deadline_s=clock.monotonic_s() + ANSWER_TIMEOUT_S,
        )
        return self

    async def unregister(self) -> None:
        await self._offload.unregister_region(self.session, self.region.region_id, clock.monotonic_s() + ANSWER_TIMEOUT_S)

    def batch(self, indices: "np.ndarray[Any, Any]", names: list[str]) -> BlockBatch:
        keys = keys_array(self.region.keys.keys([name.encode() for name in names]))
        return BlockBatch(self.region.number, indices.astype(np.uint32), keys, np.arange(len(names), dtype=np.uint32))


class Hold:
    """Holds the mover's reads and writes of volumes, or other calls, from `close` to `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self._open.set()
        #: Set once a call is held.
        self.held = asyncio.Event()
        #: Whether a call with these arguments is to be held.
        self.holds: Callable[..., bool] = lambda *_: True

    def close(self) -> None:
        self.held.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def hold_io(self, look: Callable[..., None] = lambda *_: None) -> None:
        """Hold every read and write of a volume; `look(fd, buffers, offset)` before each write."""
        self.put_before(slot_io, "read")
        self.put_before(slot_io, "write", look)

    def put_before(self, module: Any, name: str, look: Callable[..., None] = lambda *_: None) -> None:
        """Hold calls of this function before they begin; then `look` at what they are called with."""
        real = getattr(module, name)

        def held(*arguments: Any, **options: Any) -> Any:
            if not self._open.is_set() and self.holds(*arguments):
                self._loop.call_soon_threadsafe(self.held.set)
                assert self._open.wait(ANSWER_TIMEOUT_S)
            look(*arguments)
            return real(*arguments, **options)

        self._monkeypatch.setattr(module, name, held)


async def make_inside(tmp_path: Path, *, volume_count: int = 1) -> tuple[InsideOffload, list[Volume]]:
    """A front with volumes and no arena, whose mover runs in this process."""
    settings = dataclasses.replace(settings_of(make_config(tmp_path, index_bytes_max=16 * MIB)), arena_bytes=0, verify_target=0)
    offload = InsideOffload(settings, Quiet())
    offload.core.host.mover.start(None)
    volumes = [Volume(offload, VolumeFile(tmp_path / f"volume {number}", slab_bytes=4 * MIB, slab_count=2).create()) for number in range(volume_count)]
    for volume in volumes:
        offload.core.volumes.append(volume)  # type: ignore[arg-type]
        await offload._serve_volume(volume)  # type: ignore[arg-type]
    await offload.core.host.mover.lanes_ready()
    return offload, volumes


async def close_inside(offload: InsideOffload, volumes: list[Volume]) -> None:
    """End it; nothing of a request is left."""
    await offload.core.idle()
    offload.core.catalog.check()
    assert offload.core.catalog._pins.sum() == 0 and not offload.core.active and not offload.core.in_flight
    offload.announcer.stop()
    for lane in offload.core.lanes():
        lane.disconnect()
    offload.core.host.mover.process.close()  # type: ignore[attr-defined]
    for volume in volumes:
        volume.file.close()

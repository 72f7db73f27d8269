"""Movers are looked after: asked once they have said hello, and replaced in the order that supervision says. The test is the process, and holds the clock."""

import os
import socket
from typing import Any

import pytest

from offloadd import clock
from offloadd.ipc.channel import Channel
from offloadd.model.enums import Path
from offloadd.mover.messages import CloseMemory, Hello, LastOrders, MemoryClosed, Ping, Pong
from offloadd.offload.devices import Device
from offloadd.offload.mover_link import MoverLink
from offloadd.offload.mover_watch import MoverWatch

WEDGED_S = 10.0


class Process:
    """What a `MoverLink` asks of its process, in order."""

    alive, pid = True, 4711

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.last: Channel[CloseMemory] | None = None

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        if isinstance(message, LastOrders):
            self.last = Channel(socket.socket(fileno=os.dup(fds[0])), CloseMemory)
            self.last.sock.settimeout(60)
        if isinstance(message, Ping):
            self.asked.append("ping")

    def after_sent(self, callback: Any) -> None:
        callback()

    def __getattr__(self, name: str) -> Any:
        return lambda: self.asked.append(name)


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1_000_000_000_000
        monkeypatch.setattr(clock, "monotonic_ns", lambda: self.now_ns)
        self.link = MoverLink(device="host", module="none", environment={}, refuse=lambda uuid: "", wedged_s=WEDGED_S)
        self.process = Process()
        self.link.process = self.process  # type: ignore[assignment]
        self.device = Device("host", self.link, (Path.HOST,))
        self.watch = MoverWatch({"host": self.device})
        self.start()

    def start(self) -> None:
        self.link._tell()

    def hello(self) -> None:
        self.link._on_message(Hello(pid=4711, paths=("host",)), [])

    def look_for(self, seconds: float) -> list[str]:
        """What the process was asked meanwhile."""
        self.process.asked.clear()
        for _ in range(int(seconds * 4)):
            self.now_ns += 250_000_000
            self.watch.look(self.device)
        return self.process.asked


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


async def test_a_mover_is_not_asked_before_it_has_said_hello_nor_is_its_successor(scene: Scene) -> None:
    assert scene.look_for(10 * WEDGED_S) == []
    scene.hello()
    assert scene.look_for(1.0) == ["ping"]
    scene.link._on_message(Pong(), [])
    scene.link._on_lost()
    scene.start()
    assert scene.look_for(10 * WEDGED_S) == []


async def test_a_silent_mover_is_looked_at_told_to_close_its_memory_and_superseded_once_it_did(scene: Scene) -> None:
    scene.hello()
    asked = scene.look_for(1 + WEDGED_S)
    assert asked[0] == "ping" and set(asked[1:]) == {"look"}, "a killed one that waits in the kernel is found by looking at it"
    last = scene.process.last
    assert last is not None and last.receive() == (CloseMemory(), [])
    scene.link._on_last(MemoryClosed(), [])
    assert scene.look_for(0.25) == ["supersede"]


async def test_a_silent_mover_that_does_not_close_its_memory_is_killed(scene: Scene) -> None:
    scene.hello()
    asked = scene.look_for(10 * WEDGED_S)
    assert asked.count("kill") == 1 and "supersede" not in asked

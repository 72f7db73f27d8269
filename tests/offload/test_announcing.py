"""Namespaces reach the volumes' tables in the background; a keeper that does not answer costs its own volume only."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from offloadd import clock
from offloadd.errors import Unavailable
from offloadd.model.enums import AckLevel, EvictStatus
from offloadd.model.requests import EvictOptions
from offloadd.offload.announcing import ANNOUNCE_WAIT_S, RETRY_PAUSE_S, Announcer
from offloadd.offload.namespaces import NamespaceEntry, Namespaces

from .held_clock import run_held
from .test_moves_in_order import Front, settle
from .test_stopping import Deaf, SlowVolume


class Volume:
    """A volume whose keeper answers when the test says so."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.options = SimpleNamespace(path=f"v{ordinal}")
        self.answers = asyncio.Event()
        self.dead = False

    async def add_namespace(self, entry: NamespaceEntry) -> None:
        if self.dead:
            raise Unavailable("the keeper died")
        await self.answers.wait()
        entry.on_volumes[self.ordinal] = (1, 1)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Announcer, Any, Any], Awaitable[None]]], None]:
    """Runs a test with two volumes of which only the first answers."""

    def run(test: Callable[[Announcer, Any, Any], Awaitable[None]]) -> None:
        async def work() -> None:
            announcer, good, hung = Announcer(), Volume(0), Volume(1)
            good.answers.set()
            await test(announcer, good, hung)
            announcer.stop()
            await settle()

        run_held(monkeypatch, work())

    return run


def test_a_registration_waits_for_a_late_keeper_once_and_then_no_more(held: Any) -> None:
    async def test(announcer: Announcer, good: Any, hung: Any) -> None:
        namespaces = Namespaces()
        for number, wait_s in enumerate((ANNOUNCE_WAIT_S, 0.0)):
            entry = namespaces.enter(bytes([number]) * 32)
            for volume in (good, hung):
                announcer.announce(volume, entry)
            start_s = clock.monotonic_s()
            await announcer.settle(entry, start_s + 30)
            assert (clock.monotonic_s() - start_s, list(entry.on_volumes)) == (pytest.approx(wait_s), [0])
        hung.answers.set()
        await settle()
        assert all(list(entry.on_volumes) == [0, 1] and not entry.asked for entry in namespaces.entries), "a volume takes what it was told meanwhile"

    held(test)


def test_a_registration_waits_no_longer_than_its_deadline(held: Any) -> None:
    async def test(announcer: Announcer, good: Any, hung: Any) -> None:
        entry = Namespaces().enter(b"n" * 32)
        announcer.announce(hung, entry)
        start_s = clock.monotonic_s()
        await announcer.settle(entry, start_s + 0.25)
        assert clock.monotonic_s() - start_s == pytest.approx(0.25)

    held(test)


def test_a_keeper_that_died_is_asked_again(held: Any) -> None:
    async def test(announcer: Announcer, good: Any, hung: Any) -> None:
        entry, good.dead = Namespaces().enter(b"n" * 32), True
        announcer.announce(good, entry)
        await asyncio.sleep(10 * RETRY_PAUSE_S)
        assert not entry.on_volumes and list(entry.asked) == [0]
        good.dead = False
        await asyncio.sleep(RETRY_PAUSE_S)
        assert list(entry.on_volumes) == [0] and not entry.asked

    held(test)


def test_an_evict_waits_for_its_namespace_on_the_only_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        front = Front(mover=Deaf())  # type: ignore[arg-type]
        volume, entry = SlowVolume(front), front.region.namespace
        entry.on_volumes.clear()
        entry.asked[volume.ordinal] = told = asyncio.Event()
        options = EvictOptions(deadline_s=clock.monotonic_s() + 60, ack=AckLevel.DURABLE)
        evict = asyncio.ensure_future(front.evictor.evict(front.session, [front.batch(0, "ab")], options))
        await settle()
        assert not evict.done() and front.no_job(), "it was refused while the volume was being told of its namespace"
        entry.on_volumes[volume.ordinal] = (1, 1)
        del entry.asked[volume.ordinal]
        told.set()
        front.done(await front.job())
        assert (await evict).status.tolist() == [EvictStatus.STORED] * 2
        front.device.arena_lane.disconnect()  # type: ignore[union-attr]
        front.lane.close()

    run_held(monkeypatch, work())

"""What went wrong at comparable systems, with the mover's I/O or copies held by the test: classes 1, 2, 3, 7, 13 and 14."""

import asyncio
import errno
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offloadd import clock
from offloadd.model.enums import AckLevel, EvictStatus, Reason, RestoreStatus
from offloadd.model.requests import EvictOptions, RestoreOptions
from offloadd.mover import handover, slot_io, volume_work
from offloadd.offload import stopping
from offloadd.tiers.format import slot_bytes_for, slot_count_for

from ..mover.mover_harness import ANSWER_TIMEOUT_S
from .inside import PAYLOAD_BYTES, Engine, Hold, InsideOffload, Volume, close_inside, make_inside
from .test_moves_in_order import settle

#: The engine's for whatever is computed next.
OTHERS = 0x77


@dataclass
class Scene:
    offload: InsideOffload
    volumes: list[Volume]
    engine: Engine

    async def evict(self, first: int, names: list[str], ack: AckLevel = AckLevel.DURABLE) -> Any:
        options = EvictOptions(deadline_s=clock.monotonic_s() + ANSWER_TIMEOUT_S, ack=ack, request_id="r")
        batch = self.engine.batch(np.arange(first, first + len(names)), names)
        return await self.offload.evictor.evict(self.engine.session, [batch], options)

    async def restore(self, first: int, names: list[str], given_s: float = ANSWER_TIMEOUT_S) -> Any:
        batch = self.engine.batch(np.arange(first, first + len(names)), names)
        options = RestoreOptions(deadline_s=clock.monotonic_s() + given_s, request_id="r")
        async for _, _, answer in self.offload.restorer.restore(self.engine.session, [batch], options):
            last = answer
        return last

    async def fence_has_come(self) -> None:
        """From here on the mover waits for the copies that run; what it does not wait for it answers in less than this takes."""
        mover = self.offload.core.host.mover.process.mover  # type: ignore[attr-defined]
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not mover._memories.engine._fenced:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        await settle()

    def cancel(self) -> None:
        assert self.offload.core.cancel(self.engine.session, "r")


@pytest.fixture(params=[1])
async def scene(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    offload, volumes = await make_inside(tmp_path, volume_count=request.param)
    yield Scene(offload, volumes, await Engine(offload, 32).register())
    await close_inside(offload, volumes)


@pytest.fixture
async def hold(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hold]:
    made = Hold(monkeypatch)
    yield made
    # Also after a failure: the scene ends when nothing is held any more.
    made.open()


def _told(answer: Any) -> set[tuple[int, int]]:
    return set(zip(answer.status.tolist(), answer.reason.tolist(), strict=True))


async def test_incident_1_a_cancelled_evict_is_answered_after_the_copy_that_runs(scene: Scene, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "FENCE_WAIT_S", ANSWER_TIMEOUT_S)
    hold.put_before(handover, "gather_blocks")
    hold.close()
    evict = asyncio.ensure_future(scene.evict(0, ["a"]))
    await hold.held.wait()
    scene.cancel()
    await scene.fence_has_come()
    assert not evict.done(), "the engine was told that it may reuse a block that is being read"
    hold.open()
    assert _told(await evict) == {(EvictStatus.FAILED, Reason.CANCELLED)}


async def test_incident_1_a_source_that_may_still_be_read_is_told_as_such(scene: Scene, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "FENCE_WAIT_S", stopping.FENCE_WAIT_S_MIN)
    hold.put_before(handover, "gather_blocks")
    hold.close()
    evict = asyncio.ensure_future(scene.evict(0, ["a"]))
    await hold.held.wait()
    scene.cancel()
    assert _told(await evict) == {(EvictStatus.QUARANTINED, Reason.CANCELLED)}
    # Which ends with the region: this is answered when the copy is over.
    unregister = asyncio.ensure_future(scene.engine.unregister())
    await scene.fence_has_come()
    assert not unregister.done()
    hold.open()
    await unregister


async def test_incident_2_a_destination_that_was_freed_by_an_abort_is_not_written_by_the_late_read(scene: Scene, hold: Hold) -> None:
    names = [str(index) for index in range(8)]
    await scene.evict(0, names)
    hold.hold_io()
    hold.close()
    restore = asyncio.ensure_future(scene.restore(8, names))
    await hold.held.wait()
    scene.cancel()
    assert _told(await restore) == {(RestoreStatus.FAILED, Reason.CANCELLED)}, "the read that hangs holds up no answer"
    scene.engine.bytes[8:16] = OTHERS
    hold.open()
    await scene.offload.core.idle()
    assert (scene.engine.bytes[8:16] == OTHERS).all()


def hold_first_io(hold: Hold) -> None:
    """The next I/O is held, and no other."""
    arrivals = itertools.count()
    hold.hold_io()
    hold.holds = lambda *_: next(arrivals) == 0
    hold.close()


def note_returns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a read of a volume that has ended."""
    returned: list[int] = []
    real = slot_io.read

    def read(*arguments: Any) -> int:
        moved = real(*arguments)
        returned.append(moved)
        return moved

    monkeypatch.setattr(slot_io, "read", read)
    return returned


async def test_incident_3_a_staging_slot_is_not_used_again_while_its_write_still_runs(scene: Scene, hold: Hold) -> None:
    others = [f"other {number}" for number in range(6)]
    scene.engine.bytes[:8] = np.arange(8, dtype=np.uint8)[:, None]
    hold_first_io(hold)
    # The engine has it copied, and may reuse its block; the bytes wait in the staging slot for their write.
    assert _told(await scene.evict(0, ["a"], AckLevel.COPIED)) == {(EvictStatus.STORED, 0)}
    await hold.held.wait()
    for number, name in enumerate(others):
        assert _told(await scene.evict(1 + number, [name])) == {(EvictStatus.STORED, 0)}
    assert _told(await scene.restore(16, others)) == {(RestoreStatus.RESTORED, 0)}
    hold.open()
    await scene.offload.core.idle()
    assert _told(await scene.restore(8, ["a", *others])) == {(RestoreStatus.RESTORED, 0)}
    assert (scene.engine.bytes[8:15] == np.arange(7)[:, None]).all()


async def test_incident_3_a_late_read_lands_in_no_staging_slot_of_another(scene: Scene, hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.engine.bytes[:2] = np.arange(2, dtype=np.uint8)[:, None]
    for number, name in enumerate(["late", "well"]):
        await scene.evict(number, [name])
    scene.engine.bytes[8:10] = OTHERS
    hold_first_io(hold)
    landed = note_returns(monkeypatch)
    assert _told(await scene.restore(8, ["late"], given_s=0.5)) == {(RestoreStatus.FAILED, Reason.DEADLINE)}
    # That read hangs on. Another one has ended, and its bytes wait in their slot to be checked, when the late one lands.
    between = Hold(monkeypatch)
    between.put_before(volume_work, "hand_over")
    between.close()
    well = asyncio.ensure_future(scene.restore(9, ["well"]))
    await between.held.wait()
    assert len(landed) == 1
    hold.open()
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while len(landed) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    between.open()
    assert _told(await well) == {(RestoreStatus.RESTORED, 0)}
    await scene.offload.core.idle()
    assert (scene.engine.bytes[9] == 1).all() and (scene.engine.bytes[8] == OTHERS).all()


async def test_incident_3_a_timeout_frees_no_slot_that_a_late_write_will_fill(scene: Scene, hold: Hold) -> None:
    file = scene.volumes[0].file
    slots = file.slab_count * slot_count_for(file.slab_bytes, slot_bytes_for(PAYLOAD_BYTES))
    scene.engine.bytes[:] = np.arange(32, dtype=np.uint8)[:, None]
    hold_first_io(hold)
    options = EvictOptions(deadline_s=clock.monotonic_s() + 0.5, ack=AckLevel.DURABLE)
    answer = await scene.offload.evictor.evict(scene.engine.session, [scene.engine.batch(np.arange(1), ["late"])], options)
    assert _told(answer) == {(EvictStatus.FAILED, Reason.DEADLINE)}
    await hold.held.wait()
    # The volume is filled twice over, so that each slot that is free, or was some block's, gets a new one.
    stored = [[f"{number} {place}" for place in range(1, 31)] for number in range(2 * slots // 30 + 1)]
    for names in stored:
        assert _told(await scene.evict(1, names)) == {(EvictStatus.STORED, 0)}
    hold.open()
    await scene.offload.core.idle()
    found = 0
    for names in stored:
        scene.engine.bytes[:] = OTHERS
        restored = await scene.restore(1, names)
        good = restored.status == RestoreStatus.RESTORED
        assert set(restored.status[~good].tolist()) <= {int(RestoreStatus.NOT_FOUND)}, "a late write came into the slot of another block"
        assert (scene.engine.bytes[1:31][good] == np.arange(1, 31)[good][:, None]).all()
        found += int(good.sum())
    assert found > slots // 2
    assert _told(await scene.restore(0, ["late"])) == {(RestoreStatus.NOT_FOUND, 0)}


async def test_incident_7_an_evict_that_was_answered_failed_is_not_visible_when_its_write_ends_well(scene: Scene, hold: Hold) -> None:
    hold.hold_io()
    hold.close()
    evict = asyncio.ensure_future(scene.evict(0, ["a", "b"]))
    await hold.held.wait()
    scene.cancel()
    assert _told(await evict) == {(EvictStatus.FAILED, Reason.CANCELLED)}
    hold.open()
    await scene.offload.core.idle()
    assert _told(await scene.restore(8, ["a", "b"])) == {(RestoreStatus.NOT_FOUND, 0)}
    assert scene.volumes[0].pool.used_slots == 0


@pytest.mark.parametrize("scene", [2], indirect=True)
async def test_incident_13_a_volume_that_hangs_takes_no_thread_of_another(scene: Scene, hold: Hold) -> None:
    names = [str(index) for index in range(8)]
    scene.engine.bytes[:8] = np.arange(8, dtype=np.uint8)[:, None]
    # A request goes over all volumes; blocks of two requests lie on one each.
    for first in range(0, 8):
        await scene.evict(first, [names[first]])
    catalog = scene.offload.core.catalog
    volumes = catalog.volume_sources(catalog.lookup(scene.engine.batch(np.arange(8), names).keys)).volume.tolist()
    on_first, on_second = ([name for name, volume in zip(names, volumes, strict=True) if volume == wanted] for wanted in (0, 1))
    assert on_first and on_second
    hung = scene.volumes[0].file.path.stat().st_ino
    hold.hold_io()
    hold.holds = lambda fd, *_: os.fstat(fd).st_ino == hung
    hold.close()
    late = [asyncio.ensure_future(scene.restore(8, on_first, given_s=0.5)) for _ in range(4)]
    await hold.held.wait()
    for _ in range(3):
        assert _told(await scene.restore(16, on_second)) == {(RestoreStatus.RESTORED, 0)}
        for place, name in enumerate(on_second):
            assert (scene.engine.bytes[16 + place] == int(name)).all()
    for request in late:
        assert _told(await request) == {(RestoreStatus.FAILED, Reason.DEADLINE)}, "each request ends, and with an outcome for each block"
    hold.open()


async def test_incident_14_a_load_that_fails_is_an_outcome_each_time_and_ends(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "b", "c"]
    await scene.evict(0, names)
    real = slot_io.read
    scene.engine.bytes[8:11] = OTHERS

    def fail(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "the volume has gone")

    def come_back_short(fd: int, buffers: Any, offset: int) -> int:
        raise slot_io.ShortIoError("read 0 bytes")

    monkeypatch.setattr(slot_io, "read", fail)
    for _ in range(3):
        assert _told(await scene.restore(8, names)) == {(RestoreStatus.FAILED, Reason.IO_ERROR)}, "a fault of the moment drops no block"
    monkeypatch.setattr(slot_io, "read", real)
    assert _told(await scene.restore(8, ["b"])) == {(RestoreStatus.RESTORED, 0)}
    # A copy that is bad is tried once: an engine that repeats what failed does not fail for ever, it recomputes.
    monkeypatch.setattr(slot_io, "read", come_back_short)
    assert _told(await scene.restore(8, names)) == {(RestoreStatus.DATA_LOSS, Reason.SHORT_IO)}
    monkeypatch.setattr(slot_io, "read", real)
    assert _told(await scene.restore(8, names)) == {(RestoreStatus.NOT_FOUND, 0)}
    assert _told(await scene.evict(0, names)) == {(EvictStatus.STORED, 0)}, "recomputed, it is stored again"

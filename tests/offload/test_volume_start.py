"""How long a start waits for a volume: for one that has answered as long as its tables take, for one that hangs half a second. The clock is the test's."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from offloadd.catalog.catalog import Catalog
from offloadd.offload import volume_link
from offloadd.offload.namespaces import Namespaces
from offloadd.offload.volume_health import HealthOptions
from offloadd.offload.volume_link import ANSWER_WAIT_S, KEEPER_START_WAIT_S, OPEN_WAIT_S, VolumeLink, VolumeOptions

from .held_clock import run_held


def make_link() -> VolumeLink:
    return VolumeLink(
        VolumeOptions(path="/volume", io_threads=1, open_slabs=1, prewrite=False),
        catalog=Catalog(capacity=4096),
        namespaces=Namespaces(),
        keep_until_s=lambda: 0.0,
        on_opened=lambda link: None,
        on_turn=lambda link: None,
        health=HealthOptions(),
    )


#: When the keeper takes requests, the volume answers, and it serves or can't; None: never. Then whether it is settled, and how long the start waits.
CASES: list[tuple[str, float | None, float | None, float | None, bool, float]] = [
    ("the keeper does not even start", None, None, None, False, KEEPER_START_WAIT_S),
    ("the volume hangs", 3.0, None, None, False, 3.0 + ANSWER_WAIT_S),
    ("it answers late", 3.0, 3.0 + ANSWER_WAIT_S + 0.1, 4.0, False, 3.0 + ANSWER_WAIT_S),
    ("it has many slabs", 3.0, 3.2, 4.9, True, 4.9),
    ("it hangs in its tables", 3.0, 3.2, None, False, 3.2 + OPEN_WAIT_S),
    ("it can't be opened", 3.0, None, 3.1, True, 3.1),
]


@pytest.mark.parametrize(("kept_s", "answers_s", "settled_s", "settled", "waited_s"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_start_waits_for_volumes_that_answer(
    monkeypatch: pytest.MonkeyPatch, kept_s: float | None, answers_s: float | None, settled_s: float | None, settled: bool, waited_s: float
) -> None:
    monkeypatch.setattr(volume_link, "WorkerProcess", _NoProcess)

    async def start() -> None:
        link, loop = make_link(), asyncio.get_running_loop()
        for event, when_s in ((link.kept, kept_s), (link.answers, answers_s), (link.settled, settled_s)):
            if when_s is not None:
                loop.call_later(when_s, event.set)
        begin_s = loop.time()
        assert await link.opened_in_time() is settled
        assert loop.time() - begin_s == pytest.approx(waited_s)

    run_held(monkeypatch, start())


class _NoProcess:
    def __init__(self, **_: Any) -> None:
        self.on_lost: Callable[[], None] = lambda: None

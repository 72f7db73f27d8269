"""A loop whose time the test holds: it goes on to the next timer only when nothing else is left to be done."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from offloadd import clock


class HeldLoop(asyncio.SelectorEventLoop):
    """Sockets work as ever; a pause of a minute takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            if events := self._selector.select(0):  # type: ignore[attr-defined]
                self._process_events(events)  # type: ignore[attr-defined]
            else:
                self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_held(monkeypatch: pytest.MonkeyPatch, work: Coroutine[Any, Any, None]) -> None:
    """Run a test under a held clock, which is that of the front, too."""
    with asyncio.Runner(loop_factory=HeldLoop) as runner:
        loop = runner.get_loop()
        monkeypatch.setattr(clock, "monotonic_s", loop.time)
        monkeypatch.setattr(clock, "monotonic_ns", lambda: int(loop.time() * 1e9))
        runner.run(work)

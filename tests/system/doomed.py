"""Runs inside an engine that a test kills, or whose daemon or mover: requests in the background, and what became of them, byte for byte."""

import threading
from collections.abc import Callable
from typing import Any

from offloadd.client import AckLevel, Client, Path, Tier
from offloadd.errors import OffloaddError
from offloadd.units import KIB

from .engine_memory import Engine, flat

BLOCK_BYTES = 64 * KIB
#: Blocks of a request, and of the region: requests in the background have places of their own.
COUNT, BLOCK_COUNT = 4, 64
DEADLINE_S = 120.0


class Request:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._answer: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except OffloaddError as error:
            self._answer = error

    def finish(self) -> Any:
        """Its result, or its error."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "a request was never answered"
        return self._answer


class Doomed:
    """An engine instance; `tag` tells its blocks from those of the ones before it."""

    def __init__(self, runtime_dir: str, tag: str) -> None:
        self.client = Client.connect(runtime_dir, instance="doomed", timeout_s=60)
        self.tag = tag
        self.engine: Engine
        self.requests: list[tuple[str, list[int], list[str], Request]] = []
        #: What was told STORED, by whether it was to be durable.
        self.stored: dict[str, bool] = {}

    def register(self) -> None:
        """A region, and durable blocks to be restored."""
        self.engine = Engine(self.client, flat(BLOCK_COUNT, BLOCK_BYTES))
        self.evict_now(self.names("durable"), ack=AckLevel.DURABLE)

    def names(self, kind: str) -> list[str]:
        """Of the blocks of a request."""
        return [f"{self.tag} {kind} {number}" for number in range(COUNT)]

    def evict_now(self, names: list[str], **options: Any) -> None:
        """Evict from the last places, and wait."""
        answer = self.engine.evict(range(BLOCK_COUNT - COUNT, BLOCK_COUNT), names, deadline_s=DEADLINE_S, **options)
        assert answer.all_stored, answer.outcomes
        self.stored.update(dict.fromkeys(names, options.get("ack") == AckLevel.DURABLE))

    def begin_evict(self, kind: str, **options: Any) -> None:
        """Evict in the background."""
        names, places = self.names(kind), self._places()
        for place, name in zip(places, names, strict=True):
            self.engine.fill(place, name)
        self._begin(kind, places, names, lambda: self.engine.evict(places, names, fill=False, deadline_s=DEADLINE_S, **options), options)

    def begin_restore(self, kind: str, **options: Any) -> None:
        """Restore in the background, into blocks that hold something else."""
        names, places = self.names(kind), self._places()
        for place in places:
            for view in self.engine.views(place):
                view[:] = 0xA5
        self._begin("restore", places, names, lambda: self.engine.restore(places, names, deadline_s=DEADLINE_S, **options), options)

    def _places(self) -> list[int]:
        first = len(self.requests) * COUNT
        assert first + COUNT <= BLOCK_COUNT - COUNT
        return list(range(first, first + COUNT))

    def _begin(self, kind: str, places: list[int], names: list[str], call: Callable[[], Any], options: dict[str, Any]) -> None:
        self.requests.append(("durable" if options.get("ack") == AckLevel.DURABLE else kind, places, names, Request(call)))

    def lease(self) -> None:
        """Lease the durable blocks."""
        blocks = self.engine.blocks(range(COUNT), self.names("durable"))
        assert self.client.lookup([self.engine.region], blocks.hashes, lease_s=600).held_count == COUNT

    def unregister(self) -> None:
        """Unregister the region in the background."""
        region = self.engine.region
        self.requests.append(("unregister", [], [], Request(lambda: self.client.unregister_region(region))))

    def finish(self) -> list[list[Any]]:
        """Wait for the requests; [kind, [status, reason] of each block, or its error and its pause]. Asserts that every block restored holds its bytes."""
        told: list[list[Any]] = []
        for kind, places, names, request in self.requests:
            answer = request.finish()
            if isinstance(answer, OffloaddError):
                told.append([kind, type(answer).__name__, answer.retry_after_s])
                continue
            outcomes = [(one.status.name, one.reason.name) for one in answer.outcomes] if answer is not None else []
            for place, name, (status, _) in zip(places, names, outcomes, strict=False):
                assert status != "RESTORED" or self.engine.holds(place, name), f"{name} was restored wrongly"
                if status == "STORED":
                    self.stored[name] = kind == "durable"
            told.append([kind, *sorted(set(outcomes))])
        self.requests.clear()
        return told

    def found(self) -> dict[str, int]:
        """Restore all that was told STORED, and compare: how many blocks were found of the durable ones, and of the others. Asserts on bytes alone."""
        found = {"durable": 0, "others": 0, "durable in all": sum(self.stored.values())}
        for first in range(0, len(self.stored), COUNT):
            names = list(self.stored)[first : first + COUNT]
            self.engine.wipe()
            answer = self.engine.restore(range(len(names)), names, deadline_s=DEADLINE_S)
            for place, (name, outcome) in enumerate(zip(names, answer.outcomes, strict=True)):
                if outcome.status.name == "RESTORED":
                    assert self.engine.holds(place, name), f"{name} was restored wrongly"
                    found["durable" if self.stored[name] else "others"] += 1
                else:
                    assert outcome.status.name in ("NOT_FOUND", "DATA_LOSS"), outcome
        return found

    def goes_on(self) -> None:
        """New requests work, by both tiers."""
        for kind, options in (("again durable", {"ack": AckLevel.DURABLE}), ("again copied", {"tier": Tier.ARENA})):
            names = [f"{name} {len(self.stored)}" for name in self.names(kind)]
            self.evict_now(names, **options)
            self.engine.wipe()
            assert self.engine.restore(range(COUNT), names, deadline_s=DEADLINE_S).restored_count == COUNT
            assert all(self.engine.holds(place, name) for place, name in enumerate(names))


__all__ = ["AckLevel", "Doomed", "Path", "Tier"]

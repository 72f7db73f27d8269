"""What happens to blocks, for whoever watches: bounded queues that lose rather than grow."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from offloadd.model.enums import Tier

#: Batches that a watcher may lag behind.
WATCH_BATCHES_MAX = 1024


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks that appeared in a tier (stored) or went."""

    stored: bool
    tier: Tier
    keys: list[bytes]


@dataclass(eq=False, slots=True)
class Watcher:
    """One watcher's queue."""

    events: deque[BlockEvent] = field(default_factory=deque)
    lost_count: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Events:
    """Fans events out to watchers. Costs nothing while nobody watches."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()

    def publish(self, stored: bool, tier: Tier, keys: npt.NDArray[Any]) -> None:
        """Blocks appeared or went."""
        if not self._watchers:
            return
        event = BlockEvent(stored=stored, tier=tier, keys=keys.tolist())
        for watcher in self._watchers:
            if len(watcher.events) >= WATCH_BATCHES_MAX:
                watcher.lost_count += len(event.keys)
            else:
                watcher.events.append(event)
                watcher.wake.set()

    def watch(self) -> Watcher:
        """A queue of what happens from now on; give it back to `unwatch`."""
        watcher = Watcher()
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Stop filling a queue."""
        self._watchers.discard(watcher)

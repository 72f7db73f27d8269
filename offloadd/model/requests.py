"""A request and its answer as the use cases see them: plain values, no protobuf."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadd.model.device_event import EventName
from offloadd.model.enums import AckLevel, EvictStatus, Path, Priority, Reason, RestoreStatus, Tier

Keys = npt.NDArray[Any]
Indices = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Blocks of one region in one request, equal-length arrays. `positions` are their places in the request; `region` is the front's number of it."""

    region: int
    indices: Indices
    keys: Keys
    positions: Indices


@dataclass(frozen=True, slots=True)
class EvictOptions:
    """How to evict. `deadline_s` and `keep_until_s` are on the monotonic clock."""

    deadline_s: float
    ack: AckLevel = AckLevel.COPIED
    tier: Tier = Tier.ANY
    path: Path = Path.AUTO
    require_path: bool = False
    keep_until_s: float | None = None
    priority: Priority = Priority.DEFAULT
    request_id: str = ""
    #: What the gather waits for; empty for nothing.
    source_ready: EventName = b""


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """How to restore. `deadline_s` is on the monotonic clock."""

    deadline_s: float
    path: Path = Path.AUTO
    require_path: bool = False
    consume: bool = False
    priority: Priority = Priority.DEFAULT
    request_id: str = ""
    #: What the scatter waits for; empty for nothing.
    destination_free: EventName = b""


@dataclass(frozen=True, slots=True)
class EvictOutcome:
    """What became of one block."""

    status: EvictStatus
    reason: Reason = Reason.NONE
    tier: Tier = Tier.ANY


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """What became of one block."""

    status: RestoreStatus
    reason: Reason = Reason.NONE
    tier: Tier = Tier.ANY

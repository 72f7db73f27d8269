"""How requests end: each waits for its move, is told to stop at its deadline or by a cancel, and leaves no copy into engine memory behind.

running ──stop(reason)──▶ what was not sent is taken back ──▶ fence asked for ──answered──▶ answered with outcomes
                                                                    └──not in time──▶ its open blocks are QUARANTINED
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from offloadd import clock
from offloadd.model.enums import Reason
from offloadd.offload.devices import Device
from offloadd.offload.moves import Move
from offloadd.offload.sessions import Session

#: A request begins to end this long before its deadline (at most a tenth of the time that it has), so that its answer is there at the deadline. A fence waits
#: for the copies that run, one slice a thread: 2 to 4 ms each, some 30 ms where sixteen threads share two cores. Longer would only cut requests short.
FENCE_LEAD_S = 0.1
#: How long a cancelled request waits for its fence, if its deadline is not nearer. What takes longer than this is stuck, and QUARANTINED.
FENCE_WAIT_S = 1.0
#: As long is waited for a fence in any case: a request that was late, through no fault of the mover's, shall not be QUARANTINED for it.
FENCE_WAIT_S_MIN = 0.05


@dataclass(slots=True)
class Active:
    """A request that runs: its session's, and how it is told to stop. Times are on the monotonic clock; `last_s` is when it begins to end."""

    session: Session
    request_id: str
    deadline_s: float
    last_s: float = field(init=False)
    move: Move | None = None
    stop_reason: Reason = Reason.NONE
    #: Set once it is to stop.
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.last_s = self.deadline_s - min(FENCE_LEAD_S, (self.deadline_s - clock.monotonic_s()) / 10)

    def stop(self, reason: Reason) -> None:
        """End it with this reason."""
        if self.stop_reason == Reason.NONE:
            self.stop_reason = reason
            self.stopped.set()
            if self.move is not None:
                self.move.wake.set()

    async def any_of(self, events: Iterable[asyncio.Event], until_s: float = float("inf")) -> bool:
        """Wait until one of the events is set, or `until_s`; whether the request goes on. At its end it is stopped with DEADLINE."""
        waiters = [asyncio.ensure_future(event.wait()) for event in (*events, self.stopped)]
        try:
            done, _ = await asyncio.wait(waiters, timeout=max(0.0, min(until_s, self.last_s) - clock.monotonic_s()), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        if not done and self.last_s <= until_s:
            self.stop(Reason.DEADLINE)
        return self.stop_reason == Reason.NONE


class Stopping:
    """Ends what moves do to engine memory. Event-loop owned."""

    def __init__(self, devices: Mapping[str, Device], counters: Counter[str]) -> None:
        self._devices = devices
        self._counters = counters

    async def wait_for(self, move: Move, active: Active, until: Callable[[], bool]) -> Reason:
        """Wait until `until()` holds. At the request's end or a cancel instead: no new slice starts, running copies are fenced, and the reason comes back.

        Afterwards no byte of engine memory is read or written for this move, or `move.quarantined` is set. That is so at the deadline, whatever the movers do.
        """
        active.move = move
        try:
            async with asyncio.timeout(max(0.0, active.last_s - clock.monotonic_s())):
                while not until() and active.stop_reason == Reason.NONE:
                    move.wake.clear()
                    await move.wake.wait()
        except TimeoutError:
            active.stop(Reason.DEADLINE)
        if until():
            return Reason.NONE
        self._take_back(move, active.stop_reason)
        if fences := self._fence(move):
            left_s = active.deadline_s - clock.monotonic_s()
            _, late = await asyncio.wait(fences, timeout=max(FENCE_WAIT_S_MIN, min(FENCE_WAIT_S, left_s)))
            if late:
                move.quarantined = True
                self._counters["moves_quarantined"] += 1
        # What the mover called off because of the fence ended for the reason that the fence was asked for.
        move.reasons[move.reasons == Reason.CANCELLED] = active.stop_reason
        return active.stop_reason

    async def over(self, move: Move, deadline_s: float) -> None:
        """Wait for a move that nobody is answered for. At the deadline what was not sent is taken back; what was sent holds its slots until it ends."""
        try:
            async with asyncio.timeout(max(0.0, deadline_s - clock.monotonic_s())):
                await move.finished.wait()
        except TimeoutError:
            self._take_back(move, Reason.DEADLINE)
            await move.finished.wait()

    def leave(self, move: Move) -> None:
        """Nobody waits for the move any more (the caller hung up): what was not sent is taken back, and copies into engine memory are fenced."""
        if not move.done:
            self._take_back(move, Reason.CANCELLED)
            self._fence(move)

    def _fence(self, move: Move) -> "list[asyncio.Future[None]]":
        """Fences of the move, one in each mover that has jobs of it; all are asked for at once."""
        return [self._devices[name].mover.fence(move.number) for name in move.devices]

    def _take_back(self, move: Move, reason: Reason) -> None:
        for name in move.devices:
            for lane in self._devices[name].lanes():
                lane.abandon(move, reason)

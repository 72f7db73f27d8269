"""How requests end: each waits for its move, is told to stop at its deadline or by a cancel, and leaves no copy into engine memory behind.

running ──stop(reason)──▶ what was not sent is taken back ──▶ fence asked for ──answered──▶ answered with outcomes
                                                                    └──not in time──▶ its open blocks are QUARANTINED
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from offloadd import clock
from offloadd.model.enums import Reason
from offloadd.offload.admission import Load
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


class Active:
    """A request that runs: its session's, and how it is told to stop. `deadline_s` is on the monotonic clock.

    It stops by itself ahead of its deadline, also while nobody waits for it: a client that does not read its stream holds the request where it is. Whoever
    made it calls `end`.
    """

    def __init__(self, session: Session, request_id: str, deadline_s: float, on_stop: "Callable[[Active], None]", load: Load) -> None:
        """`on_stop(self)` is called once, when it is told to stop. `load`: what it was admitted with."""
        self.session = session
        self.load = load
        self.request_id = request_id
        self.deadline_s = deadline_s
        self.move: Move | None = None
        self.stop_reason = Reason.NONE
        #: Set once it is to stop.
        self.stopped = asyncio.Event()
        #: What was asked of the movers when it was.
        self.fences: list[asyncio.Future[None]] = []
        #: Whether it has all that its answer needs. Then an end that comes before the answer has left changes nothing: what was copied goes on to its tier.
        self.enough: Callable[[], bool] = lambda: False
        self._on_stop = on_stop
        left_s = max(0.0, deadline_s - clock.monotonic_s())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + left_s - min(FENCE_LEAD_S, left_s / 10), self.stop, Reason.DEADLINE)

    def stop(self, reason: Reason) -> None:
        """End it with this reason, unless it is being ended or has enough."""
        if self.stop_reason == Reason.NONE and not self.enough():
            self.stop_reason = reason
            self.stopped.set()
            self._on_stop(self)

    def end(self) -> None:
        """It was answered."""
        self._timer.cancel()

    async def any_of(self, events: Iterable[asyncio.Event], until_s: float | None = None) -> bool:
        """Wait until one of the events is set, or `until_s`; whether the request goes on."""
        waiters = [asyncio.ensure_future(event.wait()) for event in (*events, self.stopped)]
        timeout_s = None if until_s is None else max(0.0, until_s - clock.monotonic_s())
        try:
            await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        return self.stop_reason == Reason.NONE


class Stopping:
    """Ends what moves do to engine memory. Event-loop owned."""

    def __init__(self, devices: Mapping[str, Device], counters: Counter[str]) -> None:
        self._devices = devices
        self._counters = counters

    def called_off(self, active: Active) -> None:
        """A request was told to stop: what was not sent is taken back, and copies into engine memory are fenced, though nobody may wait for it now."""
        if active.move is not None:
            active.fences = self.leave(active.move, active.stop_reason)
            active.move.wake.set()

    async def wait_for(self, move: Move, active: Active, until: Callable[[], bool]) -> Reason:
        """Wait until `until()` holds. At the request's end or a cancel instead: no new slice starts, running copies are fenced, and the reason comes back.

        Afterwards no byte of engine memory is read or written for this move, or `move.quarantined` is set. That is so at the deadline, whatever the movers do.
        """
        if active.move is not move:
            active.move = move
            if active.stop_reason != Reason.NONE:
                self.called_off(active)
        while active.stop_reason == Reason.NONE and not until():
            move.wake.clear()
            await move.wake.wait()
        # Not asked again of `until`: what was taken back at the stop may have made it true.
        if active.stop_reason == Reason.NONE:
            return Reason.NONE
        if active.fences:
            left_s = active.deadline_s - clock.monotonic_s()
            _, late = await asyncio.wait(active.fences, timeout=max(FENCE_WAIT_S_MIN, min(FENCE_WAIT_S, left_s)))
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

    def leave(self, move: Move, reason: Reason = Reason.CANCELLED) -> "list[asyncio.Future[None]]":
        """Nobody wants the move any more: what was not sent is taken back, and copies into engine memory are fenced. The fences, one in each mover that has
        jobs of it and asked for all at once; none if it is over."""
        if move.done:
            return []
        self._take_back(move, reason)
        return [self._devices[name].mover.fence(move.number) for name in move.devices]

    def _take_back(self, move: Move, reason: Reason) -> None:
        for name in move.devices:
            for lane in self._devices[name].lanes():
                lane.abandon(move, reason)

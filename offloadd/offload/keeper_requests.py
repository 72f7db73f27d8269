"""What a volume's keeper was asked and has not answered: matched by ticket, bounded in time and in number."""

import asyncio
import itertools
from collections.abc import Callable

from offloadd import errors
from offloadd.errors import OffloaddError, Unavailable
from offloadd.keeper.messages import AddNamespace, Answer, CloseSlab, CloseVolume, CutSlab, DropNamespace, Failed, OpenSlab, Probe
from offloadd.offload.processes import WorkerProcess

#: Requests of one keeper that wait. A keeper that hangs answers none, and whoever asks goes on asking: beyond this it is refused at once.
WAITING_MAX = 256
#: Most requests write and sync a sector or two. What takes longer than this is not waited for, and what it was for is done without the volume.
ANSWER_WAIT_S = 5.0
#: A cut may write a whole slab, and wait for others that do: 4 GiB at 40 MB/s.
CUT_WAIT_S = 100.0

Ticketed = AddNamespace | DropNamespace | CutSlab | OpenSlab | CloseSlab | CloseVolume | Probe


class KeeperRequests:
    """The open requests of one keeper. Event-loop owned.

    `on_late()` hears of every request that was given up because it took too long.
    """

    def __init__(self, process: WorkerProcess[Answer], path: str, on_late: Callable[[], None]) -> None:
        self._process = process
        self._path = path
        self._on_late = on_late
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    def ticket(self) -> int:
        """A number for the next request."""
        return next(self._tickets)

    async def ask(self, request: Ticketed, *, wait_s: float | None = ANSWER_WAIT_S) -> Answer:
        """Send and wait for the answer; without a limit where `wait_s` is None.

        Raises what the keeper says, and `Unavailable`: it is being restarted, too many requests wait, or there was no answer in time. Then it may still be
        carried out later.
        """
        if not self._process.alive:
            raise Unavailable(f"the keeper of {self._path} is being restarted; repeat")
        # Of probes there is one at a time, and it is to tell why the others wait.
        if len(self._waiting) >= WAITING_MAX and not isinstance(request, Probe):
            raise Unavailable(f"{len(self._waiting)} requests wait for the keeper of {self._path}; {WAITING_MAX} is the limit; repeat after a pause")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request.ticket] = future
        self._process.send(request)
        try:
            async with asyncio.timeout(wait_s):
                answer = await future
        except TimeoutError:
            self._on_late()
            raise Unavailable(f"the keeper of {self._path} did not answer a {type(request).__name__} in {wait_s:g} s; repeat") from None
        finally:
            self._waiting.pop(request.ticket, None)
        if isinstance(answer, Failed):
            kind = getattr(errors, answer.kind, errors.VolumeError)
            raise kind(f"{self._path}: {answer.error}") if issubclass(kind, OffloaddError) else errors.VolumeError(answer.error)
        return answer

    def answered(self, answer: Answer) -> None:
        """An answer came. Those that nobody waits for any more are dropped."""
        future = self._waiting.get(getattr(answer, "ticket", 0))
        if future is not None and not future.done():
            future.set_result(answer)

    def lost(self) -> None:
        """The keeper died: no request will be answered."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable(f"the keeper of {self._path} died; repeat"))

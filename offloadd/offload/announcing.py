"""Namespaces on their way into the volumes' tables: told in the background, so that a keeper that stands still keeps no engine waiting."""

import asyncio

import structlog

from offloadd import clock
from offloadd.errors import OffloaddError, Unavailable
from offloadd.offload.namespaces import NamespaceEntry
from offloadd.offload.volume_link import VolumeLink

log = structlog.get_logger()

#: How long a registration waits for volumes to take its namespace, so that the first evicts are spread over all of them. A keeper needs one synced write:
#: milliseconds, on a busy disk tens of them. One that takes longer is not waited for again until it has answered.
ANNOUNCE_WAIT_S = 1.0
#: Before a keeper that died is asked again: it is started again within RESTART_PAUSE_MAX_S.
RETRY_PAUSE_S = 1.0


class Announcer:
    """Has volumes take namespaces. A volume is used for one as soon as it is in its table. Event-loop owned."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        #: Volumes by ordinal whose keepers were waited for in vain.
        self._late: set[int] = set()

    def announce(self, volume: VolumeLink, entry: NamespaceEntry) -> None:
        """Have the volume take the namespace, unless it has it or is being asked."""
        if volume.ordinal in entry.on_volumes or volume.ordinal in entry.asked:
            return
        entry.asked[volume.ordinal] = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._announce(volume, entry))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def settle(self, entry: NamespaceEntry, deadline_s: float) -> None:
        """Wait for the volumes that are asked to take it, but not beyond ANNOUNCE_WAIT_S and the deadline, nor for one that was late before."""
        until_s = min(clock.monotonic_s() + ANNOUNCE_WAIT_S, deadline_s)
        for ordinal, answered in list(entry.asked.items()):
            if ordinal in self._late:
                continue
            try:
                async with asyncio.timeout(max(0.0, until_s - clock.monotonic_s())):
                    await answered.wait()
            except TimeoutError:
                self._late.add(ordinal)

    def stop(self) -> None:
        """Ask no keeper any more: the daemon drains."""
        for task in self._tasks:
            task.cancel()

    async def _announce(self, volume: VolumeLink, entry: NamespaceEntry) -> None:
        told = False
        try:
            while not entry.dropped:
                try:
                    await volume.add_namespace(entry)
                except Unavailable as error:
                    # For as long as it takes: without the namespace its engines store nothing there.
                    if not told:
                        log.warning("volume does not take the namespace yet", volume=volume.options.path, namespace=_short(entry), error=str(error))
                    told = True
                    await asyncio.sleep(RETRY_PAUSE_S)
                else:
                    return
        except OffloaddError as error:
            # The volume does not take this namespace's blocks; the others and the arena do.
            log.warning("volume does not take the namespace", volume=volume.options.path, namespace=_short(entry), error=str(error))
        finally:
            self._late.discard(volume.ordinal)
            entry.asked.pop(volume.ordinal).set()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("bug: a namespace could not be announced", exc_info=error)


def _short(entry: NamespaceEntry) -> str:
    return entry.namespace_id.hex()[:16]

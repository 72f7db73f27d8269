"""What engines let a region's copies wait for: their events and flags, opened once and kept open for as long as the region, up to a number."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from offloadd.cuda.closing import Closable, close_all
from offloadd.cuda.driver import CudaError
from offloadd.cuda.flags import Flag, FlagReader
from offloadd.cuda.imports import IpcImports
from offloadd.cuda.streams import Event
from offloadd.errors import InvalidRequest
from offloadd.model.device_event import EventName, FlagValue
from offloadd.mover.device import EventNotOpenedError

#: Events that one region holds open. An engine uses a few again and again.
EVENTS_MAX = 64
#: Flags that one region holds open. More than a session has requests in flight (64 by default): one that is closed while a job waits for it is opened anew at
#: the next look, and would, with ever more than this many in turn, never be seen to come.
FLAGS_MAX = 256


Opened = TypeVar("Opened", bound=Closable)


class RegionEvents:
    """Of one region; they go with it, since a handle says nothing about another engine's event. Any thread may call."""

    def __init__(self, reader: FlagReader, imports: IpcImports) -> None:
        self._reader = reader
        self._imports = imports
        self._lock = threading.Lock()
        #: The latest used last.
        self._events: OrderedDict[bytes, Event] = OrderedDict()
        #: By the handle of its memory and the offset in it; the latest used last.
        self._flags: OrderedDict[tuple[bytes, int], Flag] = OrderedDict()

    def has_come(self, event: EventName) -> bool:
        """See `MappedRegion`."""
        with self._lock:
            if isinstance(event, FlagValue):
                flag = _kept(self._flags, (event.handle, event.offset_bytes), FLAGS_MAX, lambda: self._open_flag(event))
                return flag.has_reached(event.value)
            return _kept(self._events, event, EVENTS_MAX, lambda: self._open_event(event)).is_done()

    def _open_event(self, handle: bytes) -> Event:
        try:
            return Event.open(self._reader.device, handle)
        except (CudaError, InvalidRequest) as error:
            raise EventNotOpenedError(
                f"{error}; let the daemon and the engine share /dev/shm, or order the request by a flag (offloadd.client.cuda.new_flag) instead of an event"
            ) from error

    def _open_flag(self, flag: FlagValue) -> Flag:
        try:
            memory = self._imports.open(flag.handle)
            try:
                return self._reader.open(memory, flag.offset_bytes)
            except BaseException:
                memory.close()
                raise
        except (CudaError, InvalidRequest) as error:
            raise EventNotOpenedError(
                f"{error}; a flag lies in cudaMalloc memory of an engine that lives, and that stays until its region is unregistered"
            ) from error

    def close(self) -> None:
        """Close all. No other call may run."""
        close_all([*self._events.values(), *self._flags.values()])


Key = TypeVar("Key")


def _kept(table: "OrderedDict[Key, Opened]", key: Key, most: int, make: Callable[[], Opened]) -> Opened:
    """The one of this key, opened if it is not open; then the one that was not used for longest makes room."""
    found = table.get(key)
    if found is None:
        found = table[key] = make()
        if len(table) > most:
            _, oldest = table.popitem(last=False)
            oldest.close()
    table.move_to_end(key)
    return found

"""One slice from start to results, whatever happens in between."""

import sys
import traceback
from collections.abc import Callable

from offloadd.errors import InvalidRequest
from offloadd.model.enums import Reason
from offloadd.mover import arena_work, gds_work, long_work, spill_work, volume_work
from offloadd.mover.device import EventNotOpenedError
from offloadd.mover.io_gate import CalledOffError
from offloadd.mover.messages import Operation
from offloadd.mover.slices import Slice
from offloadd.mover.slot_io import ShortIoError
from offloadd.mover.tools import Tools
from offloadd.tiers.format import LONG_SLOT_BYTES

Work = Callable[[Tools, Slice], None]


def _nothing(tools: Tools, piece: Slice) -> None:
    """Answered at once: the ceiling of everything around the mover."""


_WORK: dict[Operation, Work] = {
    Operation.EVICT: volume_work.evict,
    Operation.RESTORE: volume_work.restore,
    Operation.SPILL: spill_work.spill,
    Operation.PREFETCH: spill_work.prefetch,
    Operation.ARENA_EVICT: arena_work.evict,
    Operation.ARENA_RESTORE: arena_work.restore,
    Operation.READ_ONLY: volume_work.read_only,
    Operation.NULL: _nothing,
}
_LONG_WORK: dict[Operation, Work] = {
    Operation.EVICT: long_work.evict,
    Operation.RESTORE: long_work.restore,
    Operation.SPILL: long_work.spill,
    Operation.PREFETCH: long_work.prefetch,
    Operation.READ_ONLY: long_work.read_only,
}


_GDS_WORK: dict[Operation, Work] = {
    Operation.EVICT: gds_work.evict,
    Operation.RESTORE: gds_work.restore,
    Operation.READ_ONLY: gds_work.read_only,
}


class FrontGoneError(Exception):
    """The lane's socket is closed: nobody waits for results."""


def run(tools: Tools, piece: Slice) -> None:
    """Do the slice's work and send its results. Every block gets one, also after an error of ours. Raises `FrontGoneError` only."""
    piece.start()
    try:
        _attempt(tools, piece)
    except FrontGoneError:
        raise
    except CalledOffError as error:
        piece.fail(error.reason)
    except ShortIoError as error:
        _say(piece, error)
        piece.fail(Reason.SHORT_IO)
    except EventNotOpenedError as error:
        _say(piece, error)
        piece.fail(Reason.EVENT_NOT_OPENED)
    except (OSError, InvalidRequest) as error:
        _say(piece, error)
        piece.fail(Reason.IO_ERROR)
    except Exception:
        traceback.print_exc(file=sys.stderr)
        piece.fail(Reason.IO_ERROR)
    tools.send(piece.done())


def _attempt(tools: Tools, piece: Slice) -> None:
    if piece.expired():
        piece.fail(Reason.DEADLINE)
        return
    if tools.memories.engine.fenced(piece.job.move):
        piece.fail(Reason.CANCELLED)
        return
    if piece.failure is not None:
        raise piece.failure
    _work_of(tools, piece)(tools, piece)


def _work_of(tools: Tools, piece: Slice) -> Work:
    if tools.path == "gds":
        return _GDS_WORK[piece.operation]
    work = _LONG_WORK.get(piece.operation) if piece.job.slot_bytes > LONG_SLOT_BYTES else None
    return work or _WORK[piece.operation]


def _say(piece: Slice, error: Exception) -> None:
    print(f"mover: {piece.operation.name} of {len(piece.records)} blocks failed: {error}", file=sys.stderr, flush=True)

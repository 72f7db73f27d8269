"""How a client calls: channel options, timeouts, back-off, and errors out of gRPC's. Shared by the blocking and the asyncio client."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import grpc.experimental

from offloadd.client.values import Capabilities
from offloadd.errors import OffloaddError, Unavailable, UnknownSession
from offloadd.model.status import RETRY_AFTER_KEY, error_of_code

#: Key of the token in the metadata of every call.
SESSION_KEY = "offloadd-session"

#: Channels of one process to one address share a connection by default, and with it the back-off (up to two minutes) that another client's failed
#: attempts have built up; a client that attaches again must not wait for that.
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
#: For the blocking client: whoever iterates a stream reads it, instead of a thread of gRPC's that then wakes the reader (0.3 ms a restore).
BLOCKING_CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (*CHANNEL_OPTIONS, (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1))

#: The daemon answers by the deadline; the call itself is given up this much later, so that only a daemon that hangs runs into it.
ANSWER_GRACE_S = 5.0
#: Deadline assumed of a daemon that names none.
DEADLINE_UNKNOWN_S = 60.0
#: How long an UNAVAILABLE waits for the attach socket to hang up too. A dying process closes all its sockets within milliseconds; if this one stays
#: open, only a part of the daemon is away, and attaching again would throw away the leases of a session that lives.
LOST_WAIT_S = 0.2
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0

#: After these the session may be gone: attach again, register again, repeat.
RECOVERABLE = (Unavailable, UnknownSession)


#: What calls carry as metadata.
Metadata = tuple[tuple[str, str], ...]


def traced(metadata: Metadata) -> Metadata:
    """The metadata of a call with the W3C trace context of whoever makes it, so that the daemon's span stands in the engine's trace.

    Whoever has a span has imported OpenTelemetry: where that is not so, nothing is, and nothing is imported for it.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return metadata
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return (*metadata, *carrier.items())


def grpc_target(runtime_dir: Path, socket_name: str) -> str:
    """Address for a channel. An absolute path: "unix:" with a relative one would follow the working directory."""
    return f"unix:{(runtime_dir / socket_name).absolute()}"


def error_of(error: grpc.RpcError) -> OffloaddError:
    """The error of this package that a failed call stands for."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if code is None or details is None:
        return Unavailable(str(error))
    ours = error_of_code(code().name, details() or code().name)
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == RETRY_AFTER_KEY and str(value).isdecimal():
            ours.retry_after_s = int(value) / 1e3
    return ours


class Errors:
    """Raises gRPC's errors as ours around the use of one link. `current` says whether calls still go over it."""

    def __init__(self, current: Callable[[], bool] = lambda: True) -> None:
        self._current = current

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, grpc.RpcError):
            raise error_of(error) from error
        # What gRPC says of a channel that another thread or task closed meanwhile, because it attached again or closed the client.
        if isinstance(error, ValueError | grpc.aio.UsageError) and not self._current():
            raise Unavailable("the session was closed meanwhile") from error
        # Closing a channel cancels its calls, and asyncio's gRPC tells so by the exception that otherwise means that the awaiting task is cancelled.
        if isinstance(error, asyncio.CancelledError) and not self._current() and not _task_is_cancelled():
            raise Unavailable("the session was closed meanwhile") from error


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def deadline_s(capabilities: Capabilities, own_s: float | None) -> float:
    """The deadline of a call: its own, or the daemon's default."""
    return own_s if own_s is not None else capabilities.deadline_s or DEADLINE_UNKNOWN_S


def timeout_s(capabilities: Capabilities, own_s: float | None) -> float:
    """When to give a call up: its deadline and the grace."""
    return deadline_s(capabilities, own_s) + ANSWER_GRACE_S


def backoff_s() -> Iterator[float]:
    """Pauses between attempts, for ever."""
    pause_s = BACKOFF_FIRST_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, BACKOFF_MAX_S)

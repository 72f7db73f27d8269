"""Turns exceptions into gRPC statuses, and refuses calls beyond the limit: the one place where an error becomes a code."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import structlog

from offloadd.errors import LimitExceeded, OffloaddError
from offloadd.model.status import RETRY_AFTER_KEY, code_of

log = structlog.get_logger()


class CallGate:
    """How many calls of our services run at once. Health checks are not among them: an orchestrator that is refused one kills a daemon that works."""

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._count = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Count a call. Raises LimitExceeded, at once, beyond the limit."""
        if self._count >= self._calls_max:
            raise LimitExceeded(f"{self._count} calls are in flight; the daemon takes {self._calls_max} at once; repeat after a pause")
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of ours. Errors of offloadd.errors become their code and message; anything else is our bug: INTERNAL, logged with its traceback.

    `uncounted`: methods that do not take a place in the gate.
    """

    def __init__(self, gate: CallGate, uncounted: frozenset[str] = frozenset()) -> None:
        self._gate = gate
        self._uncounted = uncounted

    async def intercept_service(self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Wrap the handler that serves this call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/offloadd."):
            return handler
        gate = CallGate(1) if method in self._uncounted else self._gate
        if handler.response_streaming:
            inner_stream = handler.unary_stream

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    with gate.passing():
                        async for response in inner_stream(request, context):
                            yield response
                except OffloaddError as error:
                    await _abort(context, error)
                except Exception:
                    await _abort_bug(context, method)

            return grpc.unary_stream_rpc_method_handler(
                stream, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
            )
        inner = handler.unary_unary

        async def unary(request: Any, context: Any) -> Any:
            try:
                with gate.passing():
                    return await inner(request, context)
            except OffloaddError as error:
                return await _abort(context, error)
            except grpc.aio.AbortError:
                raise
            except Exception:
                return await _abort_bug(context, method)

        return grpc.unary_unary_rpc_method_handler(unary, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)


async def _abort(context: Any, error: OffloaddError) -> None:
    hint = ((RETRY_AFTER_KEY, str(round(error.retry_after_s * 1e3))),) if error.retry_after_s is not None else ()
    await context.abort(getattr(grpc.StatusCode, code_of(error)), str(error), hint)


async def _abort_bug(context: Any, method: str) -> None:
    log.exception("bug: a call failed in a way that has no code", method=method)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the daemon's log has the traceback")

"""Turns exceptions into gRPC statuses, and refuses calls beyond the limit: the one place where an error becomes a code."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog

from offloadd.errors import LimitExceeded, OffloaddError
from offloadd.model.status import RETRY_AFTER_KEY, code_of

log = structlog.get_logger()


class CallGate:
    """How many calls of our services run at once. Health checks are not among them: an orchestrator that is refused one kills a daemon that works."""

    def __init__(self, calls_max: int) -> None:
        self.calls_max = calls_max
        self.count = 0
        self.refused_count = 0

    def enter(self) -> None:
        """Count the present task's call until the task ends. Raises LimitExceeded, at once, beyond the limit."""
        if self.count >= self.calls_max:
            self.refused_count += 1
            raise LimitExceeded(f"{self.count} calls are in flight; calls_max is {self.calls_max}; repeat after a pause")
        # gRPC runs interceptors in the task of the call, which ends with it whatever becomes of it.
        call = asyncio.current_task()
        assert call is not None
        self.count += 1
        call.add_done_callback(self._leave)

    def _leave(self, _: "asyncio.Task[Any]") -> None:
        self.count -= 1


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of ours. Errors of offloadd.errors become their code and message; anything else is our bug: INTERNAL, logged with its traceback.

    A call takes its place in the gate before its message is read, so that no more messages than that are in memory, and a refused one costs no reading.
    `uncounted`: methods that take none.
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
        if method not in self._uncounted:
            try:
                self._gate.enter()
            except LimitExceeded as error:
                return _refusal(error)
        if handler.response_streaming:
            inner_stream = handler.unary_stream

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
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
                return await inner(request, context)
            except OffloaddError as error:
                return await _abort(context, error)
            except grpc.aio.AbortError:
                raise
            except Exception:
                return await _abort_bug(context, method)

        return grpc.unary_unary_rpc_method_handler(unary, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)


def _refusal(error: OffloaddError) -> Any:
    """A handler that answers with this error. Of streams, since those leave it to the handler to read messages; on the wire all calls are alike."""

    async def refuse(_: Any, context: Any) -> None:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


async def _abort(context: Any, error: OffloaddError) -> None:
    hint = ((RETRY_AFTER_KEY, str(round(error.retry_after_s * 1e3))),) if error.retry_after_s is not None else ()
    await context.abort(getattr(grpc.StatusCode, code_of(error)), str(error), hint)


async def _abort_bug(context: Any, method: str) -> None:
    log.exception("bug: a call failed in a way that has no code", method=method)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the daemon's log has the traceback")

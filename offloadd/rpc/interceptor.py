"""Turns exceptions into gRPC statuses: the one place where an error becomes a code."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog

from offloadd.errors import OffloaddError
from offloadd.model.status import code_of

log = structlog.get_logger()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler. Errors of offloadd.errors become their code and message; anything else is our bug: INTERNAL, logged with its traceback."""

    async def intercept_service(self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Wrap the handler that serves this call."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/offloadd."):
            return handler
        method = handler_call_details.method
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


async def _abort(context: Any, error: OffloaddError) -> None:
    await context.abort(getattr(grpc.StatusCode, code_of(error)), str(error))


async def _abort_bug(context: Any, method: str) -> None:
    log.exception("bug: a call failed in a way that has no code", method=method)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the daemon's log has the traceback")

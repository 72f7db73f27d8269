"""Tells watchers of each call: when it begins, and how it ended. Stands before everything else that a call passes, so that refused ones are told as well."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

import grpc

from offloadd import clock

CODE_NAMES = tuple(code.name for code in grpc.StatusCode)


class CallWatcher(Protocol):
    """Hears of calls, on the event loop and in the task of each. Must not block, and must not raise."""

    def begun(self, method: str, context: Any) -> Any:
        """A call begins. What this returns comes back in `ended`."""

    def ended(self, method: str, begun: Any, code: str, seconds: float) -> None:
        """It ended with this status."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of calls with these `names`. `is_whole(message)`: whether it is the last of a stream, after which a caller who hangs up has all."""

    def __init__(self, watchers: Sequence[CallWatcher], names: Collection[str], is_whole: Callable[[Any], bool]) -> None:
        self._watchers = watchers
        self._names = frozenset(names)
        self._is_whole = is_whole

    async def intercept_service(self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Wrap the handler that serves this call."""
        handler = await continuation(handler_call_details)
        service, _, name = handler_call_details.method.rpartition("/")
        if handler is None or not service.startswith("/offloadd.") or name not in self._names:
            return handler
        if handler.response_streaming:
            inner_stream = handler.unary_stream

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                watched, code, whole = _Watched(self._watchers, name, context), "CANCELLED", False
                try:
                    async for response in inner_stream(request, context):
                        whole = self._is_whole(response)
                        yield response
                    code = "OK"
                except Exception:
                    code = _code_of(context)
                    raise
                finally:
                    watched.end("OK" if whole else code)

            return grpc.unary_stream_rpc_method_handler(
                stream, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
            )
        inner = handler.unary_unary

        async def unary(request: Any, context: Any) -> Any:
            watched, code = _Watched(self._watchers, name, context), "CANCELLED"
            try:
                answer = await inner(request, context)
                code = "OK"
                return answer
            except Exception:
                code = _code_of(context)
                raise
            finally:
                watched.end(code)

        return grpc.unary_unary_rpc_method_handler(unary, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)


class _Watched:
    def __init__(self, watchers: Sequence[CallWatcher], method: str, context: Any) -> None:
        self._method = method
        self._started_ns = clock.monotonic_ns()
        self._watchers = [(watcher, watcher.begun(method, context)) for watcher in watchers]

    def end(self, code: str) -> None:
        seconds = (clock.monotonic_ns() - self._started_ns) / 1e9
        for watcher, begun in self._watchers:
            watcher.ended(self._method, begun, code, seconds)


def _code_of(context: Any) -> str:
    """That with which a handler aborted its call."""
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"

"""A collector that works: OTLP over gRPC on loopback, which keeps what it is sent, or holds it up."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

WAIT_S = 60.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`go_on` cleared: it takes calls and answers none."""

    def __init__(self) -> None:
        self.messages: list[pb.ExportTraceServiceRequest] = []
        #: Whether a message has come.
        self.entered = False
        self.go_on = threading.Event()
        self.go_on.set()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        self.entered = True
        self.go_on.wait(WAIT_S)
        self.messages.append(request)
        return pb.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Any]:
        return [span for message in list(self.messages) for group in message.resource_spans for scope in group.scope_spans for span in scope.spans]

    def named(self, name: str, count: int = 1) -> list[Any]:
        """The spans of this name, once there are so many."""
        wait_until(lambda: sum(span.name == name for span in self.spans) >= count, f"{count} spans {name}")
        return [span for span in self.spans if span.name == name]

    def close(self) -> None:
        self.go_on.set()
        self._server.stop(0).wait()


def attributes(span: Any) -> dict[str, Any]:
    """Its attributes as plain values."""

    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(item) for item in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {attribute.key: value(attribute.value) for attribute in span.attributes}


def wait_until(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"{what} did not come"
        time.sleep(0.01)

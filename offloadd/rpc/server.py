"""The two gRPC servers on unix sockets: engines' and operators', with health and reflection."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from offloadd.rpc.admin import AdminServicer
from offloadd.rpc.interceptor import CallGate, ErrorInterceptor
from offloadd.rpc.servicer import OffloadServicer
from offloadd.units import KIB
from offloadd.v1 import admin_pb2, admin_pb2_grpc, offload_pb2, offload_pb2_grpc

OFFLOAD_SERVICE = offload_pb2.DESCRIPTOR.services_by_name["OffloadService"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

#: As many as sessions, for which there is a limit of their own, and for as long as these live.
_UNCOUNTED = frozenset({f"/{OFFLOAD_SERVICE}/OpenSession"})

#: For each call that may run, the calls that wait within gRPC until the event loop takes them or refuses them, thousands a second. Beyond that gRPC drops some,
#: health checks among them, and tells their clients nothing but CANCELLED; its own default is 1,000 in all.
PENDING_PER_CALL = 16

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the clients of one server may use, all together but for `calls_per_connection_max`."""

    message_bytes_max: int
    calls_max: int
    calls_per_connection_max: int
    connections_max: int


class GrpcServer:
    """One server on one unix socket. `mode` is the socket's: who may connect is decided by the file system, who is who by the attach socket."""

    def __init__(self, path: Path, *, mode: int, limits: ServerLimits) -> None:
        self._path = path
        self._mode = mode
        self.health = health.aio.HealthServicer()
        self.gate = CallGate(limits.calls_max)
        self._server = grpc.aio.server(
            # Not maximum_concurrent_rpcs: that limit refuses health checks, too, and says nothing of a retry.
            interceptors=[ErrorInterceptor(self.gate, _UNCOUNTED)],
            options=[
                ("grpc.max_receive_message_length", limits.message_bytes_max),
                ("grpc.max_send_message_length", limits.message_bytes_max),
                ("grpc.max_concurrent_streams", limits.calls_per_connection_max),
                ("grpc.max_allowed_incoming_connections", limits.connections_max),
                ("grpc.server.max_pending_requests", PENDING_PER_CALL * limits.calls_max),
                ("grpc.server.max_pending_requests_hard_limit", PENDING_PER_CALL * limits.calls_max),
                # So much of a message is taken off its connection before it may be read. By default gRPC makes room for whole messages once it has seen some;
                # now one of 20 KiB or more takes 0.15 ms longer.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", 16 * KIB),
                # For each connection gRPC keeps a buffer as long as what it once read at a time, some 400 KiB; with this a third of a thousand of them less.
                ("grpc.experimental.tcp_max_read_chunk_size", 32 * KIB),
                # A peer that connects and says nothing is gone after this.
                ("grpc.server_handshake_timeout_ms", 2000),
                ("grpc.so_reuseport", 0),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)

    def add_offload(self, servicer: OffloadServicer) -> None:
        """Serve engines."""
        offload_pb2_grpc.add_OffloadServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        self._reflect(OFFLOAD_SERVICE)

    def add_admin(self, servicer: AdminServicer) -> None:
        """Serve operators."""
        admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        self._reflect(ADMIN_SERVICE)

    def _reflect(self, service: str) -> None:
        self._service = service
        names: tuple[Any, ...] = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Bind and serve. The daemon holds its lock by now: a socket file that lies there is a dead daemon's."""
        self._path.unlink(missing_ok=True)
        # gRPC makes the socket with 0777 & ~umask; chmod afterwards would leave a moment in which anybody may connect.
        old_mask = os.umask(0o777 & ~self._mode)
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
            await self._server.start()
        finally:
            os.umask(old_mask)
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        """What the health service says, for the service and for the server."""
        for name in (self._service, ""):
            await self.health.set(name, _SERVING if serving else _NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Stop taking calls; those that run have `grace_s`."""
        await self._server.stop(grace_s)
        self._path.unlink(missing_ok=True)

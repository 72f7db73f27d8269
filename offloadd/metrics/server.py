"""The Prometheus endpoint: HTTP on a loopback address, with a bounded number of connections."""

import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from offloadd.errors import ConfigError

#: Threads, one a connection. A scraper needs one; any local user may connect.
CONNECTIONS_MAX = 8
#: A connection that says nothing is closed after this time.
SILENCE_S_MAX = 5.0


class MetricsServer:
    """Serves one registry from threads of its own."""

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int, connections_max: int = CONNECTIONS_MAX) -> None:
        self._registry = registry
        self._address = (host, port)
        self._connections_max = connections_max
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Bind and serve. Raises `ConfigError` if the address can't be bound."""
        host, port = self._address
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            server = _Server(family, address[:2], self._connections_max)
        except OSError as error:
            raise ConfigError(f"daemon.metrics_listen is {host}:{port}, which can't be bound: {error.strerror}") from error
        server.set_app(make_wsgi_app(self._registry))
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port really bound; only while open."""
        assert self._server is not None
        return self._server.server_port

    def close(self) -> None:
        """Stop listening. Idempotent; connections being answered end on their own within `SILENCE_S_MAX`."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is None or thread is None:
            return
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # With the default of 5 a burst of connections waits a second for the repeated SYN before it can be refused.
    request_queue_size = 64
    # Closing does not wait for a silent client.
    block_on_close = False

    def __init__(self, family: int, address: Any, connections_max: int) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(connections_max)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the resolver for the host's name, which may take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "localhost", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or stayed silent is its own affair."""


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S_MAX

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""

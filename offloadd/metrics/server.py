"""The Prometheus endpoint: HTTP on a loopback address, with a bounded number of connections."""

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from offloadd import clock
from offloadd.errors import ConfigError

#: Threads, one a connection. A scraper needs one; any local user may connect.
CONNECTIONS_MAX = 8
#: A connection that says nothing is closed after this time.
SILENCE_S_MAX = 5.0
#: A page is good for this long. Making one takes 10 ms a thousand lines, in which the event loop shares the interpreter with it: connections that ask again and
#: again, as any local user's may, would else compete with the loop all the time. Scrapers ask every second at most.
PAGE_S = 0.25


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
        server.set_app(_Page(self._registry))
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


class _Page:
    """The WSGI application: the registry as text, in the format that the caller prefers, made by one thread at a time and kept for PAGE_S.

    Not compressed: on loopback that would cost more than it saves.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        #: (good until, text) by content type; there are three.
        self._made: dict[str, tuple[float, bytes]] = {}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET")])
            return [b""]
        encode, content_type = choose_encoder(environ.get("HTTP_ACCEPT", ""))
        with self._lock:
            until_s, text = self._made.get(content_type, (0.0, b""))
            now_s = clock.monotonic_s()
            if now_s >= until_s:
                text = encode(self._registry)
                self._made[content_type] = (now_s + PAGE_S, text)
        start_response("200 OK", [("Content-Type", content_type)])
        return [text]


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

"""The operators' client: looks at the daemon and steers it, over the admin socket. Answers are the protocol's own messages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from offloadd.client import calls
from offloadd.errors import DeadlineExpired
from offloadd.model.runtime import ADMIN_SOCKET, runtime_dir_default
from offloadd.v1 import admin_pb2 as pb
from offloadd.v1.admin_pb2_grpc import AdminServiceStub


class AdminClient:
    """Blocking. Errors are those of `offloadd.errors`: Unavailable when no daemon serves the directory, NotAllowed, DeadlineExpired after `timeout_s`."""

    def __init__(self, runtime_dir: Path | str | None = None, *, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        directory = Path(runtime_dir) if runtime_dir is not None else runtime_dir_default()
        self._channel = grpc.insecure_channel(calls.grpc_target(directory, ADMIN_SOCKET), options=calls.CHANNEL_OPTIONS)
        self._stub: Any = AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def status(self) -> pb.StatusResponse:
        """The state of the daemon."""
        answer: pb.StatusResponse = self._ask(self._stub.Status, pb.StatusRequest())
        return answer

    def volumes(self) -> list[pb.VolumeStatus]:
        """The volumes, in the order of the configuration."""
        return list(self._ask(self._stub.Volumes, pb.VolumesRequest()).volumes)

    def drain(self, *, timeout_s: float | None = None) -> int:
        """Have the daemon spill kept blocks and exit; the blocks spilled. Spilling takes as long as it takes: without `timeout_s` this waits.

        Raises DeadlineExpired after `timeout_s`; the drain goes on.
        """
        while True:
            try:
                with calls.Errors():
                    return int(self._stub.Drain(pb.DrainRequest(), timeout=timeout_s).spilled_count)
            except DeadlineExpired:
                # Each call ends by the daemon's default deadline; the next one waits for the same drain.
                if timeout_s is not None:
                    raise

    def drop_namespace(self, namespace_id: bytes) -> int:
        """Forget a namespace for ever; the blocks dropped. Raises UnknownRegion if there is no such namespace, Unavailable if a volume could not be told.

        DeadlineExpired: it is dropped, but a volume has not answered yet; a repeated call waits for the same drop.
        """
        return int(self._ask(self._stub.DropNamespace, pb.DropNamespaceRequest(namespace_id=namespace_id)).dropped_count)

    def watch_events(self) -> Iterator[pb.WatchEventsResponse]:
        """What happens to blocks from the first `next` on. Ends with Unavailable when the daemon goes; closing the iterator ends the watch."""
        stream = self._stub.WatchEvents(pb.WatchEventsRequest())
        try:
            with calls.Errors():
                yield from stream
        finally:
            stream.cancel()

    def close(self) -> None:
        """Close the channel. May be called again."""
        self._channel.close()

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: Any, request: object) -> Any:
        with calls.Errors():
            return method(request, timeout=self._timeout_s)

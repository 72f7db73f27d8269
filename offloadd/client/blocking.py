"""The blocking client: one session of one process, held open by a thread, attached again when the daemon was restarted."""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypeVar

import grpc

from offloadd.client import calls, convert
from offloadd.client.attach import AttachLink
from offloadd.client.cuda.memory import DeviceMemory
from offloadd.client.memory import HostMemory
from offloadd.client.values import Blocks, Capabilities, EvictResult, LookupResult, PrefetchResult, Region, RestorePart, RestoreResult, ShardName
from offloadd.errors import DeadlineExpired, LimitExceeded, OffloaddError, Unavailable
from offloadd.model.device_event import EventName
from offloadd.model.enums import AckLevel, Path, Priority, Tier
from offloadd.model.namespace import Namespace
from offloadd.model.region import Plane
from offloadd.model.runtime import GRPC_SOCKET, runtime_dir_default
from offloadd.v1 import offload_pb2 as pb
from offloadd.v1.offload_pb2_grpc import OffloadServiceStub

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Link:
    """A session that lives, with all that hangs on it. A restart of the daemon makes another."""

    attach: AttachLink
    channel: grpc.Channel
    stub: Any
    stream: Any
    metadata: calls.Metadata = field(repr=False)
    capabilities: Capabilities
    memory_ids: dict[HostMemory | DeviceMemory, bytes] = field(default_factory=dict)
    registered: set[Region] = field(default_factory=set)
    #: Streams of restores that were answered whole; only the status of the call follows, and nobody waits for it.
    answered: "deque[Any]" = field(default_factory=deque)

    def let_go(self) -> None:
        """Give up what is left of answered streams."""
        with suppress(IndexError):
            while True:
                self.answered.pop().cancel()

    def lost(self) -> bool:
        """Whether the session is over: the daemon hung up on the attach socket, or its stream ended."""
        return self.attach.wait_lost(calls.LOST_WAIT_S) or not self.stream.is_active()

    def close(self) -> None:
        """End the session."""
        self.stream.cancel()
        self.channel.close()
        self.attach.close()


class Client:
    """A session with the daemon. Threads may share it. Errors are those of `offloadd.errors`; a block that was not moved is an outcome, not an error.

    A call that fails because the daemon went away is repeated once, after attaching again (for up to `timeout_s`), handing over the memories and
    registering all regions again. Leases and keeps of the old session are gone then. After any error of `restore` the destinations are undefined.
    """

    def __init__(self, *, runtime_dir: FilePath, instance: str, process: str, timeout_s: float) -> None:
        self._runtime_dir = runtime_dir
        self._instance = instance
        self._process = process
        self._timeout_s = timeout_s
        self._link: _Link | None = None
        self._attached_before = False
        self._link_lock = threading.Lock()
        self._region_lock = threading.Lock()
        self._closing = threading.Event()
        #: Registered again on each new link.
        self._regions: list[Region] = []
        # The finalizer also runs at interpreter exit and may not hold the client itself.
        self._open_links: set[_Link] = set()
        self._finalizer = weakref.finalize(self, _close_links, self._open_links)

    @classmethod
    def connect(cls, runtime_dir: FilePath | str | None = None, *, instance: str, process: str = "", timeout_s: float = 10.0) -> "Client":
        """Attach to the daemon of `runtime_dir`, waiting for it up to `timeout_s`. Processes of one engine name the same `instance`. Raises Unavailable."""
        made = cls(
            runtime_dir=FilePath(runtime_dir) if runtime_dir is not None else runtime_dir_default(), instance=instance, process=process, timeout_s=timeout_s
        )
        try:
            made._live()
        except BaseException:
            made.close()
            raise
        return made

    @property
    def session_name(self) -> str:
        """Public name of the present session, for logs; empty while there is none."""
        link = self._link
        return link.attach.session if link is not None else ""

    @property
    def tenant(self) -> str:
        """The tenant that the daemon takes this process for; empty while there is no session."""
        link = self._link
        return link.attach.tenant if link is not None else ""

    def register_region(
        self,
        *,
        block_count: int,
        planes: Sequence[Plane],
        memories: Sequence[HostMemory | DeviceMemory],
        namespace: Namespace,
        cache_group: int = 0,
        deadline_s: float | None = None,
    ) -> Region:
        """Register memory in which `block_count` blocks lie, all of it on one device.

        Raises InvalidRequest, LimitExceeded, PathUnavailable (the daemon does not serve the device), Unavailable, DeadlineExpired; nothing changed then.
        """
        region = Region(convert.device_of(memories), cache_group, block_count, tuple(planes), tuple(memories), namespace)
        with self._region_lock:
            # In the list before the call: a reconnect in between registers it with the others, and `registered` keeps it from being done twice.
            self._regions.append(region)
            try:
                self._call(lambda link: self._register(link, region, deadline_s))
            except BaseException:
                self._regions.remove(region)
                link = self._link
                if link is not None:
                    # What was refused must not keep GPU memory. If the session is over, nothing does.
                    with suppress(OffloaddError):
                        self._detach(link, region)
                raise
        return region

    def unregister_region(self, region: Region, *, deadline_s: float | None = None) -> None:
        """Unregister; afterwards no mapping of it is left in the daemon, and its memory may be reused or closed. May be repeated.

        Raises DeadlineExpired if it can't be told in time that nothing is mapped any more: repeat, and do not reuse the memory before.
        """
        with self._region_lock:
            if region not in self._regions:
                return
            self._regions.remove(region)
            try:
                self._call(lambda link: self._unregister(link, region, deadline_s))
            except DeadlineExpired:
                self._regions.append(region)
                raise
            region.region_id = b""

    def evict(
        self,
        blocks: Blocks | Sequence[Blocks],
        *,
        ack: AckLevel = AckLevel.DEFAULT,
        tier: Tier = Tier.ANY,
        path: Path = Path.AUTO,
        require_path: bool = False,
        keep: bool = False,
        keep_ttl_s: float | None = None,
        priority: Priority = Priority.DEFAULT,
        deadline_s: float | None = None,
        request_id: str = "",
        source_ready: EventName = b"",
    ) -> EvictResult:
        """Copy blocks out of the region. When it returns the sources may be reused, save those QUARANTINED; with ack DURABLE they are on a volume.

        `source_ready`, for a region on a GPU: what the copies wait for (`offloadd.client.cuda`), the handle of an event, recorded before, or a flag's value.
        """

        def work(link: _Link) -> EvictResult:
            request = convert.evict_request(
                blocks,
                ack=ack,
                tier=tier,
                path=path,
                require_path=require_path,
                keep=keep,
                keep_ttl_s=keep_ttl_s,
                priority=priority,
                deadline_s=deadline_s,
                request_id=request_id,
                source_ready=source_ready,
            )
            return convert.evict_result(self._unary(link, link.stub.Evict, request, deadline_s), convert.block_count(blocks))

        return self._call(work)

    def restore(
        self,
        blocks: Blocks | Sequence[Blocks],
        *,
        path: Path = Path.AUTO,
        require_path: bool = False,
        consume: bool = False,
        priority: Priority = Priority.DEFAULT,
        deadline_s: float | None = None,
        request_id: str = "",
        destination_free: EventName = b"",
    ) -> RestoreResult:
        """Copy blocks into the region. Only destinations with RESTORED hold what was asked for. With `consume` the instance's keeps of them end.

        `destination_free`: as `source_ready` of `evict`, for work that still uses the destinations.
        """
        options: dict[str, Any] = {
            "path": path,
            "require_path": require_path,
            "consume": consume,
            "priority": priority,
            "deadline_s": deadline_s,
            "request_id": request_id,
            "destination_free": destination_free,
        }
        return self._call(lambda link: convert.restore_result(self._restore_parts(link, blocks, options)))

    def restore_stream(
        self,
        blocks: Blocks | Sequence[Blocks],
        *,
        path: Path = Path.AUTO,
        require_path: bool = False,
        consume: bool = False,
        priority: Priority = Priority.DEFAULT,
        deadline_s: float | None = None,
        request_id: str = "",
        destination_free: EventName = b"",
    ) -> Generator[RestorePart, None, None]:
        """As `restore`, but blocks come as soon as they are there, in order. Sent at the first `next`; closing the iterator early cancels the rest.

        Repeated after a restart of the daemon only if nothing was yielded yet.
        """
        options: dict[str, Any] = {
            "path": path,
            "require_path": require_path,
            "consume": consume,
            "priority": priority,
            "deadline_s": deadline_s,
            "request_id": request_id,
            "destination_free": destination_free,
        }
        link, begun = self._live(), False
        try:
            with closing(self._attempt_parts(link, blocks, options)) as parts:
                for part in parts:
                    begun = True
                    yield part
            return
        except calls.RECOVERABLE as error:
            if begun:
                raise
            link = self._recover(link, error)
        with closing(self._attempt_parts(link, blocks, options)) as parts:
            yield from parts

    def lookup(
        self,
        shards: Sequence[Region | ShardName],
        hashes: Sequence[bytes],
        *,
        membership: bool = False,
        lease_s: float | None = None,
        prefill_tokens_per_s: float = 0.0,
    ) -> LookupResult:
        """The longest prefix of `hashes` that all shards hold (or, with `membership`, which of them). With `lease_s` they stay for that long."""

        def work(link: _Link) -> LookupResult:
            request = convert.lookup_request(shards, hashes, membership=membership, lease_s=lease_s, prefill_tokens_per_s=prefill_tokens_per_s)
            return convert.lookup_result(self._unary(link, link.stub.Lookup, request))

        return self._call(work)

    def prefetch(self, shards: Sequence[Region | ShardName], hashes: Sequence[bytes]) -> PrefetchResult:
        """Have blocks copied from volumes into the arena. Does not wait for the copies."""
        return self._call(lambda link: convert.prefetch_result(self._unary(link, link.stub.Prefetch, convert.prefetch_request(shards, hashes))))

    def release(self, shards: Sequence[Region | ShardName], hashes: Sequence[bytes]) -> int:
        """End keeps and leases of the engine instance on these blocks; how many there were."""
        return self._call(lambda link: int(self._unary(link, link.stub.Release, convert.release_request(shards, hashes)).released_count))

    def release_all(self) -> int:
        """End all keeps and leases of the engine instance; how many there were."""
        return self._call(lambda link: int(self._unary(link, link.stub.Release, pb.ReleaseRequest(all=True)).released_count))

    def cancel(self, request_id: str) -> bool:
        """Cancel an evict or restore that another thread runs; its call returns with outcomes. Whether it was running."""
        return self._call(lambda link: bool(self._unary(link, link.stub.Cancel, pb.CancelRequest(request_id=request_id)).found))

    def capabilities(self) -> Capabilities:
        """Limits, tiers, paths and the bandwidths measured so far."""
        return self._call(lambda link: convert.capabilities(self._unary(link, link.stub.GetCapabilities, pb.GetCapabilitiesRequest())))

    def close(self) -> None:
        """End the session; calls that run fail with Unavailable. May be called again, and from any thread."""
        self._closing.set()
        with self._link_lock:
            self._link = None
            self._finalizer()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unary(self, link: _Link, method: Callable[..., Any], request: object, deadline_s: float | None = None) -> Any:
        return method(request, timeout=calls.timeout_s(link.capabilities, deadline_s), metadata=calls.traced(link.metadata))

    def _bounded(self, link: _Link, method: Callable[..., Any], request: object, deadline_s: float | None) -> Any:
        """A call whose request has no field for a deadline: gRPC's is the one that the daemon answers by."""
        return method(request, timeout=calls.deadline_s(link.capabilities, deadline_s), metadata=calls.traced(link.metadata))

    def _restore_parts(self, link: _Link, blocks: Blocks | Sequence[Blocks], options: dict[str, Any]) -> Generator[RestorePart, None, None]:
        parser = convert.RestoreParser(convert.block_count(blocks))
        stream = self._unary(link, link.stub.Restore, convert.restore_request(blocks, **options), options["deadline_s"])
        # While the daemon works: to let go of a stream takes as long as a fifth of what the client adds to a restore of one block.
        link.let_go()
        try:
            for message in stream:
                yield parser.part(message)
                if parser.complete:
                    break
        finally:
            if parser.complete:
                link.answered.append(stream)
            else:
                stream.cancel()
        parser.end()

    def _attempt_parts(self, link: _Link, blocks: Blocks | Sequence[Blocks], options: dict[str, Any]) -> Generator[RestorePart, None, None]:
        with self._errors(link):
            yield from self._restore_parts(link, blocks, options)

    def _register(self, link: _Link, region: Region, deadline_s: float | None = None) -> None:
        if region in link.registered:
            return
        for memory in region.memories:
            if convert.is_attached(memory) and memory not in link.memory_ids:
                link.memory_ids[memory] = link.attach.hand_over(memory)
        request = convert.register_request(region, link.memory_ids)
        convert.take_registered(region, self._bounded(link, link.stub.RegisterRegion, request, deadline_s))
        link.registered.add(region)

    def _detach(self, link: _Link, region: Region) -> None:
        """Take back the region's memories that no other region uses."""
        for memory in region.memories:
            if memory in link.memory_ids and not any(memory in other.memories for other in self._regions):
                link.attach.detach_memory(link.memory_ids.pop(memory))

    def _unregister(self, link: _Link, region: Region, deadline_s: float | None) -> None:
        if region in link.registered:
            self._bounded(link, link.stub.UnregisterRegion, pb.UnregisterRegionRequest(region_id=region.region_id), deadline_s)
            link.registered.discard(region)
        self._detach(link, region)

    def _call(self, work: Callable[[_Link], T]) -> T:
        link = self._live()
        try:
            with self._errors(link):
                return work(link)
        except calls.RECOVERABLE as error:
            link = self._recover(link, error)
        with self._errors(link):
            return work(link)

    def _errors(self, link: _Link) -> calls.Errors:
        return calls.Errors(lambda: link is self._link)

    def _live(self) -> _Link:
        return self._link or self._reconnect(None)

    def _recover(self, link: _Link, error: OffloaddError) -> _Link:
        if isinstance(error, Unavailable) and link is self._link and not link.lost():
            return link
        return self._reconnect(link)

    def _reconnect(self, dead: _Link | None) -> _Link:
        """The link to use instead of `dead`; another thread may have made it already."""
        with self._link_lock:
            if self._link is not None and self._link is not dead:
                return self._link
            self._link = None
            if dead is not None and dead in self._open_links:
                self._open_links.discard(dead)
                dead.close()
            # After a restart the daemon may still count the old session for a moment.
            passing = (*calls.RECOVERABLE, LimitExceeded) if self._attached_before else calls.RECOVERABLE
            end_s = time.monotonic() + self._timeout_s
            for pause_s in calls.backoff_s():
                if self._closing.is_set():
                    raise Unavailable("the client is closed")
                try:
                    self._link = self._open(max(0.1, end_s - time.monotonic()))
                    self._attached_before = True
                    return self._link
                except passing:
                    if time.monotonic() + pause_s > end_s:
                        raise
                self._closing.wait(pause_s)
            raise AssertionError("unreachable: the back-off never ends")

    def _open(self, timeout_s: float) -> _Link:
        attach = AttachLink.connect(self._runtime_dir, self._instance, self._process, timeout_s)
        channel = grpc.insecure_channel(calls.grpc_target(self._runtime_dir, GRPC_SOCKET), options=calls.BLOCKING_CHANNEL_OPTIONS)
        stub = OffloadServiceStub(channel)  # type: ignore[no-untyped-call]
        metadata = ((calls.SESSION_KEY, attach.token),)
        stream = stub.OpenSession(pb.OpenSessionRequest(), metadata=metadata)
        first: queue.SimpleQueue[pb.OpenSessionResponse | grpc.RpcError | None] = queue.SimpleQueue()
        # A daemon thread: it waits in gRPC for the life of the session and may not hold up the interpreter's exit.
        threading.Thread(target=_hold, args=(stream, first), name="offloadd-session", daemon=True).start()
        try:
            try:
                opened = first.get(timeout=timeout_s)
            except queue.Empty:
                raise Unavailable(f"the daemon did not open the session within {timeout_s:.1f} s") from None
            if isinstance(opened, grpc.RpcError):
                raise calls.error_of(opened) from opened
            if opened is None:
                raise Unavailable("the daemon closed the session's stream")
            link = _Link(attach, channel, stub, stream, metadata, convert.capabilities(opened.capabilities))
            with calls.Errors():
                for region in self._regions:
                    self._register(link, region)
            self._open_links.add(link)
            return link
        except BaseException:
            stream.cancel()
            channel.close()
            attach.close()
            raise


def _hold(stream: Any, first: "queue.SimpleQueue[pb.OpenSessionResponse | grpc.RpcError | None]") -> None:
    """Read the session's stream to its end: heartbeats that nobody reads would fill the flow control window."""
    try:
        for message in stream:
            first.put(message)
            break
        for _ in stream:
            continue
    except grpc.RpcError as error:
        first.put(error)
    else:
        first.put(None)


def _close_links(links: set[_Link]) -> None:
    while links:
        links.pop().close()

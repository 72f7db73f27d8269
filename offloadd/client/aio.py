"""The asyncio client: as the blocking one, for engines whose scheduler lives in an event loop."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypeVar

import grpc
import grpc.aio

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
    channel: grpc.aio.Channel
    stub: Any
    stream: Any
    #: Reads the session's stream to its end; held here, since the loop holds tasks weakly.
    reader: "asyncio.Task[None]"
    metadata: calls.Metadata = field(repr=False)
    capabilities: Capabilities
    memory_ids: dict[HostMemory | DeviceMemory, bytes] = field(default_factory=dict)
    registered: set[Region] = field(default_factory=set)

    async def lost(self) -> bool:
        """Whether the session is over: the daemon hung up on the attach socket, or its stream ended."""
        return await asyncio.to_thread(self.attach.wait_lost, calls.LOST_WAIT_S) or bool(self.stream.done())

    async def close(self) -> None:
        """End the session."""
        await _shut(self.attach, self.channel, self.stream)
        await self.reader


class AsyncClient:
    """A session with the daemon, for one event loop. What holds is said at `Client`, method by method; tasks may share it.

    Cancelling a task that awaits `evict` or `restore` cancels the call; its blocks count as QUARANTINED until another answer about them comes. To stop one in
    an orderly way use `cancel` with its `request_id`.
    """

    def __init__(self, *, runtime_dir: FilePath, instance: str, process: str, timeout_s: float) -> None:
        self._runtime_dir = runtime_dir
        self._instance = instance
        self._process = process
        self._timeout_s = timeout_s
        self._link: _Link | None = None
        self._attached_before = False
        self._link_lock = asyncio.Lock()
        self._region_lock = asyncio.Lock()
        self._closed = False
        #: Registered again on each new link.
        self._regions: list[Region] = []

    @classmethod
    async def connect(cls, runtime_dir: FilePath | str | None = None, *, instance: str, process: str = "", timeout_s: float = 10.0) -> "AsyncClient":
        """Attach to the daemon of `runtime_dir`, waiting for it up to `timeout_s`. Processes of one engine name the same `instance`. Raises Unavailable."""
        made = cls(
            runtime_dir=FilePath(runtime_dir) if runtime_dir is not None else runtime_dir_default(), instance=instance, process=process, timeout_s=timeout_s
        )
        await made._live()
        return made

    @property
    def session_name(self) -> str:
        """Public name of the present session, for logs; empty while there is none."""
        return self._link.attach.session if self._link is not None else ""

    @property
    def tenant(self) -> str:
        """The tenant that the daemon takes this process for; empty while there is no session."""
        return self._link.attach.tenant if self._link is not None else ""

    async def register_region(
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
        async with self._region_lock:
            # In the list before the call: a reconnect in between registers it with the others, and `registered` keeps it from being done twice.
            self._regions.append(region)
            try:
                await self._call(lambda link: self._register(link, region, deadline_s))
            except BaseException:
                self._regions.remove(region)
                if self._link is not None:
                    # What was refused must not keep GPU memory. If the session is over, nothing does.
                    with suppress(OffloaddError):
                        await self._detach(self._link, region)
                raise
        return region

    async def unregister_region(self, region: Region, *, deadline_s: float | None = None) -> None:
        """Unregister; afterwards no mapping of it is left in the daemon, and its memory may be reused or closed. May be repeated.

        Raises DeadlineExpired if it can't be told in time that nothing is mapped any more: repeat, and do not reuse the memory before.
        """
        async with self._region_lock:
            if region not in self._regions:
                return
            self._regions.remove(region)
            try:
                await self._call(lambda link: self._unregister(link, region, deadline_s))
            except DeadlineExpired:
                self._regions.append(region)
                raise
            region.region_id = b""

    async def evict(
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

        async def work(link: _Link) -> EvictResult:
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
            return convert.evict_result(await self._unary(link, link.stub.Evict, request, deadline_s), convert.block_count(blocks))

        return await self._call(work)

    async def restore(
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

        async def work(link: _Link) -> RestoreResult:
            return convert.restore_result([part async for part in self._restore_parts(link, blocks, options)])

        return await self._call(work)

    async def restore_stream(
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
    ) -> AsyncGenerator[RestorePart, None]:
        """As `restore`, but blocks come as soon as they are there, in order. Sent at the first `anext`; closing the iterator early cancels the rest.

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
        link, begun = await self._live(), False
        try:
            async with aclosing(self._attempt_parts(link, blocks, options)) as parts:
                async for part in parts:
                    begun = True
                    yield part
            return
        except calls.RECOVERABLE as error:
            if begun:
                raise
            link = await self._recover(link, error)
        async with aclosing(self._attempt_parts(link, blocks, options)) as parts:
            async for part in parts:
                yield part

    async def lookup(
        self,
        shards: Sequence[Region | ShardName],
        hashes: Sequence[bytes],
        *,
        membership: bool = False,
        lease_s: float | None = None,
        prefill_tokens_per_s: float = 0.0,
    ) -> LookupResult:
        """The longest prefix of `hashes` that all shards hold (or, with `membership`, which of them). With `lease_s` they stay for that long."""

        async def work(link: _Link) -> LookupResult:
            request = convert.lookup_request(shards, hashes, membership=membership, lease_s=lease_s, prefill_tokens_per_s=prefill_tokens_per_s)
            return convert.lookup_result(await self._unary(link, link.stub.Lookup, request))

        return await self._call(work)

    async def prefetch(self, shards: Sequence[Region | ShardName], hashes: Sequence[bytes]) -> PrefetchResult:
        """Have blocks copied from volumes into the arena. Does not wait for the copies."""

        async def work(link: _Link) -> PrefetchResult:
            return convert.prefetch_result(await self._unary(link, link.stub.Prefetch, convert.prefetch_request(shards, hashes)))

        return await self._call(work)

    async def release(self, shards: Sequence[Region | ShardName], hashes: Sequence[bytes]) -> int:
        """End keeps and leases of the engine instance on these blocks; how many there were."""

        async def work(link: _Link) -> int:
            return int((await self._unary(link, link.stub.Release, convert.release_request(shards, hashes))).released_count)

        return await self._call(work)

    async def release_all(self) -> int:
        """End all keeps and leases of the engine instance; how many there were."""

        async def work(link: _Link) -> int:
            return int((await self._unary(link, link.stub.Release, pb.ReleaseRequest(all=True))).released_count)

        return await self._call(work)

    async def cancel(self, request_id: str) -> bool:
        """Cancel an evict or restore that another task awaits; its call returns with outcomes. Whether it was running."""

        async def work(link: _Link) -> bool:
            return bool((await self._unary(link, link.stub.Cancel, pb.CancelRequest(request_id=request_id))).found)

        return await self._call(work)

    async def capabilities(self) -> Capabilities:
        """Limits, tiers, paths and the bandwidths measured so far."""

        async def work(link: _Link) -> Capabilities:
            return convert.capabilities(await self._unary(link, link.stub.GetCapabilities, pb.GetCapabilitiesRequest()))

        return await self._call(work)

    async def close(self) -> None:
        """End the session; calls that run fail with Unavailable. May be called again."""
        self._closed = True
        async with self._link_lock:
            link, self._link = self._link, None
            if link is not None:
                await link.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _unary(self, link: _Link, method: Callable[..., Any], request: object, deadline_s: float | None = None) -> Any:
        return await method(request, timeout=calls.timeout_s(link.capabilities, deadline_s), metadata=calls.traced(link.metadata))

    async def _bounded(self, link: _Link, method: Callable[..., Any], request: object, deadline_s: float | None) -> Any:
        """A call whose request has no field for a deadline: gRPC's is the one that the daemon answers by."""
        return await method(request, timeout=calls.deadline_s(link.capabilities, deadline_s), metadata=calls.traced(link.metadata))

    async def _restore_parts(self, link: _Link, blocks: Blocks | Sequence[Blocks], options: dict[str, Any]) -> AsyncGenerator[RestorePart, None]:
        parser = convert.RestoreParser(convert.block_count(blocks))
        timeout_s = calls.timeout_s(link.capabilities, options["deadline_s"])
        stream = link.stub.Restore(convert.restore_request(blocks, **options), timeout=timeout_s, metadata=calls.traced(link.metadata))
        try:
            async for message in stream:
                yield parser.part(message)
                if parser.complete:
                    break
        finally:
            stream.cancel()
        parser.end()

    async def _attempt_parts(self, link: _Link, blocks: Blocks | Sequence[Blocks], options: dict[str, Any]) -> AsyncGenerator[RestorePart, None]:
        with self._errors(link):
            async with aclosing(self._restore_parts(link, blocks, options)) as parts:
                async for part in parts:
                    yield part

    async def _register(self, link: _Link, region: Region, deadline_s: float | None = None) -> None:
        if region in link.registered:
            return
        for memory in region.memories:
            if convert.is_attached(memory) and memory not in link.memory_ids:
                link.memory_ids[memory] = await asyncio.to_thread(link.attach.hand_over, memory)
        request = convert.register_request(region, link.memory_ids)
        convert.take_registered(region, await self._bounded(link, link.stub.RegisterRegion, request, deadline_s))
        link.registered.add(region)

    async def _detach(self, link: _Link, region: Region) -> None:
        """Take back the region's memories that no other region uses."""
        for memory in region.memories:
            if memory in link.memory_ids and not any(memory in other.memories for other in self._regions):
                await asyncio.to_thread(link.attach.detach_memory, link.memory_ids.pop(memory))

    async def _unregister(self, link: _Link, region: Region, deadline_s: float | None) -> None:
        if region in link.registered:
            await self._bounded(link, link.stub.UnregisterRegion, pb.UnregisterRegionRequest(region_id=region.region_id), deadline_s)
            link.registered.discard(region)
        await self._detach(link, region)

    async def _call(self, work: Callable[[_Link], Awaitable[T]]) -> T:
        link = await self._live()
        try:
            with self._errors(link):
                return await work(link)
        except calls.RECOVERABLE as error:
            link = await self._recover(link, error)
        with self._errors(link):
            return await work(link)

    def _errors(self, link: _Link) -> calls.Errors:
        return calls.Errors(lambda: link is self._link)

    async def _live(self) -> _Link:
        return self._link or await self._reconnect(None)

    async def _recover(self, link: _Link, error: OffloaddError) -> _Link:
        if isinstance(error, Unavailable) and link is self._link and not await link.lost():
            return link
        return await self._reconnect(link)

    async def _reconnect(self, dead: _Link | None) -> _Link:
        """The link to use instead of `dead`; another task may have made it already."""
        async with self._link_lock:
            if self._link is not None and self._link is not dead:
                return self._link
            if self._link is not None:
                self._link = None
                assert dead is not None
                await dead.close()
            # After a restart the daemon may still count the old session for a moment.
            passing = (*calls.RECOVERABLE, LimitExceeded) if self._attached_before else calls.RECOVERABLE
            end_s = time.monotonic() + self._timeout_s
            for pause_s in calls.backoff_s():
                if self._closed:
                    raise Unavailable("the client is closed")
                try:
                    self._link = await self._open(max(0.1, end_s - time.monotonic()))
                    self._attached_before = True
                    return self._link
                except passing:
                    if time.monotonic() + pause_s > end_s:
                        raise
                await asyncio.sleep(pause_s)
            raise AssertionError("unreachable: the back-off never ends")

    async def _open(self, timeout_s: float) -> _Link:
        attach = await asyncio.to_thread(AttachLink.connect, self._runtime_dir, self._instance, self._process, timeout_s)
        channel = grpc.aio.insecure_channel(calls.grpc_target(self._runtime_dir, GRPC_SOCKET), options=calls.CHANNEL_OPTIONS)
        stub = OffloadServiceStub(channel)  # type: ignore[no-untyped-call]
        metadata = ((calls.SESSION_KEY, attach.token),)
        stream: Any = stub.OpenSession(pb.OpenSessionRequest(), metadata=metadata)
        try:
            with calls.Errors():
                try:
                    opened = await asyncio.wait_for(stream.read(), timeout_s)
                except TimeoutError:
                    raise Unavailable(f"the daemon did not open the session within {timeout_s:.1f} s") from None
                if opened is grpc.aio.EOF:
                    raise Unavailable("the daemon closed the session's stream")
                reader = asyncio.create_task(_hold(stream), name="offloadd-session")
                link = _Link(attach, channel, stub, stream, reader, metadata, convert.capabilities(opened.capabilities))
                for region in self._regions:
                    await self._register(link, region)
            return link
        except BaseException:
            await _shut(attach, channel, stream)
            raise


async def _shut(attach: AttachLink, channel: grpc.aio.Channel, stream: Any) -> None:
    stream.cancel()
    attach.close()
    await channel.close()


async def _hold(stream: Any) -> None:
    """Read the session's stream to its end: heartbeats that nobody reads would fill the flow control window."""
    try:
        while await stream.read() is not grpc.aio.EOF:
            continue
    except (grpc.RpcError, asyncio.CancelledError):
        # gRPC reports a stream that this client cancelled as CancelledError; either way the session is over, and the next call finds out.
        return

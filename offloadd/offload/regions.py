"""Registered engine memory, as the front knows it: which session's, which planes, and how its keys are made."""

import asyncio
import itertools
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from offloadd.errors import InvalidRequest, LimitExceeded, UnknownRegion
from offloadd.model.namespace import KeyMaker, Namespace
from offloadd.model.region import Layout, validate_layout
from offloadd.model.requests import BlockBatch
from offloadd.mover.messages import ChunkPiece, IpcPiece, Piece
from offloadd.offload.deadlines import result_by
from offloadd.offload.devices import Device
from offloadd.offload.mover_link import Mapping
from offloadd.offload.namespaces import NamespaceEntry
from offloadd.offload.sessions import AttachedMemory, Session, SessionTable
from offloadd.tiers.format import slot_bytes_for

REGION_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """`memory_bytes` of an allocation on a GPU, from `offset_bytes` on, which another process may open by its cudaIpcMemHandle."""

    ipc_handle: bytes
    offset_bytes: int
    memory_bytes: int


#: The memories of a region: ids of attached memfds on the host; on a GPU ids of attached chunks, or CUDA memory by handle.
Memories = tuple[bytes | CudaMemory, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """One cache group of one shard in one process. `number` names it between the daemon's processes, `region_id` to its client."""

    number: int
    region_id: bytes
    session: Session
    device: Device
    layout: Layout
    memory_ids: tuple[bytes, ...]
    cache_group: int
    namespace: NamespaceEntry
    keys: KeyMaker
    payload_bytes: int
    slot_bytes: int
    mapped_bytes: int
    #: Tokens in a block as the namespace says, 0 if it does not.
    block_tokens: int


class Regions:
    """All registered regions. Event-loop owned."""

    def __init__(self, sessions: SessionTable, *, regions_per_session_max: int, planes_per_region_max: int, payload_bytes_max: int) -> None:
        self._sessions = sessions
        self._regions_per_session_max = regions_per_session_max
        self._planes_per_region_max = planes_per_region_max
        self.payload_bytes_max = payload_bytes_max
        #: 0 is the arena's number in movers.
        self._numbers = itertools.count(1)
        self._by_number: dict[int, Region] = {}
        self._by_session: dict[str, dict[bytes, Region]] = {}
        #: Regions that were unregistered and may still be mapped, by id.
        self._leaving: dict[bytes, asyncio.Future[None]] = {}

    def new_number(self) -> int:
        """A number that no region has or had."""
        return next(self._numbers)

    def check(self, session: Session, device: Device, layout: Layout, memories: Memories) -> None:
        """Raise unless the session may register this; the mover checks the layout again against the mapping itself."""
        count = len(self.of_session(session))
        if count >= self._regions_per_session_max:
            raise LimitExceeded(f"session {session.name} has {count} regions; regions_per_session_max is {self._regions_per_session_max}")
        sizes = []
        for number, memory in enumerate(memories):
            found = memory if isinstance(memory, CudaMemory) else session.memories.get(memory)
            if found is None:
                assert isinstance(memory, bytes)
                raise InvalidRequest(f"memory {memory.hex()} was not attached by this session; send its descriptor over the attach socket first")
            chunks = found.chunks if isinstance(found, AttachedMemory) else None
            if (isinstance(found, CudaMemory) or chunks is not None) != device.is_gpu:
                kind = "CUDA memory" if device.is_gpu else "an attached memfd"
                raise InvalidRequest(f"memory {number} is not {kind}; a region on device {device.name} takes no other kind")
            if chunks is not None and chunks.device_uuid not in (device.uuid, device.name):
                raise InvalidRequest(f"memory {number} is on device {chunks.device_uuid}; the region is on device {device.name} ({device.uuid})")
            sizes.append(found.memory_bytes)
        validate_layout(layout, tuple(sizes), planes_max=self._planes_per_region_max)
        if layout.payload_bytes > self.payload_bytes_max:
            raise InvalidRequest(f"a block of this region has {layout.payload_bytes} bytes; payload_bytes_max is {self.payload_bytes_max}")

    async def add(
        self,
        session: Session,
        device: Device,
        layout: Layout,
        memories: Memories,
        *,
        cache_group: int,
        namespace: NamespaceEntry,
        block_tokens: int,
        deadline_s: float,
    ) -> Region:
        """Map a region in its mover and enter it. On an error, `DeadlineExpired` as well, nothing changed."""
        memory_ids = tuple(memory for memory in memories if isinstance(memory, bytes))
        attached: dict[bytes, AttachedMemory] = {}
        try:
            for memory_id in memory_ids:
                attached[memory_id] = self._sessions.use_memory(session, memory_id)
            used = [memory if isinstance(memory, CudaMemory) else attached[memory] for memory in memories]
            sizes = tuple(memory.memory_bytes for memory in used)
            region = Region(
                number=self.new_number(),
                region_id=secrets.token_bytes(REGION_ID_BYTES),
                session=session,
                device=device,
                layout=layout,
                memory_ids=memory_ids,
                cache_group=cache_group,
                namespace=namespace,
                keys=KeyMaker(namespace.namespace_id, cache_group),
                payload_bytes=layout.payload_bytes,
                slot_bytes=slot_bytes_for(layout.payload_bytes),
                mapped_bytes=sum(sizes),
                block_tokens=block_tokens,
            )
            await device.mover.map_region(
                Mapping(
                    region=region.number,
                    fds=tuple(fd for memory in used if isinstance(memory, AttachedMemory) for fd in memory.fds),
                    memory_bytes=sizes,
                    layout=layout,
                    pieces=tuple(piece for memory in used if (piece := _piece(memory)) is not None),
                ),
                deadline_s,
            )
            if session.ended:
                device.mover.unmap_region(region.number)
                raise UnknownRegion(f"session {session.name} ended while its region was being mapped")
        except BaseException:
            for memory_id in attached:
                self._sessions.disuse_memory(session, memory_id)
            raise
        self._by_number[region.number] = region
        self._by_session.setdefault(session.name, {})[region.region_id] = region
        return region

    def find(self, session: Session, region_id: bytes) -> Region:
        """The session's region of this id. Raises `UnknownRegion`, also for another session's region: it does not exist for this caller."""
        region = self._by_session.get(session.name, {}).get(region_id)
        if region is None:
            raise UnknownRegion(f"session {session.name} has no region {region_id.hex() or '(empty id)'}")
        return region

    def by_number(self, number: int) -> Region:
        """A region by its number. Raises `UnknownRegion` if it was unregistered meanwhile."""
        region = self._by_number.get(number)
        if region is None:
            raise UnknownRegion(f"region number {number} was unregistered while the request waited")
        return region

    async def remove(self, session: Session, region_id: bytes, deadline_s: float) -> None:
        """No request finds the session's region of this id from now on; when it returns no mapping is left. Does nothing for an id that is not there.

        Raises `DeadlineExpired` if the mover has not unmapped it in time; it will, and a repeated call waits for that.
        """
        region = self._by_session.get(session.name, {}).pop(region_id, None)
        if region is not None:
            self._by_number.pop(region.number, None)
            self._leaving[region_id] = unmapped = region.device.mover.unmap_region(region.number)
            unmapped.add_done_callback(lambda _: self._left(region))
        leaving = self._leaving.get(region_id)
        if leaving is not None:
            await result_by(deadline_s, leaving, "the region's mover did not unmap it by the deadline: its memory may not be reused yet; repeat")

    def _left(self, region: Region) -> None:
        del self._leaving[region.region_id]
        for memory_id in region.memory_ids:
            self._sessions.disuse_memory(region.session, memory_id)

    def of_batches(self, batches: Iterable[BlockBatch]) -> list[Region]:
        """The regions whose blocks a request names. Raises `UnknownRegion`."""
        return [self.by_number(batch.region) for batch in batches]

    def of_session(self, session: Session) -> list[Region]:
        """Regions of a session."""
        return list(self._by_session.get(session.name, {}).values())

    def forget_session(self, session: Session) -> None:
        """A session ends: its regions are not found any more, and movers unmap them. Its descriptors may be closed at once: no mover is sent them again."""
        for region in self._by_session.pop(session.name, {}).values():
            self._by_number.pop(region.number, None)
            region.device.mover.unmap_region(region.number)

    def __len__(self) -> int:
        return len(self._by_number)


def _piece(memory: CudaMemory | AttachedMemory) -> Piece | None:
    """How a mover opens it; None for a memfd, whose descriptor says all."""
    if isinstance(memory, CudaMemory):
        return IpcPiece(memory.ipc_handle, memory.offset_bytes)
    return ChunkPiece(memory.chunks.chunk_bytes, memory.chunks.offset_bytes) if memory.chunks is not None else None


def namespace_fields(namespace: Namespace) -> bytes:
    """The fields of a namespace as text for people who look at a volume; identity is the id alone."""
    parts = [f"model={namespace.model}", f"weights={namespace.weights}", f"engine={namespace.engine}", f"kv_dtype={namespace.kv_dtype}"]
    return " ".join(parts).encode()[:1024]

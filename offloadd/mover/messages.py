"""What front and mover say to each other.

Control socket (one per mover): map and unmap engine memory, add and remove lanes, fence moves. A second one is for the last message to a mover that is
replaced since it does not answer on the first.
Lane socket (one per mover and tier instance): jobs down, progress up. A lane's own threads read it, so a hung volume stops its own lane only.
"""

from enum import IntEnum

import msgspec

from offloadd.ipc.channel import MESSAGE_BYTES_MAX
from offloadd.model.device_event import EventName
from offloadd.model.slots import BLOCK_DTYPE
from offloadd.units import GIB

#: Blocks in one job: its packed records must fit into one packet.
JOB_BLOCKS_MAX = (MESSAGE_BYTES_MAX - 4096) // BLOCK_DTYPE.itemsize


class Operation(IntEnum):
    """What a job does with each of its blocks."""

    #: region → staging slot → volume (volume lane)
    EVICT = 1
    #: volume → staging slot → region (volume lane)
    RESTORE = 2
    #: arena → volume, straight from the arena's pages (volume lane)
    SPILL = 3
    #: volume → arena, verified in place before the front makes the arena slot visible (volume lane)
    PREFETCH = 4
    #: region → arena (arena lane)
    ARENA_EVICT = 5
    #: arena → region (arena lane)
    ARENA_RESTORE = 6
    #: volume → staging slot and no further: the ceiling that benchmarks compare with (volume lane)
    READ_ONLY = 7
    #: answered at once without touching a byte: the ceiling of the front itself (any lane)
    NULL = 8


class PlaneSpec(msgspec.Struct, frozen=True, array_like=True):
    """A `Plane` on the wire."""

    memory: int
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int


class IpcPiece(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """CUDA memory of an engine: 64 bytes of a cudaIpcMemHandle, and where in its allocation the memory begins."""

    handle: bytes
    offset_bytes: int


class ChunkPiece(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """CUDA memory of an engine in chunks of virtual memory management, one descriptor each, and where in them, side by side, the memory begins."""

    chunk_bytes: tuple[int, ...]
    offset_bytes: int


class OwnPiece(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Memory that the mover allocates on its GPU for the region and fills with random bytes: no engine's, to measure with."""


#: One memory on a GPU.
Piece = IpcPiece | ChunkPiece | OwnPiece


class Descriptors(msgspec.Struct, frozen=True, tag=True):
    """The first descriptors of the `MapRegion` that follows: more than one packet carries (FDS_MAX). Not answered."""


class MapRegion(msgspec.Struct, frozen=True, tag=True):
    """Map a region. On the host: one memfd per entry of `memory_bytes` as descriptors; on a GPU: one of `pieces`, and the descriptors of their chunks in
    order. Answered by `Mapped` or `NotMapped`.

    `region` is the front's number.
    """

    region: int
    memory_bytes: tuple[int, ...]
    block_count: int
    planes: tuple[PlaneSpec, ...]
    pieces: tuple[Piece, ...] = ()


class UnmapRegion(msgspec.Struct, frozen=True, tag=True):
    """Wait for the copies that use the region, then unmap it. Answered by `Unmapped`; slices of it that come later fail with CANCELLED."""

    region: int


class ArenaPart(msgspec.Struct, frozen=True, array_like=True):
    """So many bytes of the arena, whole slabs, whose pages are to come from a NUMA node."""

    node: int
    size_bytes: int


class MapArena(msgspec.Struct, frozen=True, tag=True):
    """Map the arena (one descriptor). Answered by `Mapped` with region 0, and by a GPU's mover later by `ArenaLocked`.

    `parts`: all of it, in its order; empty where no node is to be preferred. No slot crosses a multiple of `slab_bytes`.
    """

    arena_bytes: int
    huge_pages: bool
    slab_bytes: int = GIB
    parts: tuple[ArenaPart, ...] = ()


class AddLane(msgspec.Struct, frozen=True, tag=True):
    """Start a lane's threads. Descriptors: the lane socket; for a volume also its data descriptor and its synced (O_DSYNC) descriptor.

    Answered by `LaneReady` or `LaneRefused`. `path`: the name of the way that it goes. `volume_uuid` empty: the arena's lane. `scratch_offset`,
    `scratch_bytes`: this device's part of the volume's scratch area (`offloadd.tiers.scratch`), 0 bytes where there is none.
    """

    lane: int
    path: str
    thread_count: int
    staging_slot_bytes: int
    volume_uuid: bytes = b""
    slab_bytes: int = 0
    data_offset: int = 0
    scratch_offset: int = 0
    scratch_bytes: int = 0


class FenceMove(msgspec.Struct, frozen=True, tag=True):
    """From the answer on, no copy for this move touches its region. Answered by `Fenced` once running copies of the move have ended."""

    move: int


class ForgetMove(msgspec.Struct, frozen=True, tag=True):
    """The move is over: its fence is no longer needed. Not answered."""

    move: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Pong` at once: by a mover whose main thread obeys messages."""


class LastOrders(msgspec.Struct, frozen=True, tag=True):
    """One descriptor: a socket on which a thread of its own waits for `CloseMemory`, whatever the main thread does. Not answered."""


class CloseMemory(msgspec.Struct, frozen=True, tag=True):
    """Let no copy of engine memory begin any more, wait for the running ones, and unmap all regions, for good: the mover is going to be replaced. Answered by
    `MemoryClosed`, on the socket of `LastOrders`."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish the slices that run, then exit 0."""


class GpuFacts(msgspec.Struct, frozen=True, array_like=True):
    """A GPU as its mover found it. `compute_mode`: a name of `ComputeMode`; `uses_mps`: the mover is a client of an MPS server; `context_bytes`: memory that
    its context took on the GPU when it was made, 0 if that could not be measured."""

    name: str
    pci_bus_id: str
    compute_mode: str
    uses_mps: bool
    context_bytes: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a mover: its process id and what it can do (path names; none if its device can't be used, and then `note` says why).

    `uuid`: of its GPU, as nvidia-smi prints it; empty on the host. `gpu`: None on the host, and if the GPU can't be used. `memory_node`: the NUMA node whose
    memory is nearest to it, -1 if there is nothing to choose; `placement`: where its threads run, or why they are not bound; empty if they need not be.
    `copies_by`: what copies between memories of the host go by; empty for a GPU.
    """

    pid: int
    paths: tuple[str, ...]
    uuid: str = ""
    note: str = ""
    gpu: GpuFacts | None = None
    memory_node: int = -1
    placement: str = ""
    copies_by: str = ""


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The region is mapped."""

    region: int


class NotMapped(msgspec.Struct, frozen=True, tag=True):
    """The region could not be mapped; nothing changed."""

    region: int
    error: str


class Unmapped(msgspec.Struct, frozen=True, tag=True):
    """No mapping of the region is left."""

    region: int


class LaneReady(msgspec.Struct, frozen=True, tag=True):
    """The lane's threads and staging slots stand."""

    lane: int


class LaneRefused(msgspec.Struct, frozen=True, tag=True):
    """The device has no such way to this volume, and why. The lane's socket is closed."""

    lane: int
    why: str


class Fenced(msgspec.Struct, frozen=True, tag=True):
    """No copy of this move runs or will run."""

    move: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ping`."""


class MemoryClosed(msgspec.Struct, frozen=True, tag=True):
    """No byte of engine memory is read or written by this process any more, and none is mapped."""


class ArenaLocked(msgspec.Struct, frozen=True, tag=True):
    """A GPU's mover page-locks no more of the arena: `locked_bytes` of `arena_bytes` are, and if not all of them, `why` says what stood in the way. Copies to
    and from the others are slower, and as right."""

    locked_bytes: int
    arena_bytes: int
    why: str = ""


class ChosenMove(msgspec.Struct, frozen=True, array_like=True):
    """How moves in one direction, with places on the host or the GPU, go: by kernels or by the copy engines, and their measured rates (0: not measured)."""

    name: str
    kernels: bool
    kernels_bytes_per_s: float = 0.0
    engines_bytes_per_s: float = 0.0


class CopiesChosen(msgspec.Struct, frozen=True, tag=True):
    """For the log: what the copies of a region that was mapped go by. `shape`: of its blocks; empty for all. `note`: why there was no choice."""

    shape: str = ""
    moves: tuple[ChosenMove, ...] = ()
    note: str = ""


class KernelsFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a mover whose context was lost while kernels copied. `chosen`: they were chosen by then, so movers that are started later shall go by
    the copy engines alone. Otherwise they were only being measured, perhaps beside whatever was to blame: the next mover may measure again."""

    why: str
    chosen: bool


#: Front → mover, on the control socket.
Control = Descriptors | MapRegion | UnmapRegion | MapArena | AddLane | FenceMove | ForgetMove | Ping | LastOrders | Shutdown
#: Mover → front, on the control socket.
ControlAnswer = Hello | Mapped | NotMapped | Unmapped | LaneReady | LaneRefused | Fenced | Pong | ArenaLocked | CopiesChosen | KernelsFailed


class Job(msgspec.Struct, frozen=True, tag=True):
    """A part of a move for one lane: up to JOB_BLOCKS_MAX blocks of one slot size, in the order of the request.

    `blocks` is an array of BLOCK_DTYPE. `deadline_ns` and `submitted_ns` are on CLOCK_MONOTONIC (deadline 0: none): no slice starts, and no scatter
    begins, after the deadline. `durable`: writes go through the synced descriptor. `verify_target`: compare every N-th block's bytes in engine memory with the
    staging slot's, 0 for none. `verify`: check headers and checksums (off only in benchmarks and in tests that prove the check matters).
    """

    job: int
    move: int
    operation: int
    slot_bytes: int
    blocks: bytes
    deadline_ns: int = 0
    submitted_ns: int = 0
    durable: bool = False
    verify: bool = True
    verify_target: int = 0
    #: The engine's event or flag that copies of the job wait for; empty for none.
    after_event: EventName = b""
    #: Bytes that went another way than the lane's fail (WRONG_PATH) instead of being told.
    require_path: bool = False


class Copied(msgspec.Struct, frozen=True, tag=True):
    """The sources of `count` more blocks of an evict job have been copied; the engine may reuse them."""

    job: int
    count: int


class SliceDone(msgspec.Struct, frozen=True, tag=True):
    """Results of one slice: an array of RESULT_DTYPE, and where the time went (nanoseconds of this slice's thread; queue: from submit to start).

    A job is over when all of its blocks have a result. `io_bytes` counts headers and padding.
    """

    job: int
    results: bytes
    queue_ns: int
    copy_ns: int
    checksum_ns: int
    io_ns: int
    payload_bytes: int
    io_bytes: int
    #: A `Way`: how bytes that were handed to cuFile really went.
    way: int = 0


class Parked(msgspec.Struct, frozen=True, tag=True):
    """The job waits for its engine's event or flag; nothing of it has begun."""

    job: int


class Unparked(msgspec.Struct, frozen=True, tag=True):
    """A job that was `Parked` begins: its event has come, or its end has."""

    job: int


#: Mover → front, on a lane socket.
LaneAnswer = Copied | SliceDone | Parked | Unparked

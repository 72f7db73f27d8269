"""The daemon's side of an engine's swap: blocks of a request leave and come back through gRPC, and everything that was answered is written down."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import numpy.typing as npt

from offloadd.client import AckLevel, Blocks, Client, EvictStatus, HostMemory, Namespace, Path, PathUse, Plane, Region, RestoreResult, RestoreStatus, Tier

from .block_keys import block_keys


@dataclass(frozen=True, slots=True)
class Way:
    """Which tier and path the blocks take, both ways."""

    ack: AckLevel
    tier: Tier
    path: Path


THROUGH_ARENA = Way(AckLevel.COPIED, Tier.ARENA, Path.DDR)
THROUGH_VOLUME = Way(AckLevel.DURABLE, Tier.VOLUME, Path.HOST)


class BlocksNotRestored(Exception):
    """Blocks of a request did not all come back: the engine may not use their destinations. `before` and `after` are the destinations' bytes."""

    def __init__(self, request_id: str, keys: Sequence[bytes], result: RestoreResult, before: npt.NDArray[np.uint8], after: npt.NDArray[np.uint8]) -> None:
        super().__init__(
            f"{request_id}: {result.restored_count} of {len(keys)} blocks restored: {sorted({outcome.status.name for outcome in result.outcomes})}"
        )
        self.keys = tuple(keys)
        self.result = result
        self.before = before
        self.after = after


@dataclass(slots=True)
class Preemption:
    """One request that lost its blocks, and where they went when it resumed."""

    request_id: str
    token_count: int
    keys: list[bytes]
    sources: list[int]
    evict_life: int
    has_tail: bool
    targets: list[int] = field(default_factory=list)
    restore_life: int = -1

    @property
    def resumed(self) -> bool:
        """Whether its blocks were asked back."""
        return bool(self.targets)


class Swap:
    """Evicts and restores blocks of one region. `restore` raises BlocksNotRestored unless `use_anything` says that damaged blocks are to be used."""

    def __init__(
        self,
        client: Client,
        way: Way,
        *,
        use_anything: bool = False,
        after_evict: Callable[[], object] = lambda: None,
        before_first_restore: Callable[[], object] = lambda: None,
        daemon_life: Callable[[], int] = lambda: 0,
        on_refusal: Callable[[BlocksNotRestored], object] = lambda refused: None,
    ) -> None:
        self._client = client
        self._way = way
        self._use_anything = use_anything
        self._after_evict = after_evict
        self._before_first_restore = before_first_restore
        #: Tells one life of the daemon from the next.
        self._daemon_life = daemon_life
        self._on_refusal = on_refusal
        self._memory: HostMemory | None = None
        self._plane: Plane
        self._region: Region | None = None
        self._block_tokens = 0
        self._bytes: npt.NDArray[np.uint8]
        self._out: dict[str, Preemption] = {}
        #: SHA-256 of what was stored under each key.
        self.stored_bytes: dict[bytes, bytes] = {}
        self.preemptions: list[Preemption] = []
        self.evicted: Counter[tuple[EvictStatus, Tier]] = Counter()
        self.restored: Counter[tuple[RestoreStatus, Tier]] = Counter()
        self.evict_uses: Counter[tuple[Tier, Path]] = Counter()
        self.restore_uses: Counter[tuple[Tier, Path]] = Counter()
        #: Blocks said to be RESTORED whose bytes are not those that were stored.
        self.changed_blocks = 0
        #: What went wrong in the engine's thread, which only logs it.
        self.failure: BaseException | None = None

    @property
    def region(self) -> Region:
        """The engine's memory, as registered."""
        assert self._region is not None, "the engine has not started"
        return self._region

    def register(self, memory: HostMemory, *, plane: Plane, block_count: int, block_tokens: int, namespace: Namespace) -> None:
        """Take over the memory and register its blocks."""
        self._memory = memory
        self._block_tokens = block_tokens
        self._bytes = memory.numpy(np.uint8, (memory.memory_bytes,))
        self._plane = plane
        self._region = self._client.register_region(block_count=block_count, planes=[plane], memories=[memory], namespace=namespace)

    def evict(self, request_id: str, tokens: Sequence[int], table: Sequence[int]) -> bool:
        """Evict the blocks that hold `tokens`, partial tail included; whether all are stored. Afterwards the engine may reuse them."""
        sources = list(table[: ceil(len(tokens) / self._block_tokens)])
        keys = block_keys(tokens, self._block_tokens)
        assert len(sources) == len(keys) > 0
        digests = self._digests(sources)
        way = self._way
        result = self._client.evict(Blocks(self.region, sources, keys), ack=way.ack, tier=way.tier, path=way.path, require_path=True, keep=True)
        self.evicted.update((outcome.status, outcome.tier) for outcome in result.outcomes)
        self.evict_uses.update(_blocks_by_way(result.paths))
        for key, digest, outcome in zip(keys, digests, result.outcomes, strict=True):
            if outcome.status is EvictStatus.STORED:
                self.stored_bytes[key] = digest
        has_tail = len(tokens) % self._block_tokens > 0
        self._out[request_id] = Preemption(request_id, len(tokens), keys, sources, self._daemon_life(), has_tail)
        self.preemptions.append(self._out[request_id])
        self._after_evict()
        return result.all_stored

    def restore(self, request_id: str, table: Sequence[int]) -> None:
        """Bring the blocks of a preempted request into the first blocks of `table`, whose content is lost."""
        hook, self._before_first_restore = self._before_first_restore, lambda: None
        hook()
        preemption = self._out.pop(request_id)
        targets = list(table[: len(preemption.keys)])
        assert len(targets) == len(preemption.keys)
        before = self.block_bytes(targets)
        result = self._client.restore(Blocks(self.region, targets, preemption.keys), path=self._way.path, require_path=True, consume=True)
        preemption.targets, preemption.restore_life = targets, self._daemon_life()
        self.restored.update((outcome.status, outcome.tier) for outcome in result.outcomes)
        self.restore_uses.update(_blocks_by_way(result.paths))
        for key, digest, outcome in zip(preemption.keys, self._digests(targets), result.outcomes, strict=True):
            self.changed_blocks += outcome.restored and digest != self.stored_bytes[key]
        if not (result.all_restored or self._use_anything):
            refused = BlocksNotRestored(request_id, preemption.keys, result, before, self.block_bytes(targets))
            self._on_refusal(refused)
            raise refused

    def forget(self, request_id: str) -> None:
        """The request will not resume: its blocks need not be kept."""
        preemption = self._out.pop(request_id, None)
        if preemption is not None:
            self._client.release([self.region], preemption.keys)

    def forget_all(self) -> None:
        """No request will resume."""
        for request_id in list(self._out):
            self.forget(request_id)

    def block_bytes(self, indices: Sequence[int]) -> npt.NDArray[np.uint8]:
        """A copy of the bytes of some blocks in engine memory, (count, bytes of a block)."""
        plane = self._plane
        starts = [plane.offset_bytes + index * plane.block_stride_bytes for index in indices]
        return np.stack([self._bytes[start : start + plane.block_bytes] for start in starts])

    def close(self) -> None:
        """Give up the region and its memory."""
        if self._region is not None and self._memory is not None:
            self._client.unregister_region(self._region)
            del self._bytes
            self._memory.close()

    def _digests(self, indices: Sequence[int]) -> list[bytes]:
        return [hashlib.sha256(row.tobytes()).digest() for row in self.block_bytes(indices)]


def _blocks_by_way(uses: Sequence[PathUse]) -> dict[tuple[Tier, Path], int]:
    return {(use.tier, use.path): use.block_count for use in uses}

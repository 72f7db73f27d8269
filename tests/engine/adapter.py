"""Puts the daemon under transformers' continuous batching: its paged cache lies in shared memory, and preempted requests are swapped through gRPC.

The seam is private API of transformers 5.19: `OffloadingManager`, whose own implementation copies to page-locked memory of the engine.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from offloadd.client import HostMemory, Namespace, Plane

from .swap import Swap

GROUP = "full_attention"


class DaemonOffloading(OffloadingManager):
    """What the engine calls when blocks run out: `_offload_to_cpu` with the victims, `restore_scheduled_requests` when one of them runs again."""

    #: Set in a subclass: the engine makes the object and passes neither.
    swap: Swap
    weights: str

    def __init__(
        self,
        cache: PagedAttentionCache,
        scheduler: Any,
        cpu_offload_space_gib: float | None,
        safety_threshold: float,
        compute_stream: Any,
        distributed_helper: Any,
    ) -> None:
        super().__init__(cache, scheduler, 0.0, safety_threshold, compute_stream, distributed_helper)
        assert list(cache.cache_allocators) == [GROUP], "a sliding window's blocks are not named by their prefix"
        self._allocator = cache.cache_allocators[GROUP]
        memory = move_cache(cache)
        self.swap.register(
            memory,
            plane=plane_of(cache),
            block_count=self._allocator._copy_view.shape[0],
            block_tokens=self._allocator.tokens_per_page,
            namespace=namespace_of(cache, weights=self.weights),
        )

    def _offload_to_cpu(self, victims: list[RequestState], victim_block_tables: dict[str, dict[str, list[int]]]) -> set[str]:
        """The blocks are free already, but nothing is written before this returns. Requests left out of the answer are computed again."""
        swapped = set()
        for state in victims:
            # Without asynchronous batching these are the tokens whose KV is in the cache.
            tokens = (state.initial_tokens + state.generated_tokens)[: state.position_offset]
            assert len(tokens) == state.position_offset
            if tokens and self.swap.evict(state.request_id, tokens, victim_block_tables[state.request_id][GROUP]):
                state.is_cpu_offloaded = True
                swapped.add(state.request_id)
        return swapped

    def restore_scheduled_requests(self, requests_in_batch: list[FutureRequestState]) -> None:
        """Blocks have been allocated for the resumed requests; the forward pass follows at once."""
        for future in requests_in_batch:
            state = future.state
            if not state.is_cpu_offloaded:
                continue
            try:
                self.swap.restore(state.request_id, self._allocator.block_table[state.request_id])
            except BaseException as error:
                self.swap.failure = error
                raise
            state.is_cpu_offloaded = False
            # The restored blocks are without hashes: the engine hashes that many more after the pass.
            full_count = state.position_offset // self._allocator.tokens_per_page
            if self.cache.use_prefix_sharing and full_count:
                future.complete_blocks[GROUP] = future.complete_blocks.get(GROUP, 0) + full_count

    def free_request_cpu_cache(self, state: RequestState) -> None:
        """The request was cancelled or failed."""
        if state.is_cpu_offloaded:
            # After a failure the daemon may be gone, too; that is told already.
            if self.swap.failure is None:
                self.swap.forget(state.request_id)
            state.is_cpu_offloaded = False

    def reset(self) -> None:
        """A new generation begins."""
        self.free_all_waiting_cpu_caches()
        self.swap.forget_all()


@contextmanager
def installed(swap: Swap, *, weights: str) -> Iterator[None]:
    """Engines made inside swap through `swap`. `weights` names the bytes of the model's weights."""
    kind = type("DaemonOffloading", (DaemonOffloading,), {"swap": swap, "weights": weights})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous_api, "OffloadingManager", kind)
        try:
            yield
        finally:
            swap.close()


def move_cache(cache: PagedAttentionCache) -> HostMemory:
    """Put the engine's cache tensor, with all views of it, into memory that the daemon can map. To be done before anything is allocated in it."""
    assert cache.pool.num_free_sectors == cache.num_sectors
    old = cache.cache_tensor
    memory = HostMemory.allocate(old.nbytes, name="kv")
    cache.cache_tensor = memory.torch(torch.uint8, tuple(old.shape))
    for allocator in cache.cache_allocators.values():
        allocator.register_cache_tensor(cache.bytes_per_sector, cache.num_sectors * cache.bytes_per_sector, cache.cache_tensor, cache.pool)
    start, end = cache.cache_tensor.data_ptr(), cache.cache_tensor.data_ptr() + old.nbytes
    views = [*_tensors(vars(cache)), *(tensor for allocator in cache.cache_allocators.values() for tensor in _tensors(vars(allocator)))]
    assert len(views) > 2 * len(cache.layer_to_allocator)
    assert all(start <= view.data_ptr() < end and view.untyped_storage().data_ptr() == start for view in views), "a view of the cache lies elsewhere"
    left = [found for found in gc.get_objects() if type(found) is torch.Tensor and found is not old and _shares_storage(found, old)]
    assert not left, f"{len(left)} tensors still look at the memory that the cache had before"
    return memory


def plane_of(cache: PagedAttentionCache) -> Plane:
    """All layers of a block lie together: one plane. The engine never hands out the first blocks, where padding goes."""
    blocks = cache.cache_allocators[GROUP]._copy_view
    assert blocks.dtype is torch.uint8 and blocks.stride(1) == 1
    return Plane(memory=0, offset_bytes=blocks.data_ptr() - cache.cache_tensor.data_ptr(), block_stride_bytes=blocks.stride(0), block_bytes=blocks.shape[1])


def namespace_of(cache: PagedAttentionCache, *, weights: str) -> Namespace:
    """What must match for the bytes of two blocks to be interchangeable."""
    config = cache.config
    return Namespace(
        model=config.model_type,
        weights=weights,
        engine="transformers",
        engine_version=transformers.__version__,
        attention_backend=config._attn_implementation,
        isa=torch.backends.cpu.get_cpu_capability(),
        hash_algorithm="sha256-chained",
        kv_dtype=str(cache.dtype),
        block_tokens=cache.cache_allocators[GROUP].tokens_per_page,
        layout="layer-kv-token-head",
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for part in value:
            yield from _tensors(part)


def _shares_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()

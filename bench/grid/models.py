"""Models as the KV cache sees them: how many bytes a token takes, and how a rank's block lies in engine memory."""

import tomllib
from dataclasses import dataclass

import msgspec

from bench.support.workload import WORKLOADS

#: Bytes of one element.
KV_DTYPES = {"bf16": 2, "fp16": 2, "fp8": 1}
#: `layers`: K and V of each layer in a plane of their own, as vLLM allocates them. `cross-layer`: all of a block in one piece.
LAYOUTS = ("layers", "cross-layer")


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `bench/workloads/models.toml`, which says where its numbers are from. Dimensions count elements.

    Grouped-query attention has `kv_heads` and `head_dim`; latent attention has `latent_rank`, `latent_rope_dim`, and the dimensions of its heads while they are
    computed (`query_dim`, `value_dim`). `weight_bytes`: of one parameter.
    """

    name: str
    source: str
    layers: int
    heads: int
    parameters: float
    active_parameters: float
    kv_heads: int = 0
    head_dim: int = 0
    latent_rank: int = 0
    latent_rope_dim: int = 0
    query_dim: int = 0
    value_dim: int = 0
    weight_bytes: int = 2

    @property
    def is_latent(self) -> bool:
        """Whether a token's K and V are one latent vector (MLA)."""
        return self.latent_rank > 0

    def tensor_parallel_fault(self, tensor_parallel: int) -> str:
        """Why the model can't be cut over so many ranks; empty if it can."""
        if self.heads % tensor_parallel:
            return f"{self.name} has {self.heads} attention heads, which do not divide over {tensor_parallel} ranks"
        if not self.is_latent and self.kv_heads % tensor_parallel and tensor_parallel % self.kv_heads:
            return f"{self.name} has {self.kv_heads} KV heads, which neither divide over {tensor_parallel} ranks nor are shared evenly by them"
        return ""

    def rank_elements(self, tensor_parallel: int) -> int:
        """Elements that one rank keeps of one token in one layer. Ranks beyond the KV heads share them; a latent vector is on every rank."""
        if self.is_latent:
            return self.latent_rank + self.latent_rope_dim
        return 2 * max(1, self.kv_heads // tensor_parallel) * self.head_dim

    @property
    def attention_dims(self) -> int:
        """Elements of a query head and of a value head, together: what a pair of tokens costs in one head, in multiplications."""
        return self.query_dim + self.value_dim if self.is_latent else 2 * self.head_dim


@dataclass(frozen=True, slots=True)
class KvShape:
    """One rank's blocks: `plane_count` planes of `piece_bytes` for each block of `block_tokens` tokens."""

    block_tokens: int
    plane_count: int
    piece_bytes: int

    @property
    def block_bytes(self) -> int:
        """Payload of one block."""
        return self.plane_count * self.piece_bytes


def kv_shape(model: Model, *, tensor_parallel: int, kv_dtype: str, block_tokens: int, layout: str) -> KvShape:
    """How the blocks of one rank lie in memory.

    Bytes a token: 2 × layers × KV heads × head dimension × element bytes; layers × (rank + rope) × element bytes for latent attention.
    """
    token_bytes = model.layers * model.rank_elements(tensor_parallel) * KV_DTYPES[kv_dtype]
    plane_count = 1 if layout == "cross-layer" else model.layers * (1 if model.is_latent else 2)
    return KvShape(block_tokens, plane_count, token_bytes * block_tokens // plane_count)


def load_models() -> dict[str, Model]:
    """All models by name, in the order of the file. Raises msgspec.ValidationError, OSError."""
    tables = tomllib.loads((WORKLOADS / "models.toml").read_text())["model"]
    return {model.name: model for model in msgspec.convert(tables, list[Model])}

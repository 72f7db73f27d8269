"""What it would take to compute a prompt's KV again: an estimate from data sheets, so that a restore has something to be faster than."""

import tomllib

import msgspec

from bench.grid.models import Model
from bench.support.rows import Case, Row
from bench.support.workload import WORKLOADS


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense peak rates of one GPU, from its vendor's data sheet (`source`). `fp8_flops` 0: it has none."""

    name: str
    source: str
    bf16_flops: float
    fp8_flops: float
    memory_bytes_per_s: float


class Gpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`bench/workloads/gpus.toml`. `efficiency`: the share of the peak that a prefill is assumed to reach."""

    efficiency: float
    gpu: list[Gpu]


def load_gpus() -> Gpus:
    """The table. Raises msgspec.ValidationError, OSError."""
    return msgspec.convert(tomllib.loads((WORKLOADS / "gpus.toml").read_text()), Gpus)


def prefill_s(model: Model, *, tensor_parallel: int, tokens: int, gpu: Gpu, efficiency: float) -> float:
    """Seconds of a prefill of `tokens` tokens over `tensor_parallel` GPUs: the longer of computing and of reading the weights once, each at `efficiency`.

    Two operations a parameter and token, and for attention two a multiplication of each pair of tokens, half of which the causal mask leaves out. Communication
    between ranks, kernels that are launched and a queue before them are left out: a real prefill takes longer.
    """
    multiplied = 2 * model.active_parameters * tokens
    attended = model.layers * model.heads * model.attention_dims * float(tokens) ** 2
    flops = gpu.fp8_flops if model.weight_bytes == 1 and gpu.fp8_flops else gpu.bf16_flops
    # One token reads the weights that are active for it; many tokens, in the end, those of all experts.
    weights = min(model.parameters, model.active_parameters * tokens) * model.weight_bytes
    return max((multiplied + attended) / flops, weights / gpu.memory_bytes_per_s) / (tensor_parallel * efficiency)


def recompute_row(case: Case, model: Model, gpu: Gpu, efficiency: float) -> Row:
    """The estimate as a row. Its rate is what a restore of the rank's bytes in that time would have."""
    seconds = prefill_s(model, tensor_parallel=case.tensor_parallel, tokens=case.tokens, gpu=gpu, efficiency=efficiency)
    return Row(case, request_count=1, seconds=[seconds], gb_per_s=case.payload_bytes / seconds / 1e9, estimated=True)


def recompute_note(gpu: Gpu, efficiency: float) -> str:
    """What the estimates rest on."""
    rates = f"{gpu.bf16_flops / 1e12:.0f} TFLOP/s BF16, {gpu.fp8_flops / 1e12:.0f} FP8, {gpu.memory_bytes_per_s / 1e12:g} TB/s"
    return (
        f"estimated, not measured: {gpu.name} ({gpu.source}: {rates}), of which {efficiency:.0%} is assumed to be reached, on the GPUs of all ranks, without "
        "communication, batching or a queue; a restore beside it is of the ranks in its row alone"
    )

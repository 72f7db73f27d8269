"""Rows as a grid would leave them, worked out from bandwidths and latencies: for pages that are looked at, and for tests of what reads rows."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from bench.support.rows import Case, Operation, Row, quantiles_of

#: KV bytes a token of one rank, 16 tokens a block; TP; prefill tokens a second.
MODELS = {
    ("Llama-3-8B", 1, "bf16"): (131072, 9000),
    ("Llama-3-8B", 1, "fp8"): (65536, 14000),
    ("Llama-3-70B", 4, "bf16"): (81920, 3500),
    ("Llama-3-70B", 8, "bf16"): (40960, 6000),
    ("Llama-3-70B", 8, "fp8"): (20480, 9500),
    ("Qwen3-32B", 2, "bf16"): (131072, 4000),
    ("Qwen3-30B-A3B", 1, "bf16"): (98304, 20000),
    ("DeepSeek-V3", 8, "bf16"): (70272, 5000),
}
SIZES = (16, 128, 1024, 4096, 16384, 32768)
DEPTHS = (1, 2, 4, 8, 16, 32)
NO_GPU = "this machine has no GPU: the driver library libcuda.so.1 is not installed"
NO_ROOM = "the arena has 4 GiB, the case needs {gib:.0f} GiB: raise [arena] arena_bytes"
#: Bytes a second of the ceiling, seconds a request, share of the ceiling that is reached, CPU seconds a GB, host memory traffic, the ceiling.
PATHS = {
    "gds": (24e9, 250e-6, 0.94, 0.015, 0.02, "bare KvikIO"),
    "bounce": (12.5e9, 300e-6, 0.91, 0.06, 2.1, "raw O_DIRECT"),
    "ddr": (50e9, 120e-6, 0.88, 0.03, 1.05, "page-locked copy"),
    "host": (6.5e9, 400e-6, 0.95, 0.2, 3.2, "raw O_DIRECT"),
}


def case(operation: Operation = Operation.RESTORE, path: str = "gds", tokens: int = 1024, **changes: object) -> Case:
    """A case of Llama-3-8B."""
    values = {"model": "Llama-3-8B", "tensor_parallel": 1, "kv_dtype": "bf16", "block_tokens": 16, "block_bytes": 16 * 131072, "gpu_count": 1}
    return Case(**{**values, "tokens": tokens, "block_count": -(-tokens // 16), "operation": operation, "path": path, **changes})  # type: ignore[arg-type]


def measured(one: Case, *, seed: object = 0, slower: float = 1.0, **changes: object) -> Row:
    """What a case could have come to: latencies with a tail, queues at depth, rates that end at a ceiling."""
    rng = random.Random(f"{one.name} {seed}")
    rate, latency_s, reached, cpu, memory, ceiling = PATHS[one.path]
    rate *= one.volume_count
    size = one.payload_bytes
    alone = latency_s + size / (rate * reached * 0.8)
    gb_per_s = min(rate * reached, one.queue_depth * size / alone) / 1e9 / slower
    middle = one.queue_depth * size / (gb_per_s * 1e9)
    seconds = [middle * (0.97 + rng.expovariate(1) * 0.05 + (rng.random() > 0.985) * rng.random()) for _ in range(200)]
    parts = {"queue_s": 0.05, "io_s": 0.6, "checksum_s": 0.15, "copy_s": 0.2, "total_s": 0.9}
    way = {"gds": {"gds_nvfs": 1.0}}.get(one.path, {one.path: 1.0})
    values = {
        "proven": way,
        "request_count": 200,
        "seconds": quantiles_of(seconds),
        "gb_per_s": gb_per_s,
        "cpu_s_per_gb": cpu + 300e-6 / (size / 1e9),
        "memory_bytes_per_byte": memory * rng.uniform(0.98, 1.04),
        "stages": {name: middle * part for name, part in parts.items()},
        "ceiling": f"{ceiling} {'reads' if one.operation is Operation.RESTORE else 'writes'}" if "copy" not in ceiling else ceiling,
        "ceiling_gb_per_s": rate / 1e9,
        "ratio": gb_per_s * 1e9 / rate,
    }
    return Row(one, **(values | changes))  # type: ignore[arg-type]


def recomputed(one: Case, tokens_per_s: float) -> Row:
    """An estimate."""
    return Row(one, seconds=[one.tokens / tokens_per_s + 1e-8 * one.tokens**2 / 100], estimated=True)


def grid(*, gpu: bool = True, sizes: Sequence[int] = SIZES, models: int = len(MODELS), wide: bool = False) -> list[Row]:
    """Every operation and path: sizes and depths of the first model, the others at one size; `wide`: all sizes and depths of all, and more GPUs and volumes."""
    return list(_grid(gpu=gpu, sizes=sizes, models=models, wide=wide))


def _grid(*, gpu: bool, sizes: Sequence[int], models: int, wide: bool) -> Iterator[Row]:
    for number, ((model, tensor_parallel, kv_dtype), (token_bytes, tokens_per_s)) in enumerate(list(MODELS.items())[:models]):
        common: Any = {"model": model, "tensor_parallel": tensor_parallel, "kv_dtype": kv_dtype, "block_bytes": 16 * token_bytes}
        points = [(tokens, 1) for tokens in sizes if number == 0 or wide or tokens == 4096]
        points += [(1024, depth) for depth in DEPTHS[1:] if number == 0 or wide]
        for tokens, depth in points:
            if depth == 1:
                yield recomputed(case(path="recompute", tokens=tokens, gpu_count=0, **common), tokens_per_s)
            for operation in Operation:
                for path in PATHS:
                    ack = "" if operation is Operation.RESTORE else "copied" if path == "ddr" else "durable"
                    gpus = 0 if path == "host" or (path == "ddr" and not gpu) else 1
                    for volumes in (1, 4) if wide and path != "ddr" and depth == 1 else (1,):
                        one = case(operation, path, tokens, ack=ack, queue_depth=depth, gpu_count=gpus, volume_count=volumes, **common)
                        yield _came_of(one, gpu=gpu)


def _came_of(one: Case, *, gpu: bool) -> Row:
    need_gib = one.payload_bytes * one.queue_depth / 2**30
    if one.path in ("gds", "bounce") and not gpu:
        return Row(one, skipped=NO_GPU)
    if one.path == "ddr" and need_gib > 4:
        return Row(one, skipped=NO_ROOM.format(gib=math.ceil(need_gib)))
    if one.path == "gds" and one.tokens == 128:
        return measured(one, proven={"cufile_posix": 1.0}, slower=1.9)
    if one.path == "gds" and one.tokens == 32768:
        return measured(one, proven={"gds_nvfs": 0.998, "cufile_posix": 0.002})
    if one.path == "host" and not gpu:
        return measured(one, memory_bytes_per_byte=None, memory_note="perf_event_paranoid is 4, and no resctrl is mounted")
    return measured(one)

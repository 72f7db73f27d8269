"""Which cases the grid has: every combination, or one axis at a time from a case in the middle, since the product of all takes days."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.grid.models import KvShape, Model, kv_shape
from bench.grid.options import Options
from bench.support.rows import Case, Operation

#: Paths between the memory of a GPU and a tier, and between host memory and a tier.
GPU_PATHS, HOST_PATHS = ("gds", "bounce", "ddr"), ("ddr", "host")


@dataclass(frozen=True, slots=True)
class Kv:
    """Whose blocks: what is registered as one region in each engine."""

    model: Model
    tensor_parallel: int
    kv_dtype: str
    shape: KvShape


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that one daemon serves: with so many GPUs (0: engines in host memory) and volumes."""

    gpu_count: int
    volume_count: int
    cases: tuple[Case, ...]


def kv_of(case: Case, models: dict[str, Model], layout: str) -> Kv:
    """The blocks of a case."""
    model = models[case.model]
    shape = kv_shape(model, tensor_parallel=case.tensor_parallel, kv_dtype=case.kv_dtype, block_tokens=case.block_tokens, layout=layout)
    return Kv(model, case.tensor_parallel, case.kv_dtype, shape)


def plan_groups(options: Options, models: dict[str, Model]) -> list[Group]:
    """All cases but those of `recompute`, by what their daemon needs. Each case comes once."""
    found: dict[tuple[int, int], dict[str, Case]] = {}
    for gpu_count, volume_count in _nodes(options):
        for case in _cases_of(options, models, gpu_count, volume_count):
            found.setdefault((gpu_count, volume_count), {}).setdefault(case.name, case)
    return [Group(gpus, volumes, tuple(cases.values())) for (gpus, volumes), cases in found.items()]


def plan_recompute(options: Options, models: dict[str, Model]) -> list[Case]:
    """The cases of `recompute`: one for each model, ranks, dtype and size."""
    if "recompute" not in options.paths or Operation.RESTORE not in options.operations:
        return []
    found: dict[str, Case] = {}
    for point in _points(options, models):
        if point.depth == options.depths[0]:
            case = _case(point, options, models, Operation.RESTORE, "recompute", 0, 0)
            found.setdefault(case.name, case)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Point:
    model: str
    tensor_parallel: int
    kv_dtype: str
    tokens: int
    depth: int


def _nodes(options: Options) -> Iterator[tuple[int, int]]:
    """Numbers of GPUs and volumes: one of each, then all."""
    hosts = [0] if any(path in options.paths for path in HOST_PATHS) else []
    gpus = sorted({1, options.gpu_count}) if options.gpu_count and any(path in options.paths for path in GPU_PATHS) else []
    for gpu_count in (*hosts, *gpus):
        for volume_count in sorted({1, options.volume_count}):
            yield gpu_count, volume_count


def _cases_of(options: Options, models: dict[str, Model], gpu_count: int, volume_count: int) -> Iterator[Case]:
    paths = [path for path in options.paths if path in (GPU_PATHS if gpu_count else HOST_PATHS)]
    many = gpu_count > 1 or volume_count > 1
    # More devices are another axis: with them only the middle case, at each depth.
    points = [point for point in _points(options, models) if options.product or not many or _is_middle(point, options)]
    for point in points:
        for path in paths:
            if path == "ddr" and volume_count > 1:
                continue  # The arena is one, whatever the volumes are.
            for operation in options.operations:
                yield _case(point, options, models, operation, path, gpu_count, 0 if path == "ddr" else volume_count)


def _case(point: _Point, options: Options, models: dict[str, Model], operation: Operation, path: str, gpu_count: int, volume_count: int) -> Case:
    shape = kv_shape(
        models[point.model], tensor_parallel=point.tensor_parallel, kv_dtype=point.kv_dtype, block_tokens=options.block_tokens, layout=options.layout
    )
    return Case(
        model=point.model,
        tensor_parallel=point.tensor_parallel,
        kv_dtype=point.kv_dtype,
        block_tokens=options.block_tokens,
        block_bytes=shape.block_bytes,
        tokens=point.tokens,
        block_count=-(-point.tokens // options.block_tokens),
        operation=operation,
        path=path,
        ack=("copied" if path == "ddr" else "durable") if operation is Operation.EVICT else "",
        queue_depth=point.depth,
        gpu_count=gpu_count,
        volume_count=volume_count,
    )


def _middle_tokens(options: Options) -> int:
    return sorted(options.tokens)[len(options.tokens) // 2]


def _is_middle(point: _Point, options: Options) -> bool:
    first = (options.models[0], options.tensor_parallel[0], options.kv_dtypes[0])
    return (point.model, point.tensor_parallel, point.kv_dtype) == first and point.tokens == _middle_tokens(options)


def _points(options: Options, models: dict[str, Model]) -> Iterator[_Point]:
    """In an order that changes models least often. Ranks that a model can't be cut over are left out."""
    for point in dict.fromkeys(_every(options) if options.product else _one_axis_at_a_time(options)):
        if not models[point.model].tensor_parallel_fault(point.tensor_parallel):
            yield point


def _every(options: Options) -> Iterator[_Point]:
    for model in options.models:
        for ranks in options.tensor_parallel:
            for kv_dtype in options.kv_dtypes:
                for tokens in options.tokens:
                    for depth in options.depths:
                        yield _Point(model, ranks, kv_dtype, tokens, depth)


def _one_axis_at_a_time(options: Options) -> Iterator[_Point]:
    model, ranks, kv_dtype, depth = options.models[0], options.tensor_parallel[0], options.kv_dtypes[0], options.depths[0]
    middle = _middle_tokens(options)
    for tokens in options.tokens:
        yield _Point(model, ranks, kv_dtype, tokens, depth)
    for tokens in (min(options.tokens), middle):
        for deeper in options.depths:
            yield _Point(model, ranks, kv_dtype, tokens, deeper)
    for other in options.kv_dtypes:
        yield _Point(model, ranks, other, middle, depth)
    for fewer in options.tensor_parallel:
        yield _Point(model, fewer, kv_dtype, middle, depth)
    for other in options.models:
        yield _Point(other, ranks, kv_dtype, middle, depth)

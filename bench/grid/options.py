"""What to measure: the command line of the grid, checked value by value, and its presets."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.grid.models import KV_DTYPES, LAYOUTS, load_models
from bench.grid.recompute import load_gpus
from bench.grid.volumes import refuse_given
from bench.support.rows import Operation
from offloadd.config import LimitsConfig
from offloadd.config.gpus import gpus_present
from offloadd.errors import OffloaddError

Value = TypeVar("Value")

#: In the order of the rows. `recompute` moves nothing: it is estimated.
PATHS = ("gds", "bounce", "ddr", "host", "recompute")
TENSOR_PARALLEL_MAX = 8
TOKENS_MAX = 1 << 20
ROUNDS_MAX = 1000
GPUS_MAX = VOLUMES_MAX = 64
BLOCK_TOKENS_MAX = 1024
#: As the daemon is configured by default; the benchmark runs it so.
BLOCKS_PER_REQUEST_MAX: int = LimitsConfig.model_fields["blocks_per_request_max"].default
DEPTH_MAX: int = LimitsConfig.model_fields["requests_per_session_max"].default


@dataclass(frozen=True, slots=True)
class Preset:
    """Values of the axes that the command line leaves out."""

    models: tuple[str, ...]
    tensor_parallel: tuple[int, ...]
    kv_dtypes: tuple[str, ...]
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    rounds: int
    #: Every combination; otherwise the first model, rank count and dtype with a middle size, and one axis at a time from there.
    product: bool = False


TINY = Preset(("llama-3-8b",), (8,), ("bf16",), (16, 64), (1, 2), rounds=2)
QUICK = Preset(("llama-3-70b", "deepseek-v3"), (8,), ("bf16",), (16, 2048, 8192), (1, 8), rounds=4)
USUAL = Preset(tuple(load_models()), (8, 4, 2, 1), ("bf16", "fp8"), (16, 512, 2048, 8192, 32768), (1, 4, 16), rounds=8)
FULL = Preset(tuple(load_models()), (8, 4, 2, 1), ("bf16", "fp8"), (16, 128, 512, 2048, 8192, 32768), (1, 2, 4, 8, 16), rounds=12, product=True)


@dataclass(frozen=True, slots=True)
class Options:
    """The axes of the grid, and how it is run. `gpu_count` and `volume_count` are the most; there are rows with one as well."""

    models: tuple[str, ...]
    tensor_parallel: tuple[int, ...]
    kv_dtypes: tuple[str, ...]
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    operations: tuple[Operation, ...]
    paths: tuple[str, ...]
    gpu_count: int
    volumes: tuple[Path, ...]
    rounds: int
    product: bool
    block_tokens: int
    layout: str
    scattered: bool
    recompute_gpu: str

    @property
    def volume_count(self) -> int:
        """Volumes given, or the one that is made."""
        return max(1, len(self.volumes))

    @property
    def facts(self) -> dict[str, float | int | str]:
        """What holds for all rows."""
        return {
            "layout": self.layout,
            "placement": "scattered" if self.scattered else "contiguous",
            "rounds": self.rounds,
            "volumes": ", ".join(map(str, self.volumes)) or "one file of the benchmark's own",
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """The grid's options."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a small grid: a minute or two")
    size.add_argument("--full", action="store_true", help="every combination of the axes: hours")
    parser.add_argument("--part", choices=("pipeline", "grid", "all"), default="all", help="pipeline: the host pipeline's promises; default: all")
    grid = parser.add_argument_group("grid", "axes take several values; the first is the one from which the others are varied")
    grid.add_argument("--models", nargs="+", type=_one_of("model", tuple(load_models())), metavar="NAME", help=", ".join(load_models()))
    grid.add_argument("--tp", nargs="+", type=_number("tp", 1, TENSOR_PARALLEL_MAX), metavar="N", help=f"ranks of a model, 1 to {TENSOR_PARALLEL_MAX}")
    grid.add_argument("--dtypes", nargs="+", type=_one_of("dtype", tuple(KV_DTYPES)), metavar="NAME", help=", ".join(KV_DTYPES))
    grid.add_argument("--tokens", nargs="+", type=_number("tokens", 1, TOKENS_MAX), metavar="N", help="tokens of one request")
    grid.add_argument("--depths", nargs="+", type=_number("depth", 1, DEPTH_MAX), metavar="N", help=f"requests in flight at once, 1 to {DEPTH_MAX}")
    grid.add_argument("--operations", nargs="+", type=_one_of("operation", tuple(Operation)), metavar="NAME", help=", ".join(Operation))
    grid.add_argument("--paths", nargs="+", type=_one_of("path", PATHS), metavar="NAME", help=", ".join(PATHS))
    grid.add_argument(
        "--gpus",
        type=_number("gpus", 0, GPUS_MAX),
        metavar="N",
        help="GPUs to use, from cuda:0 on, 0 for none; default: all, and one where none is, so that its rows say why",
    )
    grid.add_argument(
        "--volumes",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="files that do not exist yet are made and removed again; files and devices that do must be empty volumes (`offloadd volume format`), and stay",
    )
    grid.add_argument("--rounds", type=_number("rounds", 1, ROUNDS_MAX), metavar="N", help="measurements of a row, each beside one of its ceiling")
    grid.add_argument("--block-tokens", type=_number("block-tokens", 1, BLOCK_TOKENS_MAX), default=16, metavar="N", help="tokens of a block; default: 16")
    grid.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="layers: K and V of each layer apart, as vLLM does (default)")
    grid.add_argument(
        "--placement", choices=("scattered", "contiguous"), default="scattered", help="where a request's blocks lie in engine memory; default: scattered"
    )
    grid.add_argument("--recompute-gpu", type=_one_of("recompute-gpu", tuple(gpu.name for gpu in load_gpus().gpu)), default="H100", metavar="NAME")


def read_options(arguments: argparse.Namespace) -> Options:
    """The grid that the command line asks for."""
    preset = TINY if arguments.tiny else QUICK if arguments.quick else FULL if arguments.full else USUAL
    return Options(
        models=_distinct(arguments.models, preset.models),
        tensor_parallel=_distinct(arguments.tp, preset.tensor_parallel),
        kv_dtypes=_distinct(arguments.dtypes, preset.kv_dtypes),
        tokens=_distinct(arguments.tokens, preset.tokens),
        depths=_distinct(arguments.depths, preset.depths),
        operations=_distinct([Operation(name) for name in arguments.operations or ()], (Operation.RESTORE, Operation.EVICT)),
        paths=_distinct(arguments.paths, PATHS),
        gpu_count=max(1, len(gpus_present())) if arguments.gpus is None else arguments.gpus,
        volumes=tuple(path.absolute() for path in arguments.volumes),
        rounds=arguments.rounds or preset.rounds,
        product=preset.product,
        block_tokens=arguments.block_tokens,
        layout=arguments.layout,
        scattered=arguments.placement == "scattered",
        recompute_gpu=arguments.recompute_gpu,
    )


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse, by `ArgumentParser.error`, what no single value shows."""
    models = load_models()
    for name in arguments.models or ():
        for ranks in arguments.tp or ():
            if fault := models[name].tensor_parallel_fault(ranks):
                parser.error(f"--tp {ranks}: {fault}")
    options = read_options(arguments)
    longest = BLOCKS_PER_REQUEST_MAX * options.block_tokens
    if max(options.tokens) > longest:
        parser.error(
            f"--tokens {max(options.tokens)}: a request moves at most {BLOCKS_PER_REQUEST_MAX} blocks, of {options.block_tokens} tokens each: {longest} tokens"
        )
    if options.gpu_count == 0 and arguments.paths and {"gds", "bounce"} & set(arguments.paths):
        parser.error("--gpus 0: paths gds and bounce need a GPU")
    if len(arguments.volumes) > VOLUMES_MAX:
        parser.error(f"--volumes names {len(arguments.volumes)}; {VOLUMES_MAX} is the most")
    if len({path.absolute() for path in arguments.volumes}) != len(arguments.volumes):
        parser.error("--volumes names one twice")
    for path in arguments.volumes:
        try:
            refuse_given(path.absolute())
        except (OffloaddError, OSError) as error:
            parser.error(f"--volumes {path}: {error}")


def _distinct(given: Sequence[Value] | None, preset: tuple[Value, ...]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(given)) if given else preset


def _number(name: str, least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdecimal() else None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{name} is {text!r}; a whole number from {least} to {most} is needed")
        return value

    return parse


def _one_of(name: str, known: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{name} is {text!r}; known are {', '.join(known)}")
        return text

    return parse

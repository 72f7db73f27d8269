"""What does a real GPU make of our copies, kernels and paths, and what do they cost a decode step beside them?

One command for the first node with a GPU: `python -m bench.gpu_figures --device cuda:0 --dir DIRECTORY_ON_THE_NVME`. Each ceiling is measured in the same run,
in turn with what it bounds; every figure tells the way that its bytes went and what proves it. What a machine can't run is left out with the reason, and the
rest is measured.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from bench.gpu.checksums import checksums
from bench.gpu.copies import gather_and_scatter
from bench.gpu.device import Gpu
from bench.gpu.disturbance import decode_steps
from bench.gpu.end_to_end import copied, stages
from bench.gpu.figures import Figures, is_standin
from bench.gpu.moves import bounce, ddr, gds
from bench.support.report import Report, benchmark
from bench.support.workload import Blocks, load_workload
from offloadd.cuda.driver import CudaError, available
from offloadd.transfer.kernels.base import DeviceKernels

QUESTION = "What does a real GPU make of our copies, kernels and paths, and what do they cost a decode step beside them?"
#: What can be asked for by --only, and what it holds.
GROUPS = {
    "copies": "gather and scatter, by copy engines and by kernels",
    "checksums": "CRC32C by kernels",
    "ddr": "restore from the arena, mover alone",
    "bounce": "restore from a volume through the host, mover alone",
    "gds": "restore from a volume past the host, mover alone",
    "copied": "COPIED evict, end to end",
    "stages": "stages of evict and restore by path, end to end",
    "decode": "decode steps beside restores",
}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda:0", metavar="cuda:N|GPU-UUID", help="the GPU to measure (default: cuda:0)")
    parser.add_argument("--only", nargs="+", choices=tuple(GROUPS), default=tuple(GROUPS), help="groups of figures to measure (default: all)")


def _kernels(figures: Figures, gpu: Gpu) -> DeviceKernels | None:
    from offloadd.transfer.kernels.cupy_launcher import open_cupy_kernels

    try:
        return open_cupy_kernels(gpu.device.ordinal)
    except ImportError as error:
        why = f"CuPy can't be imported ({error}); install offloadd with its extra cuda12 or cuda13"
    except Exception as error:
        # CuPy's own kinds of errors, which only it could name: no compiler, no headers, a GPU that it does not know.
        why = f"the kernels can't be compiled: {type(error).__name__}: {error}"
    figures.skip("gather, scatter and CRC32C by kernels", why)
    return None


def measure(report: Report, gpu: Gpu) -> list[str]:
    """Measure all groups that were asked for; the names of those that failed, which does not keep the others from being measured."""
    figures = Figures(report, standin=is_standin(gpu.device.name))
    report.facts |= gpu.facts()
    cross_layer = load_workload(Blocks, "gpu_cross_layer", tiny=report.tiny)
    layers = load_workload(Blocks, "gpu_layers", tiny=report.tiny)
    directory: Path = report.directory
    kernels = _kernels(figures, gpu) if {"copies", "checksums"} & set(report.arguments.only) else None

    def each(group: Callable[[Blocks], None]) -> None:
        for work in (cross_layer, layers):
            report.say(f"{work.name}: {work.block_count} blocks")
            group(work)

    work_of: dict[str, Callable[[], None]] = {
        "copies": lambda: each(lambda work: gather_and_scatter(figures, gpu, work, kernels)),
        "checksums": lambda: checksums(figures, gpu, cross_layer, kernels) if kernels is not None else None,
        "ddr": lambda: each(lambda work: ddr(figures, gpu, work)),
        "bounce": lambda: each(lambda work: bounce(figures, gpu, work, directory)),
        "gds": lambda: each(lambda work: gds(figures, gpu, work, directory)),
        "copied": lambda: each(lambda work: copied(figures, gpu, work)),
        "stages": lambda: stages(figures, gpu, cross_layer, directory),
        "decode": lambda: decode_steps(figures, gpu.device.uuid, cross_layer, directory),
    }
    failed = []
    for name in report.arguments.only:
        report.say(f"{name}: {GROUPS[name]}")
        try:
            work_of[name]()
        except Exception as error:
            # Time on a GPU is short: one group that fails must not cost the others their figures. The exit status tells.
            traceback.print_exc()
            report.facts[f"failed: {name}"] = f"{type(error).__name__}: {error}"
            failed.append(name)
    return failed


def main() -> None:
    """Exits 0 also where there is no GPU, 1 when a group failed."""
    failed: list[str] = []
    with benchmark("gpu_figures", QUESTION, add_options=_add_options) as report:
        why = available()
        if not why:
            try:
                with Gpu(report.arguments.device) as gpu:
                    failed = measure(report, gpu)
            except CudaError as error:
                why = str(error)
        if why:
            figures = Figures(report, standin=False)
            for name in report.arguments.only:
                figures.skip(f"{name} ({GROUPS[name]})", why)
    if failed:
        sys.exit(f"gpu_figures: {', '.join(failed)} failed; the other figures were written")


if __name__ == "__main__":
    main()

"""How long do an evict and a restore take by every path that this machine has, beside what bounds them and beside recompute?

Two parts. `pipeline`: the promises of the host's pipeline (`bench/support/pipeline.py`). `grid` (`bench/grid`): blocks of real models, from one block to tens
of thousands of tokens, evicted and restored through `offloadd serve` by `gds`, `bounce`, `ddr` and `host`, with requests in flight, GPUs and volumes as axes.
Every row of the grid is verified byte for byte, says which way its bytes went, and stands beside its ceiling, measured in turn with it; rows that this machine
can't run say why.
"""

import argparse
import os
import sys

from bench.grid.options import add_options, check, read_options
from bench.grid.run import run_grid
from bench.support.mover import MOVER_ENVIRONMENT
from bench.support.pipeline import run_pipeline
from bench.support.report import benchmark

QUESTION = "Does a restore run at the speed of the device, by every path, and what does verification cost?"


def main() -> None:
    """Run the parts that are asked for."""
    if os.environ.get("GLIBC_TUNABLES") != MOVER_ENVIRONMENT["GLIBC_TUNABLES"]:
        # The memcpy that the arena is compared with runs in this process and must be the same one.
        os.execve(sys.executable, [sys.executable, "-m", "bench.restore_latency", *sys.argv[1:]], {**os.environ, **MOVER_ENVIRONMENT})
    with benchmark("restore_latency", QUESTION, add_options=add_options, check=check) as report:
        arguments: argparse.Namespace = report.arguments
        if arguments.part in ("pipeline", "all"):
            run_pipeline(report)
        if arguments.part in ("grid", "all"):
            run_grid(report, read_options(arguments))


if __name__ == "__main__":
    main()

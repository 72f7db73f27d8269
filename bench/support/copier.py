"""A process that copies memory at a given rate: what a disk whose bytes pass through the same memory loses to copies that are not its own."""

import os
import select
import subprocess
import sys
import time

import numpy as np

from bench.support.machine import ROOT
from bench.support.mover import MOVER_ENVIRONMENT
from offloadd.units import MIB

STEP_BYTES = 4 * MIB
BUFFER_BYTES = 64 * MIB


class Copier:
    """A context manager. `run` starts copying at so many bytes a second, `rest` stops; both return when it is so."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.support.copier"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **MOVER_ENVIRONMENT}, cwd=ROOT
        )

    def run(self, bytes_per_s: float) -> None:
        """Copy at this rate from now on."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"%.0f\n" % bytes_per_s)
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the process that copies has ended")

    def rest(self) -> None:
        """Copy nothing."""
        self.run(0)

    def __enter__(self) -> "Copier":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def main() -> None:
    """Obey the rates on the standard input until it ends."""
    source, target = np.ones(BUFFER_BYTES, np.uint8), np.ones(BUFFER_BYTES, np.uint8)
    rate, offset, due = 0.0, 0, time.perf_counter()
    while True:
        wait_s = None if rate == 0 else max(0.0, due - time.perf_counter())
        readable, _, _ = select.select([sys.stdin], [], [], wait_s)
        if readable:
            line = sys.stdin.readline()
            if not line:
                return
            rate, due = float(line), time.perf_counter()
            print(flush=True)
            continue
        np.copyto(target[offset : offset + STEP_BYTES], source[offset : offset + STEP_BYTES])
        offset = (offset + STEP_BYTES) % BUFFER_BYTES
        due += STEP_BYTES / rate


if __name__ == "__main__":
    main()

"""The mover on a machine of another shape: nodes and PCI devices are those of OFFLOADD_TEST_ROOT.

The n-th chunk of the arena is page-locked when there is a file `locks-N` in that folder: so a test decides what is copied before, and what after.
"""

import functools
import os
import time
from pathlib import Path
from typing import Any

from offloadd.cuda import locked_chunks
from offloadd.cuda.memory import HostRegistration
from offloadd.mover import cuda_device, main

ROOT = Path(os.environ["OFFLOADD_TEST_ROOT"])


class GatedRegistration(HostRegistration):
    count = 0

    @classmethod
    def register(cls, *arguments: Any, **options: Any) -> HostRegistration:
        number, GatedRegistration.count = cls.count, cls.count + 1
        while not (ROOT / f"locks-{number}").exists():
            time.sleep(0.001)
        return HostRegistration.register(*arguments, **options)


locked_chunks.HostRegistration = GatedRegistration  # type: ignore[misc]
cuda_device.Device.open = functools.partial(cuda_device.Device.open, root=ROOT)  # type: ignore[method-assign]
main.place_threads = functools.partial(main.place_threads, root=ROOT)  # type: ignore[attr-defined]

if __name__ == "__main__":
    main.main()

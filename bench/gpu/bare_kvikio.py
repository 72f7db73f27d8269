"""Reads by bare KvikIO in a process of its own: the slices of a mover from one file into GPU memory, and nothing else done to them.

The ceiling of `gds` (compat mode OFF, as the mover), and information where there is no way past the host (compat mode ON: KvikIO's own bounce).
"""

import contextlib
from pathlib import Path

from bench.support.bare_kvikio import BareKvikio
from bench.support.ios import Io
from bench.support.mover import THREADS
from bench.support.process import Answer, Commanded, Handler, obey
from offloadd.cuda.device import Device
from offloadd.model.enums import Way


class BareReads(Commanded):
    """The other end. Raises CommandedError where KvikIO can't be had this way, with the reason."""

    def __init__(self, device: str, path: Path, slices: list[tuple[int, int]], *, compat: bool) -> None:
        """`slices`: offset and bytes of each read."""
        super().__init__("bench.gpu.bare_kvikio", {"device": device, "path": str(path), "slices": slices, "compat": compat})

    def run(self) -> tuple[float, dict[Way, int]]:
        """Read all slices once: seconds, and how many of them went which way, by the counts of cuFile and KvikIO."""
        answer = self.ask()
        return answer["seconds"], {Way(way): count for way, count in answer["ways"]}


def _begin(setup: Answer, held: contextlib.ExitStack) -> tuple[Answer, Handler]:
    device = Device.open(setup["device"])
    held.callback(device.close)
    bare = BareKvikio(device, compat=setup["compat"])
    held.callback(bare.close)
    ios = [Io(0, offset, size_bytes) for offset, size_bytes in setup["slices"]]

    def run(_: Answer) -> Answer:
        seconds, ways = bare.run([setup["path"]], ios, threads=THREADS)
        return {"seconds": seconds, "ways": [(int(way), count) for way, count in ways.items()]}

    return {}, run


if __name__ == "__main__":
    obey(_begin)

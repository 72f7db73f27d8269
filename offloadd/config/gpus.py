"""Which GPUs the machine has, by what the driver shows in /proc: asking CUDA itself would load it into the front."""

import re
from pathlib import Path

_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)\s*$", re.MULTILINE)
_MINOR = re.compile(r"^Device Minor:\s*(\d+)\s*$", re.MULTILINE)


def gpus_present(root: Path = Path("/")) -> tuple[str, ...]:
    """UUIDs of the GPUs whose device nodes are here, in the order of their minor numbers. A container sees the entries of all, and the nodes of its own."""
    found = []
    for information in root.glob("proc/driver/nvidia/gpus/*/information"):
        try:
            text = information.read_text(errors="replace")
        except OSError:
            continue
        uuid, minor = _UUID.search(text), _MINOR.search(text)
        if uuid and minor and (root / f"dev/nvidia{minor[1]}").exists():
            found.append((int(minor[1]), uuid[1]))
    return tuple(uuid for _, uuid in sorted(found))

"""Compiles the CUDA kernels for the CPU, as modules that the stand-in driver loads and the double of CuPy finds."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from offloadd.transfer.kernels.source import KERNELS, OPTIONS, source

from ..transfer.kernels.devices import GENERAL, SHIM, compile_for_cpu, gcc


def build_kernels(directory: Path, others: Mapping[Path, tuple[str, ...]] | None = None) -> Path:
    """Builds into a folder below `directory` that is named by the sources, unless they lie there already; that folder. Safe to call from several processes.

    It holds each source, the module that was made of it, and the options: what was not compiled here the double does not take. `others`: further CUDA sources
    with the names of their kernels, such as a benchmark's load.
    Raises RuntimeError if there is no g++.
    """
    if gcc() is None:
        raise RuntimeError("kernels for the stand-in driver need g++, and there is none in PATH")
    sources = {name: source(name) for name in sorted(KERNELS)} | {path.name: path.read_text(encoding="utf-8") for path in others or ()}
    kernels = KERNELS | {path.name: names for path, names in (others or {}).items()}
    shim = [path.read_text() for path in SHIM]
    target = directory / f"kernels-{hashlib.sha256(repr((gcc(), GENERAL, OPTIONS, kernels, sources, shim)).encode()).hexdigest()[:16]}"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="building-", dir=directory))
        try:
            for name, text in sources.items():
                (made / name).write_text(text)
                compile_for_cpu([made / name], (made / name).with_suffix(".so"), names=kernels[name])
            (made / "options.json").write_text(json.dumps(OPTIONS))
            made.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target

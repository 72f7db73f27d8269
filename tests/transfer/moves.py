"""The C library of copies, compiled from its source for the tests."""

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "offloadd" / "transfer" / "moves.c"
SOURCES = (SOURCE, SOURCE.with_name("keys.c"))
#: Bits of the widest instructions; 0 is portable C. A CPU that has no such ones runs the next narrower.
WIDTHS = (0, 128, 256, 512)


def compiler():
    """Path of the C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc")


def build(folder, *options, width=512):
    """Compile the library; its path."""
    library = Path(folder) / f"moves_{width}.so"
    general = ("-O3", "-g", "-std=gnu11", "-fvisibility=hidden", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-DWIDEST={width}")
    done = subprocess.run([compiler(), *general, *options, *SOURCES, "-o", library], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return str(library)

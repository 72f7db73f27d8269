"""The daemon opens as many files as it may, whatever the shell's soft limit is."""

import subprocess
import sys

CODE = """
import resource
from offloadd.daemon.app import raise_file_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


def test_a_low_soft_limit_is_raised() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)

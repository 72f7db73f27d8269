"""Whether the multi-process service runs, and how processes are kept out of it."""

import os
import shutil
import subprocess
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
START = f"start it with `{CONTROL} -d` and run this again"
ANSWER_TIMEOUT_S = 10.0


def why_not() -> str:
    """Empty if the control daemon runs, so that processes of this environment go through it; else why not, and how it is started."""
    if shutil.which(CONTROL) is None:
        return f"{CONTROL}, which comes with the NVIDIA driver, is not in PATH; once it is, {START}"
    try:
        done = subprocess.run([CONTROL], input="get_server_list\n", capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{CONTROL} does not answer ({error}); {START}"
    if done.returncode:
        said = " ".join((done.stderr + done.stdout).split())
        return f"the MPS control daemon does not run ({said or f'status {done.returncode}'}); {START}"
    return ""


def environment_without(directory: Path) -> dict[str, str]:
    """For processes that shall not go through the service: their pipes are looked for where there are none."""
    return {**os.environ, PIPES: str(directory / "no-mps")}

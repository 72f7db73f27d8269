"""A model, its undisturbed answers, and daemons to run it over."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from offloadd.client import Client

from .daemon_process import SERVE, DaemonProcess
from .swap import Swap

if TYPE_CHECKING:
    from .tiny_model import TinyModel

Generate = Callable[[Swap], list[list[int]]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> "TinyModel":
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Not at the top: it takes seconds that runs without these tests need not pay.
    import torch

    from .tiny_model import make_model

    # More threads than cores make these small products many times slower.
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def undisturbed_tokens(tiny: "TinyModel") -> list[list[int]]:
    """What every request answers when none is ever preempted."""
    from .tiny_model import LARGE_POOL_BLOCKS, generate, make_prompts

    return generate(tiny, make_prompts(), pool_blocks=LARGE_POOL_BLOCKS)


@pytest.fixture
def generate_preempted(tiny: "TinyModel") -> Generate:
    """The same requests in a pool that is too small for them."""
    from .tiny_model import SMALL_POOL_BLOCKS, generate, make_prompts

    return lambda swap: generate(tiny, make_prompts(), pool_blocks=SMALL_POOL_BLOCKS, swap=swap)


@pytest.fixture
def daemon(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DaemonProcess]:
    """A daemon that serves. Parametrized indirectly with the command that starts it."""
    made = DaemonProcess(tmp_path, getattr(request, "param", SERVE))
    try:
        made.start()
        yield made
    finally:
        made.close()
        # Shown by pytest when the test failed.
        print(made.log_text())


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client.connect(daemon.runtime_dir, instance="engine", process="worker", timeout_s=60.0) as made:
        yield made

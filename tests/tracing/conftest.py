from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider

from tests.system.conftest import make_daemon  # noqa: F401

from .collector import Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def engine_tracer() -> "object":
    """An engine that traces, and sends its own spans nowhere."""
    return TracerProvider(shutdown_on_exit=False).get_tracer("engine")

"""Who does not trace pays nothing for it, and whoever can't is told what is missing."""

import subprocess
import sys
from types import ModuleType

import pytest

from offloadd.client import calls
from offloadd.config.schema import TracingConfig
from offloadd.daemon.tracing import make_tracing
from offloadd.errors import ConfigError

METADATA = (("offloadd-session", "t"),)

CODE = """
import sys, tempfile
from pathlib import Path
from bench.support.daemon import DaemonThread, make_config
from offloadd.client import Client

with tempfile.TemporaryDirectory(prefix="ofl-") as folder, DaemonThread(make_config(Path(folder))):
    with Client.connect(folder, instance="engine") as client:
        client.capabilities()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


def test_a_daemon_and_a_client_that_do_not_trace_import_nothing_for_it() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)


def test_a_client_without_a_span_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import opentelemetry.trace

    assert calls.traced(METADATA) is METADATA
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert calls.traced(METADATA) is METADATA
    assert opentelemetry.trace is not None


def test_without_the_extra_a_collector_is_refused_by_the_name_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)  # type: ignore[arg-type]
    for name in ("offloadd.tracing.export", "offloadd.tracing.calls"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        ConfigError, match=r'tracing\.endpoint is "http://127\.0\.0\.1:4317", and opentelemetry\..* is not installed: pip install "offloadd\[otel\]"'
    ):
        make_tracing(TracingConfig(endpoint="http://127.0.0.1:4317"))


def test_no_endpoint_is_no_tracing() -> None:
    assert make_tracing(TracingConfig()) is None
    assert isinstance(sys.modules["offloadd.daemon.tracing"], ModuleType)

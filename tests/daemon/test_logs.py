"""Log lines: their form, and what they never hold."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from offloadd.daemon.logs import configure


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def fail(argument: str) -> None:
    raise ValueError("broken")


def test_a_json_line_has_time_in_utc_level_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json")
    structlog.get_logger().info("volume opened", path="/volume", slabs=3)
    line = json.loads(capsys.readouterr().err)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "volume opened", "level": "info", "path": "/volume", "slabs": 3}


@pytest.mark.parametrize("format", ["json", "text"])
def test_a_secret_is_never_logged(capsys: pytest.CaptureFixture[str], format: str) -> None:
    configure("debug", format)
    log = structlog.get_logger()
    log.info("attached", token="s3cr3t-1", handle=b"s3cr3t-2", note=b"s3cr3t-3", block_hashes=["s3cr3t-4"])
    local = "-".join(("s3cr3t", "5"))
    try:
        fail(local)
    except ValueError:
        log.exception("it failed")
    text = capsys.readouterr().err
    assert "attached" in text
    assert "ValueError: broken" in text
    assert "s3cr3t-" not in text
    assert "<8 bytes>" in text


def test_messages_below_the_level_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure("warning", "json")
    structlog.get_logger().info("no")
    logging.getLogger("grpc").info("no")
    structlog.get_logger().warning("yes")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["yes"]


def test_libraries_log_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json")
    logging.getLogger("grpc").error("socket %s is gone", "x")
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["level"], line["logger"]) == ("socket x is gone", "error", "grpc")


def test_auto_is_json_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "auto")
    structlog.get_logger().info("hello")
    assert json.loads(capsys.readouterr().err)["event"] == "hello"


def test_a_caller_that_hung_up_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json")
    log = logging.getLogger("grpc._cython.cygrpc")
    log.error("ExecuteBatchError raised in core by servicer method [/offloadd.v1.OffloadService/Restore]")
    log.error("something else")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["something else"]

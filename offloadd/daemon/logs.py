"""Log lines of every process of the daemon: JSON for machines, text for a terminal, never a secret."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final

import structlog

#: Names under which tokens, IPC handles and KV identities travel. A token is the session, a handle is GPU memory, and hashes tell who shares a prompt.
SECRET_NAMES: Final = frozenset({"token", "handle", "key", "keys", "block_hash", "block_hashes", "hashes", "salt", "payload", "offloadd-session"})

LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


#: What gRPC logs as an error, with a traceback, when a caller hung up before the status of its call was sent. Ours do so on purpose once a restore is
#: whole, and any other caller may.
HUNG_UP: Final = "ExecuteBatchError raised in core by servicer method"


def _is_fault(record: logging.LogRecord) -> bool:
    return HUNG_UP not in str(record.msg)


def configure(level: str, format: str) -> None:
    """Send structlog and the standard library's loggers to stderr from `level` (debug, info, warning, error) up, in `format` (auto, json, text).

    `auto` is text if stderr is a terminal. May be called again; the last call counts.
    """
    as_text = format == "text" or (format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_secrets,
    ]
    render: list[structlog.typing.Processor] = (
        # The default traceback shows local variables: tokens and block hashes among them.
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if as_text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    handler.addFilter(_is_fault)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])


def hide_secrets(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace what must not be logged: values under a secret's name, and all bytes, which here are KV, keys or handles."""
    for name, value in event.items():
        if name in SECRET_NAMES:
            event[name] = "<hidden>"
        elif isinstance(value, bytes | bytearray | memoryview):
            event[name] = f"<{len(value)} bytes>"
    return event

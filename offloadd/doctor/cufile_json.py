"""cuFile's configuration file: JSON with comments."""

import json
import re
from typing import Any

from offloadd.machine.system import System

#: A string, or a comment. Strings come first so that `//` inside one is no comment.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def cufile_json_path(system: System) -> str:
    """The file that cuFile reads."""
    return system.environment.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"


def parse(text: str) -> dict[str, Any]:
    """The values of the file. Raises ValueError that says line and column."""
    try:
        # Comments become blanks of the same shape, so that positions in messages are those of the file.
        values = json.loads(_TOKEN.sub(lambda match: match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0]), text))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    return values


def section(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """A nested section; empty if it is not there or no object."""
    for name in names:
        inner = values.get(name)
        values = inner if isinstance(inner, dict) else {}
    return values

"""From a TOML file to a `Config`, or to one message that says which key to mend."""

import difflib
import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from offloadd.config.schema import Config
from offloadd.errors import ConfigError


def load_config(path: Path | None) -> Config:
    """The configuration in the file at `path`; the defaults for None. Raises `ConfigError` that names file, key, value and limit."""
    source = "the default configuration" if path is None else str(path)
    try:
        values = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{source} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is not TOML: {error}") from error
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """All that is wrong, in one line."""
    # A default made from another key is not made when that key is wrong; that key has an error of its own.
    details = [detail for detail in error.errors(include_url=False) if detail["type"] != "default_factory_not_called"]
    return "; ".join(_describe(detail) for detail in details)


def _describe(detail: ErrorDetails) -> str:
    key, value, context = _key(detail["loc"]), _shown(detail["input"]), detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return _unknown(detail["loc"])
        case "missing":
            return f"{key} is missing"
        case "greater_than_equal":
            return f"{key} is {value}; at least {_number(context['ge'])} is needed"
        case "less_than_equal":
            return f"{key} is {value}; at most {_number(context['le'])} is possible"
        case "limit" if isinstance(detail["input"], dict | BaseModel):
            # A rule between keys of one section: its message names them.
            return f"{key}: {context['limit']}" if key else str(context["limit"])
        case "limit":
            return f"{key} is {value}; {context['limit']}"
        case "literal_error":
            return f"{key} is {value}; {context['expected']} is needed"
        case "int_type" | "int_from_float":
            return f"{key} is {value}; a whole number is needed"
        case "float_type" | "finite_number":
            return f"{key} is {value}; a finite number is needed"
        case "bool_type":
            return f"{key} is {value}; true or false is needed"
        case "string_type":
            return f"{key} is {value}; a string is needed"
        case "model_type" | "dict_type":
            return f"{key} is {value}; a table is needed"
        case "tuple_type":
            return f"{key} is {value}; an array of tables is needed: [[{key}]]"
        case "too_long":
            return f"{key} has {context['actual_length']} entries; at most {context['max_length']} are possible"
        case _:
            return f"{key} is {value}; {detail['msg']}"


def _unknown(location: tuple[int | str, ...]) -> str:
    *section, name = location
    known = list(_fields(section))
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {_key((*section, near[0]))}?" if near else f"known: {', '.join(known)}"
    return f"{_key(location)} is unknown; {hint}"


def _fields(section: list[int | str]) -> list[str]:
    model: type[BaseModel] = Config
    for name in section:
        if isinstance(name, str):
            model = _section_model(model, name)
    return list(model.model_fields)


def _section_model(model: type[BaseModel], name: str) -> type[BaseModel]:
    annotation = model.model_fields[name].annotation
    arguments = getattr(annotation, "__args__", (annotation,))
    found = arguments[0]
    assert isinstance(found, type) and issubclass(found, BaseModel)
    return found


def _key(location: tuple[int | str, ...]) -> str:
    """`("volume", 0, "path")` as `volume[0].path`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _number(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else str(limit)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:197]}..."

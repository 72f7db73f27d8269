"""Workload files: small TOML tables, with a `[tiny]` table that takes the place of some values in tests."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"

Kind = TypeVar("Kind", bound=msgspec.Struct)


def load_workload(kind: type[Kind], name: str, *, tiny: bool) -> Kind:
    """The workload `name` (without .toml), checked against its class. Raises msgspec.ValidationError, OSError."""
    values: dict[str, Any] = tomllib.loads((WORKLOADS / f"{name}.toml").read_text())
    smaller = values.pop("tiny", {})
    return msgspec.convert({**values, **(smaller if tiny else {})}, kind)


class Blocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of one region. `start_count`: process starts; `round_count`: measurements in each.

    `scattered`: neighbours in the request lie anywhere in the region, as blocks from an engine's free list do.
    """

    name: str
    block_bytes: int
    block_count: int
    plane_count: int
    start_count: int
    round_count: int
    scattered: bool = False

    @property
    def payload_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.block_bytes * self.block_count

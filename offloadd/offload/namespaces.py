"""The namespaces that the daemon knows: id ↔ number in the index, and where each stands on each volume."""

import asyncio
from dataclasses import dataclass, field

from offloadd.errors import LimitExceeded

#: Numbers are uint16 in the index.
NAMESPACES_MAX = 65535


@dataclass(slots=True)
class NamespaceEntry:
    """One namespace. `on_volumes`: volume ordinal → (ordinal, epoch) in that volume's table. `asked`: volumes whose keepers are asked to enter it → set when
    they have answered."""

    number: int
    namespace_id: bytes
    tenant: str = ""
    fields: bytes = b""
    dropped: bool = False
    on_volumes: dict[int, tuple[int, int]] = field(default_factory=dict)
    asked: dict[int, asyncio.Event] = field(default_factory=dict)


class Namespaces:
    """All namespaces of the daemon's life. Event-loop owned."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, NamespaceEntry] = {}
        self._by_number: list[NamespaceEntry] = []

    def enter(self, namespace_id: bytes) -> NamespaceEntry:
        """The entry of an id, new if unknown. Raises `LimitExceeded` when the index has no number left."""
        entry = self._by_id.get(namespace_id)
        if entry is None:
            if len(self._by_number) >= NAMESPACES_MAX:
                raise LimitExceeded(f"the daemon knows {len(self._by_number)} namespaces; its limit is {NAMESPACES_MAX}")
            entry = NamespaceEntry(number=len(self._by_number), namespace_id=namespace_id)
            self._by_id[namespace_id] = entry
            self._by_number.append(entry)
        return entry

    def find(self, namespace_id: bytes) -> NamespaceEntry | None:
        """The entry of an id, if known."""
        return self._by_id.get(namespace_id)

    def by_number(self, number: int) -> NamespaceEntry:
        """The entry of a number."""
        return self._by_number[number]

    def by_volume_ordinal(self, volume: int) -> dict[int, NamespaceEntry]:
        """Entries of a volume's table by ordinal there."""
        return {entry.on_volumes[volume][0]: entry for entry in self._by_number if volume in entry.on_volumes}

    @property
    def entries(self) -> list[NamespaceEntry]:
        """All entries, by number."""
        return list(self._by_number)

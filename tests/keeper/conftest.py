"""A keeper process to talk to, and slot headers written by hand as a mover would write them."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offloadd.ipc.channel import Channel, socket_pair
from offloadd.keeper.messages import (
    AddNamespace,
    Answer,
    CloseSlab,
    CutSlab,
    Inventory,
    KeeperUp,
    NamespaceAdded,
    NamespaceInfo,
    OpenVolume,
    Recovered,
    ScanFinished,
    SlabInfo,
    SlabReady,
    SummaryPart,
    VolumeAnswers,
    VolumeOpened,
)
from offloadd.tiers.format import FORMAT_VERSION, SLOT_DTYPE, SLOT_MAGIC, SUMMARY_DTYPE, Geometry, new_record, seal
from offloadd.tiers.volume_file import format_volume
from offloadd.units import MIB, SECTOR_BYTES

SLOT_BYTES = 128 * 1024
PAYLOAD_BYTES = SLOT_BYTES - SECTOR_BYTES - 100


class KeeperProcess:
    """A real keeper, driven by hand. What is not the answer waited for is kept in `other`."""

    def __init__(self) -> None:
        ours, theirs = socket_pair()
        ours.settimeout(60)
        self.process = subprocess.Popen([sys.executable, "-m", "offloadd.keeper.main", "--fd", str(theirs.fileno())], pass_fds=(theirs.fileno(),))
        theirs.close()
        self.channel: Channel[Any] = Channel(ours, Answer)
        self.other: list[Any] = []
        self.fds: list[int] = []
        self.ticket = 0
        self.opened: VolumeOpened
        self.slabs: dict[int, SlabInfo] = {}
        self.namespaces: list[NamespaceInfo] = []
        #: Slabs in the order in which they were told.
        self.told: list[int] = []
        self.records: dict[int, np.ndarray] = {}
        self.finished: ScanFinished

    def next_ticket(self) -> int:
        self.ticket += 1
        return self.ticket

    def receive(self) -> tuple[Any, list[int]]:
        """The next message that is no sign of life."""
        while True:
            received = self.channel.receive()
            assert received is not None, "the keeper is gone"
            if not isinstance(received[0], KeeperUp | VolumeAnswers):
                return received

    def answer(self, ticket: int) -> Any:
        """The answer to `ticket`."""
        for message in self.other:
            if getattr(message, "ticket", None) == ticket:
                self.other.remove(message)
                return message
        while True:
            message, fds = self.receive()
            self.fds += fds
            if getattr(message, "ticket", None) == ticket:
                return message
            self.other.append(message)

    def request(self, message: Any, fds: tuple[int, ...] = ()) -> Any:
        self.channel.send(message, fds)
        return self.answer(message.ticket)

    def open(self, path: Path | str, *, fds: tuple[int, ...] = (), prewrite: bool = True) -> "KeeperProcess":
        """Open the volume and wait for the end of the scan."""
        answer = self.request(OpenVolume(ticket=self.next_ticket(), path=str(path), io_threads=4, prewrite=prewrite), fds)
        assert isinstance(answer, VolumeOpened), answer
        self.opened = answer
        assert len(self.fds) == 2
        while True:
            message, _ = self.receive()
            if isinstance(message, Inventory):
                self.slabs |= {info.slab: info for info in message.slabs}
                self.namespaces += message.namespaces
            elif isinstance(message, Recovered):
                assert message.slab in self.slabs and message.slab not in self.told
                part = np.frombuffer(message.records, dtype=SUMMARY_DTYPE)
                held = self.records.get(message.slab, part[:0])
                assert message.first == len(held)
                self.records[message.slab] = np.concatenate([held, part])
                if message.last:
                    self.told.append(message.slab)
                    assert len(self.records[message.slab]) == self.slabs[message.slab].slot_count
            else:
                assert isinstance(message, ScanFinished), message
                self.finished = message
                assert set(self.told) == set(self.slabs)
                return self

    def blocks(self, slab: int) -> dict[int, bytes]:
        """Keys by slot, as told by the scan."""
        return {int(slot): self.records[slab][slot]["key"].tobytes() for slot in np.flatnonzero(self.records[slab]["payload_bytes"])}

    def add_namespace(self, name: str = "n") -> NamespaceAdded:
        answer = self.request(AddNamespace(ticket=self.next_ticket(), namespace_id=namespace_id(name), tenant="tenant", fields=name.encode()))
        assert isinstance(answer, NamespaceAdded), answer
        return answer

    def cut(self, slab: int, slot_bytes: int = SLOT_BYTES) -> SlabReady:
        answer = self.request(CutSlab(ticket=self.next_ticket(), slab=slab, slot_bytes=slot_bytes))
        assert isinstance(answer, SlabReady), answer
        return answer

    def send_summary(self, slab: int, records: np.ndarray) -> None:
        for first in range(0, len(records), 1000):
            self.channel.send(SummaryPart(slab=slab, first=first, records=records[first : first + 1000].tobytes()))

    def close_slab(self, slab: int, records: np.ndarray) -> Any:
        self.send_summary(slab, records)
        return self.request(CloseSlab(ticket=self.next_ticket(), slab=slab))

    def kill(self) -> None:
        """SIGKILL, and our copies of the descriptors closed: the end of the whole daemon as far as the volume can tell."""
        self.process.kill()
        self.process.wait(60)
        self.close_fds()

    def close_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def namespace_id(name: str) -> bytes:
    return name.encode().ljust(32, b"\0")


@pytest.fixture
def new_keeper() -> Iterator[Callable[[], KeeperProcess]]:
    keepers: list[KeeperProcess] = []

    def start() -> KeeperProcess:
        keepers.append(KeeperProcess())
        return keepers[-1]

    yield start
    for keeper in keepers:
        keeper.kill()
        keeper.channel.close()


@pytest.fixture
def volume_path(tmp_path: Path) -> Path:
    """A formatted volume of 4 slabs of 4 MiB."""
    path = tmp_path / "volume"
    format_volume(str(path), volume_bytes=18 * MIB, slab_bytes=4 * MIB, namespace_count=8)
    return path


class Writer:
    """Writes slot headers (and payloads) straight into the volume file."""

    def __init__(self, path: Path, geometry: Geometry) -> None:
        self.path = path
        self.geometry = geometry

    def header(self, ready: SlabReady, slot: int, namespace: NamespaceAdded, /, **changes: Any) -> bytes:
        """4 KiB of a sound header; `changes` are made before it is sealed."""
        record = new_record(SLOT_DTYPE)
        values: dict[str, Any] = {
            "magic": SLOT_MAGIC,
            "format_version": FORMAT_VERSION,
            "checksum_kind": 1,
            "key": key(ready.slab, slot),
            "volume_uuid": self.geometry.volume_uuid,
            "nonce": ready.nonce,
            "slab": ready.slab,
            "slot": slot,
            "generation": 1,
            "namespace_ordinal": namespace.ordinal,
            "namespace_epoch": namespace.epoch,
            "payload_bytes": PAYLOAD_BYTES,
        } | changes
        for name, value in values.items():
            record[name] = np.void(value) if isinstance(value, bytes) else value
        seal(record)
        return record.tobytes()

    def write(self, data: bytes, slab: int, slot: int, slot_bytes: int = SLOT_BYTES, skip_bytes: int = 0) -> None:
        self.patch(self.geometry.slot_offset(slab, slot, slot_bytes) + skip_bytes, data)

    def patch(self, offset: int, data: bytes) -> None:
        fd = os.open(self.path, os.O_RDWR)
        try:
            assert os.pwrite(fd, data, offset) == len(data)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, offset: int, size_bytes: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size_bytes)


def key(slab: int, slot: int) -> bytes:
    return f"key {slab} {slot}".encode().ljust(32, b"\1")


@pytest.fixture
def new_writer() -> Callable[[Path, VolumeOpened], Writer]:
    def make(path: Path, opened: VolumeOpened) -> Writer:
        names = ("volume_uuid", "volume_bytes", "slab_bytes", "slab_count", "data_offset", "namespace_count")
        return Writer(path, Geometry(**{name: getattr(opened, name) for name in names}))

    return make


@pytest.fixture
def new_summary() -> Callable[..., np.ndarray]:
    """A summary of `ready`'s slab with blocks in the slots given."""

    def make(ready: SlabReady, namespace: NamespaceAdded, slots: list[int], payload_bytes: int = PAYLOAD_BYTES) -> np.ndarray:
        records = np.zeros(ready.slot_count, dtype=SUMMARY_DTYPE)
        records["generation"] = 5
        for slot in slots:
            records[slot]["key"] = np.void(key(ready.slab, slot))
            records[slot]["namespace_ordinal"] = namespace.ordinal
            records[slot]["namespace_epoch"] = namespace.epoch
            records[slot]["payload_bytes"] = payload_bytes
        return records

    return make

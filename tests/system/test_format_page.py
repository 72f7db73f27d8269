"""docs/format.md is enough to read a volume: what the daemon wrote is read back by a reader that was written from that page alone."""

import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from offloadd.client import AckLevel, Client, EvictStatus
from offloadd.units import KIB, MIB

from ..tiers.independent_reader import NAMESPACE_FIELDS, Volume, crc32c, key, namespace_id, read_volume
from .daemon_process import DaemonProcess
from .engine_memory import NAMESPACE, Engine, flat

#: Of payloads: padded to a sector, whole sectors, and long enough for a CRC a chunk.
PAYLOAD_BYTES = (20_001, 640 * KIB, 9 * MIB + 5)
BLOCK_COUNT = 6


def _fields(engine: Engine, tenant: str) -> dict[str, object]:
    namespace = engine.namespace
    values: dict[str, object] = {name: getattr(namespace, name, "") for name in NAMESPACE_FIELDS if not name.startswith("shard.")}
    values["tenant"] = tenant
    return values | {f"shard.{name}": getattr(namespace.shard, name) for name in ("layer_start", "layer_count", "head_start", "head_count")}


def _expected(engine: Engine, tenant: str, names: list[str]) -> dict[bytes, bytes]:
    """The payload of each block by its key."""
    identity = namespace_id(_fields(engine, tenant), dict(engine.namespace.extra))
    return {
        key(identity, engine.cache_group, block_hash): b"".join(part.tobytes() for part in engine.expect(name))
        for name, block_hash in zip(names, engine.blocks(range(len(names)), names).hashes, strict=True)
    }


def test_the_reader_knows_the_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_the_page_is_enough_to_read_a_volume(make_daemon: Callable[..., DaemonProcess], ended_by: signal.Signals) -> None:
    daemon = make_daemon(slab_bytes=64 * MIB, volume_bytes=512 * MIB)
    expected: dict[bytes, bytes] = {}
    with Client.connect(daemon.runtime_dir, instance="engine", timeout_s=60) as client:
        for payload_bytes in PAYLOAD_BYTES:
            names = [f"{number} of {payload_bytes} bytes" for number in range(BLOCK_COUNT)]
            engine = Engine(client, flat(BLOCK_COUNT, payload_bytes), payload_bytes % 7, replace(NAMESPACE, model=str(payload_bytes), salt=b"\0salt"))
            answer = engine.evict(range(BLOCK_COUNT), names, ack=AckLevel.DURABLE)
            assert [outcome.status for outcome in answer.outcomes] == [EvictStatus.STORED] * BLOCK_COUNT
            expected |= _expected(engine, client.tenant, names)
        tenant = client.tenant
        daemon.stop(ended_by)
    volume = read_volume(daemon.volumes[0])
    found = {block.key: volume.payload(block) for block in volume.blocks()}
    assert found == expected
    assert [(entry.tenant, entry.epoch) for entry in volume.live_namespaces.values()] == [(tenant, 1)] * len(PAYLOAD_BYTES)
    _check_summaries(volume, clean=ended_by == signal.SIGTERM)


def _check_summaries(volume: Volume, *, clean: bool) -> None:
    for slab, header in enumerate(volume.slabs):
        if header is None:
            continue
        assert bool(header.dirty) != clean
        if clean:
            summary = volume.summary(slab)
            assert summary is not None
            held = [volume.slot(slab, slot) for slot in range(header.slot_count)]
            assert [entry.key if entry.payload_bytes else None for entry in summary] == [block.key if block else None for block in held]

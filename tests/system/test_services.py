"""What surrounds the moves: health, reflection, metrics, status, drain, events, both clients."""

import json
import subprocess
import sys
import threading
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from offloadd.client import AckLevel, AdminClient, AsyncClient, Blocks, Client, HostMemory, Namespace, Path, Plane, Tier
from offloadd.units import KIB, MIB
from offloadd.v1 import admin_pb2

from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat


def test_health_and_reflection_answer_on_both_sockets(daemon: DaemonProcess) -> None:
    for socket, service in (("offloadd.sock", "offloadd.v1.OffloadService"), ("admin.sock", "offloadd.v1.AdminService")):
        with grpc.insecure_channel(f"unix:{daemon.runtime_dir}/{socket}") as channel:
            for name in ("", service):
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert service in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_the_admin_socket_is_for_its_owner_and_the_directory_for_its_group(daemon: DaemonProcess) -> None:
    assert (daemon.runtime_dir / "admin.sock").stat().st_mode & 0o777 == 0o600
    assert (daemon.runtime_dir / "offloadd.sock").stat().st_mode & 0o777 == 0o660
    assert (daemon.runtime_dir / "attach.sock").stat().st_mode & 0o777 == 0o660
    assert daemon.runtime_dir.stat().st_mode & 0o777 == 0o750


def test_metrics_tell_what_was_moved(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(8, 64 * KIB))
    engine.evict(range(4), list("abcd"), ack=AckLevel.DURABLE)
    engine.restore(range(4, 8), ["a", "b", "c", "nobody"])
    url = next(word.split("=", 1)[1] for line in daemon.log.read_text().splitlines() for word in line.split() if word.startswith("metrics=http"))
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    assert 'offloadd_blocks_total{operation="evict",outcome="stored",tier="volume"} 4.0' in text
    assert 'offloadd_blocks_total{operation="restore",outcome="restored",tier="volume"} 3.0' in text
    assert f'offloadd_bytes_total{{operation="restore",path="host",tier="volume",way="plain"}} {float(3 * 64 * KIB)}' in text
    assert 'offloadd_misses_total{outcome="not_found",reason="none"} 1.0' in text


def test_status_is_a_table_for_people_and_json_for_programs(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(8, 64 * KIB))
    engine.evict(range(4), list("abcd"), ack=AckLevel.DURABLE)
    command = [sys.executable, "-m", "offloadd", "status", "--runtime-dir", str(daemon.runtime_dir)]
    values = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=60).stdout)
    assert values["state"] == "SERVING" and int(values["block_count"]) == 4
    people = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "SERVING" in people and "no CUDA device" in people and "engine" in people


def test_drain_by_rpc_ends_the_daemon_with_status_0(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(8, 64 * KIB))
    engine.evict(range(4), list("abcd"), tier=Tier.ARENA, keep=True)
    with AdminClient(daemon.runtime_dir) as admin:
        assert admin.drain() == 4
    assert daemon.process is not None and daemon.process.wait(60) == 0
    daemon.start()
    assert engine.restore(range(4, 8), list("abcd")).restored_count == 4


def test_watchers_hear_of_stored_and_removed_blocks(daemon: DaemonProcess, client: Client) -> None:
    engine = Engine(client, flat(8, 64 * KIB))
    events: list[tuple[int, int, int]] = []
    heard = threading.Event()
    with AdminClient(daemon.runtime_dir) as admin:
        stream = admin.watch_events()

        def read() -> None:
            for event in stream:
                events.append((event.kind, event.tier, len(event.keys)))
                if len(events) == 2:
                    heard.set()
                    return

        reader = threading.Thread(target=read)
        reader.start()
        # The watch begins when the daemon has the call; blocks stored until then are not told, so go on until they are.
        number = 0
        while not events:
            engine.evict([0], [f"block {number}"], tier=Tier.ARENA)
            number += 1
            heard.wait(0.1)
        with AdminClient(daemon.runtime_dir) as other:
            other.drop_namespace(engine.region.namespace_id)
        reader.join(60)
    assert events[0][0] == admin_pb2.EVENT_KIND_STORED


def test_a_restore_estimate_follows_measured_bandwidth(client: Client) -> None:
    engine = Engine(client, flat(64, 256 * KIB), namespace=Namespace(model="estimate", weights="w", block_tokens=16))
    names = [str(index) for index in range(32)]
    engine.evict(range(32), names, tier=Tier.ARENA)
    hashes = engine.blocks(range(32), names).hashes
    before = client.lookup([engine.region], hashes)
    assert before.held_count == 32 and before.estimated_restore_s is None and before.worth_restoring
    engine.restore(range(32, 64), names)
    after = client.lookup([engine.region], hashes, prefill_tokens_per_s=1e12)
    assert after.estimated_restore_s is not None and after.estimated_restore_s > 0
    assert not after.worth_restoring, "512 tokens prefilled in a nanosecond are faster than any restore"
    assert client.lookup([engine.region], hashes, prefill_tokens_per_s=1.0).worth_restoring
    way = next(path for path in client.capabilities().paths if path.path == Path.DDR)
    assert way.restore_bytes_per_s > 0 and way.evict_bytes_per_s > 0


async def test_the_asyncio_client_moves_blocks_too(daemon: DaemonProcess) -> None:
    async with await AsyncClient.connect(daemon.runtime_dir, instance="asyncio") as client:
        memory = HostMemory.allocate(1 * MIB)
        kv = memory.numpy("u1", (16, 64 * KIB))
        kv[:8] = 7
        region = await client.register_region(block_count=16, planes=[Plane(0, 0, 64 * KIB, 64 * KIB)], memories=[memory], namespace=Namespace(model="async"))
        names = [bytes([index]) for index in range(8)]
        assert (await client.evict(Blocks(region, range(8), names), ack=AckLevel.DURABLE)).all_stored
        assert (await client.restore(Blocks(region, range(8, 16), names))).restored_count == 8
        assert (kv[8:] == 7).all()


def test_memory_is_handed_out_as_torch_tensors(client: Client) -> None:
    import torch

    memory = HostMemory.allocate(1 * MIB)
    tensor = memory.torch(torch.bfloat16, (8, 2, 32 * KIB))
    region = client.register_region(
        block_count=8, planes=[Plane(0, 0, 128 * KIB, 128 * KIB)], memories=[memory], namespace=Namespace(model="torch", kv_dtype="bfloat16")
    )
    tensor[0] = torch.randn(2, 32 * KIB)
    wanted = tensor[0].clone()
    assert client.evict(Blocks(region, [0], [b"x"]), ack=AckLevel.DURABLE).all_stored
    tensor.zero_()
    assert client.restore(Blocks(region, [5], [b"x"])).restored_count == 1
    assert torch.equal(tensor[5], wanted)

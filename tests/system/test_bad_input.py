"""Garbage in, error out: each names the value and the limit, nothing is lost, and the daemon goes on."""

import os
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

from offloadd.client import Blocks, Client, HostMemory, Namespace, Plane, RestoreStatus
from offloadd.client.cuda import DeviceMemory
from offloadd.errors import InvalidRequest, LimitExceeded, PathUnavailable, UnknownRegion
from offloadd.model.enums import AckLevel, Path, Tier
from offloadd.units import KIB, MIB
from offloadd.v1 import offload_pb2 as pb
from offloadd.v1.offload_pb2_grpc import OffloadServiceStub

from .daemon_process import DaemonProcess
from .engine_memory import Engine, flat


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return make_daemon(limits={"blocks_per_request_max": 32, "regions_per_session_max": 2, "planes_per_region_max": 4})


@pytest.fixture
def engine(client: Client) -> Iterator[Engine]:
    """An engine with one block stored, which must still be there at the end of the test."""
    made = Engine(client, flat(64, 8 * KIB))
    assert made.evict([0], ["precious"], ack=AckLevel.DURABLE).all_stored
    yield made
    assert made.restore([63], ["precious"]).restored_count == 1 and made.holds(63, "precious")


def test_a_call_without_a_token_or_with_a_wrong_one_is_refused(daemon: DaemonProcess, engine: Engine) -> None:
    with grpc.insecure_channel(f"unix:{daemon.runtime_dir}/offloadd.sock") as channel:
        stub = OffloadServiceStub(channel)
        for metadata in ((), (("offloadd-session", "f" * 64),), (("offloadd-session", ""),)):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Evict(pb.EvictRequest(), metadata=metadata)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_foreign_region_does_not_exist_for_another_session(daemon: DaemonProcess, engine: Engine) -> None:
    with Client.connect(daemon.runtime_dir, instance="other") as other:
        theirs = Engine(other, flat(4, 8 * KIB))
        stolen = theirs.region
        stolen.region_id = engine.region.region_id
        with pytest.raises(UnknownRegion):
            other.evict(Blocks(stolen, [0], [b"x"]))


def test_a_block_index_out_of_range_is_named_with_the_limit(engine: Engine) -> None:
    for indices in ([64], range(40, 65)):
        with pytest.raises(InvalidRequest, match=r"64.*has 64"):
            engine.evict(indices, [f"n{index}" for index in indices], fill=False)
    # And by the daemon, for clients that don't look.
    link = engine.client._live()
    span = pb.BlockSpan(region_id=engine.region.region_id, start=64, count=1, block_hashes=[b"x"])
    with pytest.raises(grpc.RpcError) as caught:
        link.stub.Evict(pb.EvictRequest(spans=[span]), metadata=link.metadata)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "its region has 64 blocks" in caught.value.details()


def test_overlapping_destinations_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"block index 5 .* stands twice"):
        engine.client.restore([engine.blocks([5, 6], ["a", "b"]), engine.blocks([4, 5], ["c", "d"])])


def test_duplicate_keys_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="stands twice"):
        engine.evict([1, 2], ["same", "same"], fill=False)
    with pytest.raises(InvalidRequest, match="stands twice"):
        engine.restore([1, 2], ["same", "same"])


def test_too_many_blocks_are_refused_with_both_numbers(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"33.*blocks_per_request_max is 32"):
        engine.evict(range(33), [str(index) for index in range(33)], fill=False)


def test_zero_length_and_miscounted_spans_are_refused(engine: Engine) -> None:
    client = engine.client
    region_id = engine.region.region_id
    link = client._live()
    for span, message in (
        (pb.BlockSpan(region_id=region_id, start=0, count=0), "count 0"),
        (pb.BlockSpan(region_id=region_id, start=0, count=2, block_hashes=[b"x"]), "1 block hashes for a count of 2"),
        (pb.BlockSpan(region_id=region_id, start=0, count=1, block_hashes=[b""]), "0 bytes"),
        (pb.BlockSpan(region_id=region_id, start=0, count=1, block_hashes=[b"x" * 65]), "65 bytes"),
        (pb.BlockSpan(region_id=region_id, start=2**32 - 1, count=2, block_hashes=[b"x", b"y"]), "64 blocks"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            link.stub.Evict(pb.EvictRequest(spans=[span]), metadata=link.metadata)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert message in caught.value.details()
    with pytest.raises(grpc.RpcError) as caught:
        link.stub.Evict(pb.EvictRequest(), metadata=link.metadata)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "no blocks" in caught.value.details()


def test_numbers_outside_the_enums_are_refused_by_name(engine: Engine) -> None:
    link = engine.client._live()
    span = pb.BlockSpan(region_id=engine.region.region_id, start=0, count=1, block_hashes=[b"x"])
    for field in ("ack", "tier", "path", "priority"):
        with pytest.raises(grpc.RpcError) as caught:
            link.stub.Evict(pb.EvictRequest(spans=[span], **{field: 99}), metadata=link.metadata)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and f"{field} is 99" in caught.value.details()


def test_an_unsealed_or_short_memfd_is_refused(client: Client, engine: Engine) -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 * MIB)
    attach = client._live().attach
    try:
        with pytest.raises(InvalidRequest, match="F_SEAL_SHRINK"):
            attach.attach_memory(fd, 1 * MIB)
        sealed = HostMemory.allocate(1 * MIB)
        with pytest.raises(InvalidRequest, match=str(2 * MIB)):
            attach.attach_memory(sealed.fd, 2 * MIB)
    finally:
        os.close(fd)


def test_planes_outside_their_memory_are_refused_and_nothing_is_registered(daemon: DaemonProcess, client: Client, engine: Engine) -> None:
    memory = HostMemory.allocate(1 * MIB)
    for planes, message in (
        ([Plane(0, 0, 4096, 4096)], r"ends at byte 1052672.*1048576"),
        ([Plane(1, 0, 4096, 4096)], "names memory 1"),
        ([Plane(0, 0, 2048, 4096)], "overlap"),
        ([Plane(0, 0, 2048, 2048), Plane(0, 1024, 2048, 2048)], "overlap"),
        ([], "no planes"),
        ([Plane(0, 0, 16, 0)], "block_bytes 0"),
        ([Plane(0, index * 16, 128, 16) for index in range(5)], "5 planes; planes_per_region_max is 4"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            client.register_region(block_count=257, planes=planes, memories=[memory], namespace=Namespace(model="x"))
    assert daemon.status().sessions[0].region_count == 1


def test_unknown_devices_paths_and_too_many_regions_have_clear_answers(client: Client, engine: Engine) -> None:
    memory = HostMemory.allocate(1 * MIB)
    plane = Plane(0, 0, 4096, 4096)
    there = DeviceMemory("GPU-1", 1 * MIB, 0, 1 * MIB, bytes(64), (), None)
    with pytest.raises(PathUnavailable, match="device 'GPU-1' has no mover on this node; devices are host"):
        client.register_region(block_count=4, planes=[plane], memories=[there], namespace=Namespace(model="x"))
    with pytest.raises(InvalidRequest, match=r"lie on 2 devices \(GPU-1, host\); they must lie on one"):
        client.register_region(block_count=4, planes=[plane, Plane(1, 0, 4096, 4096)], memories=[there, memory], namespace=Namespace(model="x"))
    with pytest.raises(PathUnavailable, match="gds is not available: device host is no CUDA device"):
        engine.evict([1], ["a"], path=Path.GDS, require_path=True)
    with pytest.raises(PathUnavailable, match="bounce is not available: device host is no CUDA device"):
        engine.restore([1], ["precious"], path=Path.BOUNCE, require_path=True)
    assert engine.evict([1], ["a"], path=Path.GDS).all_stored, "without require_path another way is taken, and told"
    client.register_region(block_count=4, planes=[plane], memories=[memory], namespace=Namespace(model="x"))
    with pytest.raises(LimitExceeded, match="regions_per_session_max is 2"):
        client.register_region(block_count=4, planes=[plane], memories=[memory], namespace=Namespace(model="x"))


def test_a_deadline_that_has_passed_starts_nothing(engine: Engine) -> None:
    link = engine.client._live()
    span = pb.BlockSpan(region_id=engine.region.region_id, start=1, count=1, block_hashes=[b"late"])
    request = pb.EvictRequest(spans=[span])
    request.deadline.nanos = -1
    with pytest.raises(grpc.RpcError) as caught:
        link.stub.Evict(request, metadata=link.metadata)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "deadline_s_max" in caught.value.details()


def test_a_block_longer_than_a_slab_is_rejected_by_the_volume(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    with Client.connect(daemon.runtime_dir, instance="big") as client:
        engine = Engine(client, flat(2, 17 * MIB))
        answer = engine.evict([0], ["big"], ack=AckLevel.DURABLE)
        assert [(outcome.status.name, outcome.reason.name) for outcome in answer.outcomes] == [("REJECTED", "TOO_LARGE")]


def test_a_volume_truncated_under_the_daemon_costs_blocks_not_the_daemon(daemon: DaemonProcess, engine: Engine) -> None:
    names = [str(index) for index in range(32)]
    assert engine.evict(range(1, 33), names, ack=AckLevel.DURABLE).all_stored
    size = daemon.volumes[0].stat().st_size
    os.truncate(daemon.volumes[0], 2 * MIB)
    before = [array.copy() for array in engine.bytes]
    answer = engine.restore(range(32), names)
    assert {outcome.status for outcome in answer.outcomes} <= {RestoreStatus.DATA_LOSS, RestoreStatus.FAILED}
    assert all(np.array_equal(array, old) for array, old in zip(engine.bytes, before, strict=True)), "a destination of a failed restore was written"
    assert engine.evict([1], ["in the arena"], tier=Tier.ARENA).all_stored
    assert engine.restore([2], ["in the arena"]).restored_count == 1
    os.truncate(daemon.volumes[0], size)
    # What was cut off is gone, the precious block with it; put it back for the fixture's last look.
    assert engine.evict([0], ["precious"], tier=Tier.ARENA).all_stored


def test_a_truncated_volume_is_refused_at_start_and_the_rest_serves(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(volume_count=2)
    daemon.stop()
    os.truncate(daemon.volumes[0], 20 * MIB)
    daemon.start()
    states = [volume.state for volume in daemon.status().volumes]
    assert states[0].startswith("failed") and str(20 * MIB) in states[0] and str(128 * MIB) in states[0]
    assert states[1] in ("serving", "recovering")
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(4, 8 * KIB))
        assert engine.evict([0], ["a"], ack=AckLevel.DURABLE).all_stored


def test_a_bit_flipped_on_the_volume_is_data_loss_and_never_reaches_the_engine(daemon: DaemonProcess, engine: Engine) -> None:
    names = [str(index) for index in range(8)]
    engine.evict(range(1, 9), names, ack=AckLevel.DURABLE)
    content = daemon.volumes[0].read_bytes()
    payload = b"".join(view.tobytes() for view in engine.views(3))
    offset = content.index(payload[:4096])
    with daemon.volumes[0].open("r+b") as file:
        file.seek(offset + 100)
        byte = file.read(1)[0]
        file.seek(offset + 100)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    before = engine.views(30)[0].copy()
    answer = engine.restore(range(28, 36), names)
    bad = [index for index, outcome in enumerate(answer.outcomes) if not outcome.restored]
    assert bad == [2]
    assert (answer.outcomes[2].status.name, answer.outcomes[2].reason.name) == ("DATA_LOSS", "CHECKSUM_MISMATCH")
    assert np.array_equal(engine.views(30)[0], before)
    assert engine.restore([30], [names[2]]).outcomes[0].status == RestoreStatus.NOT_FOUND, "a lost block is dropped"


def test_a_full_disk_is_told_at_once_and_loses_nothing_that_was_stored(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(file_bytes_max=40 * MIB, arena_bytes=16 * MIB)
    with Client.connect(daemon.runtime_dir, instance="engine") as client:
        engine = Engine(client, flat(64, 1 * MIB))
        names = [str(index) for index in range(48)]
        answer = engine.evict(range(48), names, ack=AckLevel.DURABLE, deadline_s=120)
        stored = [name for name, outcome in zip(names, answer.outcomes, strict=True) if outcome.stored]
        refused = {(outcome.status.name, outcome.reason.name) for outcome in answer.outcomes if not outcome.stored}
        assert 0 < len(stored) < 48 and refused == {("REJECTED", "IO_ERROR")}
        assert answer.times.total_s < 60, "it waited for its deadline"
        engine.wipe()
        assert engine.restore(range(len(stored)), stored).restored_count == len(stored)
        assert all(engine.holds(index, name) for index, name in enumerate(stored))
        assert engine.evict([60], ["copied"], tier=Tier.ARENA).all_stored

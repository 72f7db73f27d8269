import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd import errors
from offloadd.client import Blocks, HostMemory, Namespace, Plane, Region, ShardName, calls, convert
from offloadd.errors import DaemonFailed, InvalidRequest, NotAllowed, OffloaddError
from offloadd.model.enums import EvictStatus, Path, Reason, RestoreStatus, Tier
from offloadd.model.runtime import refuse_foreign_dir, runtime_dir_default
from offloadd.model.status import CODE_OF, code_of, error_of_code, error_of_kind
from offloadd.v1 import offload_pb2 as pb


def region(block_count: int = 1000) -> Region:
    return Region("host", 0, block_count, (Plane(0, 0, 64, 64),), (), Namespace(), region_id=b"r")


@given(st.lists(st.integers(0, 40), max_size=60))
def test_spans_name_every_block_once_in_order_and_never_stand_side_by_side(indices: list[int]) -> None:
    hashes = [position.to_bytes(4, "little") for position in range(len(indices))]
    spans = convert.spans(Blocks(region(), indices, hashes))
    assert [span.start + i for span in spans for i in range(span.count)] == indices
    assert [block_hash for span in spans for block_hash in span.block_hashes] == hashes
    assert all(span.count == len(span.block_hashes) >= 1 for span in spans)
    assert all(one.start + one.count != two.start for one, two in itertools.pairwise(spans))


def test_indices_may_be_a_numpy_array_and_regions_may_stand_side_by_side() -> None:
    first, second = region(), region()
    second.region_id = b"s"
    spans = convert.spans([Blocks(first, np.array([3, 4, 9]), [b"a", b"b", b"c"]), Blocks(second, range(10, 12), [b"a", b"b"])])  # type: ignore[arg-type]
    assert [(span.region_id, span.start, span.count) for span in spans] == [(b"r", 3, 2), (b"r", 9, 1), (b"s", 10, 2)]


@pytest.mark.parametrize(
    ("indices", "hashes", "words"),
    [
        ([0, 1], [b"a"], "2 indices and 1 hashes"),
        ([0], [b""], "0 bytes; 1 to 64"),
        ([0], [b"x" * 65], "65 bytes; 1 to 64"),
        ([-1], [b"a"], "blocks -1 to -1"),
        ([999, 1000], [b"a", b"b"], "blocks 999 to 1000 do not lie in the region; it has 1000"),
    ],
)
def test_blocks_that_can_not_be_are_refused_before_anything_is_sent(indices: list[int], hashes: list[bytes], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        convert.spans(Blocks(region(), indices, hashes))


def test_a_region_that_was_unregistered_can_not_be_named() -> None:
    gone = region()
    gone.region_id = b""
    with pytest.raises(InvalidRequest, match="not registered"):
        convert.spans(Blocks(gone, [0], [b"a"]))
    with pytest.raises(InvalidRequest, match="not registered"):
        convert.lookup_request([gone], [b"a"])


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_can_not_be_are_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="can't be asked for"):
        convert.evict_request(Blocks(region(), [0], [b"a"]), deadline_s=seconds)


def test_unset_times_stay_unset_and_set_ones_keep_their_nanoseconds() -> None:
    unset = convert.evict_request(Blocks(region(), [0], [b"a"]))
    assert not unset.HasField("deadline") and not unset.HasField("keep_ttl")
    request = convert.evict_request(Blocks(region(), [0], [b"a"]), deadline_s=0.25, keep_ttl_s=0.0, tier=Tier.VOLUME, path=Path.HOST, require_path=True)
    assert convert.seconds(request.deadline) == 0.25 and request.HasField("keep_ttl")
    assert (request.tier, request.path, request.require_path) == (pb.TIER_VOLUME, pb.PATH_HOST, True)


def test_a_client_can_not_name_its_tenant() -> None:
    with pytest.raises(InvalidRequest, match="uid:0"):
        convert.namespace(Namespace(tenant="uid:0"))


def test_every_field_of_a_namespace_travels() -> None:
    message_fields = {field.name for field in pb.Namespace.DESCRIPTOR.fields}
    assert message_fields == set(Namespace.__dataclass_fields__) - {"tenant"}
    texts = {name: name for name in message_fields - {"block_tokens", "salt", "shard", "extra"}}
    sent = convert.namespace(Namespace(block_tokens=16, salt=b"s", extra=(("a", "b"),), **texts))  # type: ignore[arg-type]
    assert all(getattr(sent, name) == name for name in texts)
    assert (sent.block_tokens, sent.salt, [(f.name, f.value) for f in sent.extra]) == (16, b"s", [("a", "b")])
    assert convert.selectors([ShardName(Namespace(model="m"), 3)])[0].cache_group == 3


def test_an_answer_with_too_few_or_too_many_outcomes_is_never_taken_for_success() -> None:
    answer = pb.EvictResponse(outcomes=[pb.EvictOutcome(status=pb.EVICT_STATUS_STORED)])
    assert convert.evict_result(answer, 1).all_stored
    for count in (0, 2):
        with pytest.raises(DaemonFailed, match=f"1 outcomes for {count} blocks"):
            convert.evict_result(answer, count)
    parser = convert.RestoreParser(2)
    assert parser.part(pb.RestoreResponse(outcomes=[pb.RestoreOutcome(status=pb.RESTORE_STATUS_RESTORED)])).first_position == 0
    with pytest.raises(DaemonFailed, match="1 outcomes for 2 blocks"):
        parser.end()
    with pytest.raises(DaemonFailed, match="3 outcomes for 2 blocks"):
        parser.part(pb.RestoreResponse(outcomes=[pb.RestoreOutcome()] * 2))


@pytest.mark.parametrize("status", [0, 77])
def test_a_status_this_client_does_not_know_lets_nobody_reuse_the_block(status: int) -> None:
    evicted = pb.EvictResponse.FromString(bytes([0x0A, 4, 0x08, status, 0x10, 99]))
    outcome = convert.evict_result(evicted, 1).outcomes[0]
    assert outcome.status is EvictStatus.QUARANTINED and not outcome.stored and outcome.reason is Reason.NONE
    restored = pb.RestoreResponse.FromString(bytes([0x0A, 4, 0x08, status, 0x10, 99]))
    assert convert.RestoreParser(1).part(restored).outcomes[0].status is RestoreStatus.QUARANTINED


def test_a_restores_usable_prefix_ends_at_the_first_block_that_is_missing() -> None:
    good, bad = (pb.RestoreOutcome(status=status) for status in (pb.RESTORE_STATUS_RESTORED, pb.RESTORE_STATUS_NOT_FOUND))
    parser = convert.RestoreParser(4)
    result = convert.restore_result([parser.part(pb.RestoreResponse(outcomes=[good, good])), parser.part(pb.RestoreResponse(outcomes=[bad, good]))])
    assert (result.prefix_count, result.restored_count, result.all_restored) == (2, 3, False)


def test_each_error_has_a_code_of_its_own_and_comes_back_as_itself() -> None:
    import grpc

    for kind, code in CODE_OF.items():
        assert code in grpc.StatusCode.__members__
        assert code_of(kind("x")) == code and type(error_of_code(code, "x")) is kind and type(error_of_kind(kind.__name__, "x")) is kind
    raised = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OffloaddError) and kind.__name__ in str(errors.__doc__)}
    start_up = {errors.ConfigError, errors.AlreadyRunning} | {kind for kind in raised if issubclass(kind, errors.VolumeError)}
    assert raised - start_up - {OffloaddError} == set(CODE_OF)
    assert code_of(ValueError("x")) == "INTERNAL" and type(error_of_kind("SystemExit", "x")) is DaemonFailed


def test_an_error_without_a_code_is_no_crash() -> None:
    import grpc

    assert "boom" in str(calls.error_of(grpc.RpcError("boom")))


def test_the_runtime_directory_is_the_named_one_then_the_systems_then_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOADD_RUNTIME_DIR", "/named")
    assert str(runtime_dir_default()) == "/named"
    monkeypatch.delenv("OFFLOADD_RUNTIME_DIR")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert str(runtime_dir_default()) == "/run/offloadd"
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    monkeypatch.setattr("pathlib.Path.is_dir", lambda self: str(self) == "/run/offloadd")
    assert str(runtime_dir_default()) == "/run/offloadd"
    monkeypatch.setattr("pathlib.Path.is_dir", lambda self: False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")
    assert str(runtime_dir_default()) == "/run/user/1234/offloadd"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(runtime_dir_default()) == "/tmp/offloadd-1234"


def test_memory_is_not_handed_to_a_directory_that_strangers_may_write_to(tmp_path: "object") -> None:
    import pathlib

    directory = pathlib.Path(str(tmp_path)) / "open"
    refuse_foreign_dir(directory)
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(NotAllowed, match="mode 0777"):
        refuse_foreign_dir(directory)
    directory.chmod(0o755)
    refuse_foreign_dir(directory)


def test_arrays_and_tensors_see_the_same_memory_and_outlive_its_close() -> None:
    import torch

    memory = HostMemory.allocate(8192)
    array = memory.numpy(np.uint8, (4, 1024), offset_bytes=4096)
    tensor = memory.torch(torch.float16, (2, 1024), offset_bytes=4096)
    tensor.fill_(1.0)
    assert array[0, :2].tobytes() == np.float16(1.0).tobytes()
    second = HostMemory.from_fd(__import__("os").dup(memory.fd))
    assert second.memory_bytes == 8192 and second.numpy(np.float16, (2048,), 4096)[0] == 1.0
    second.close()
    memory.close()
    memory.close()
    array[:] = 7
    assert tensor.view(torch.uint8)[0, 0] == 7
    with pytest.raises(InvalidRequest, match="closed"):
        _ = memory.fd


@pytest.mark.parametrize(("shape", "offset_bytes"), [((4097,), 0), ((1,), 4096), ((1,), -1), ((0,), 0)])
def test_a_view_that_does_not_fit_is_refused(shape: tuple[int, ...], offset_bytes: int) -> None:
    with HostMemory.allocate(4096) as memory, pytest.raises(InvalidRequest, match="4096 bytes"):
        memory.numpy(np.uint8, shape, offset_bytes)


def test_an_unsealed_memfd_is_refused_and_closed() -> None:
    import os

    fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(InvalidRequest, match="seals"):
        HostMemory.from_fd(fd)
    with pytest.raises(OSError):
        os.fstat(fd)

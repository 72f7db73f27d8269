"""What the grid is made of: bytes of real models, the cases that a command line asks for, and the estimate of recompute."""

import argparse
from pathlib import Path

import pytest

from bench.grid.cases import plan_groups, plan_recompute
from bench.grid.models import kv_shape, load_models
from bench.grid.options import FULL, Options, add_options, check, read_options
from bench.grid.recompute import load_gpus, prefill_s, recompute_row
from bench.grid.room import HostRoom, arena_need, gpu_fault, volume_fault, volume_need, volume_slots
from bench.support.rows import Operation
from offloadd.tiers.format import plan_geometry, slot_bytes_for, slot_count_for
from offloadd.tiers.volume_file import format_volume
from offloadd.tiers.volume_io import open_volume, write_full
from offloadd.units import GIB, KIB, MIB, SECTOR_BYTES

MODELS = load_models()


def options_of(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    add_options(parser)
    arguments = parser.parse_args(words)
    check(parser, arguments)
    return read_options(arguments)


@pytest.mark.parametrize(
    ("model", "ranks", "kv_dtype", "token_bytes"),
    [
        # 2 × layers × KV heads × head dimension × bytes.
        ("llama-3-70b", 1, "fp16", 327_680),
        ("llama-3-70b", 8, "bf16", 40_960),
        ("llama-3-70b", 8, "fp8", 20_480),
        ("llama-3-8b", 1, "bf16", 131_072),
        ("qwen3-32b", 1, "bf16", 262_144),
        ("qwen3-30b-a3b", 1, "bf16", 98_304),
        # 4 KV heads over 8 ranks: each is on two of them.
        ("qwen3-30b-a3b", 4, "bf16", 24_576),
        ("qwen3-30b-a3b", 8, "bf16", 24_576),
        # 61 layers × (512 + 64) × 2, on every rank.
        ("deepseek-v3", 1, "bf16", 70_272),
        ("deepseek-v3", 8, "bf16", 70_272),
        ("deepseek-v3", 8, "fp8", 35_136),
    ],
)
@pytest.mark.parametrize("layout", ["layers", "cross-layer"])
def test_a_token_takes_the_bytes_that_its_model_publishes(model: str, ranks: int, kv_dtype: str, token_bytes: int, layout: str) -> None:
    shape = kv_shape(MODELS[model], tensor_parallel=ranks, kv_dtype=kv_dtype, block_tokens=16, layout=layout)
    assert shape.block_bytes == 16 * token_bytes


def test_layers_lie_as_an_engine_allocates_them() -> None:
    shape = kv_shape(MODELS["llama-3-70b"], tensor_parallel=8, kv_dtype="fp16", block_tokens=16, layout="layers")
    assert (shape.block_bytes, shape.plane_count, shape.piece_bytes) == (640 * KIB, 160, 4 * KIB)
    latent = kv_shape(MODELS["deepseek-v3"], tensor_parallel=8, kv_dtype="bf16", block_tokens=64, layout="layers")
    assert (latent.plane_count, latent.piece_bytes) == (61, 64 * 576 * 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--models gpt-2", "model is 'gpt-2'; known are llama-3-70b"),
        ("--tp 9", "tp is '9'; a whole number from 1 to 8"),
        ("--tp 0", "tp is '0'"),
        ("--models llama-3-8b --tp 3", "--tp 3: llama-3-8b has 32 attention heads"),
        ("--dtypes int4", "dtype is 'int4'; known are bf16, fp16, fp8"),
        ("--tokens -5", "tokens is '-5'; a whole number from 1"),
        ("--tokens 1e3", "tokens is '1e3'"),
        ("--tokens 200000", "--tokens 200000: a request moves at most 8192 blocks, of 16 tokens each: 131072 tokens"),
        ("--block-tokens 1", "--tokens 32768: a request moves at most 8192 blocks, of 1 tokens each: 8192 tokens"),
        ("--depths 65", "depth is '65'; a whole number from 1 to 64"),
        ("--paths ssd", "path is 'ssd'; known are gds, bounce, ddr, host, recompute"),
        ("--gpus 0 --paths gds host", "--gpus 0: paths gds and bounce need a GPU"),
        ("--rounds 0", "rounds is '0'; a whole number from 1 to 1000"),
        ("--operations delete", "operation is 'delete'; known are evict, restore"),
        ("--recompute-gpu TPU", "recompute-gpu is 'TPU'; known are A100"),
        ("--volumes /nowhere/at/all", "/nowhere/at is no directory"),
        ("--volumes /tmp/one /tmp/one", "--volumes names one twice"),
        ("--quick --full", "not allowed with argument"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name_with_the_limit(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(*words.split())
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_volume_that_holds_blocks_or_something_else_is_never_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, cut, foreign = tmp_path / "empty", tmp_path / "cut", tmp_path / "foreign"
    foreign.write_bytes(b"a letter" * 4096)
    format_volume(str(empty), volume_bytes=64 * MIB, slab_bytes=16 * MIB)
    geometry = format_volume(str(cut), volume_bytes=64 * MIB, slab_bytes=16 * MIB)
    file = open_volume(str(cut), busy_wait_s=0)
    # A header that can't be read may stand before blocks, too.
    write_full(file.synced_fd, b"\1" * SECTOR_BYTES if not file.direct_io else _page(1), geometry.slab_offset(0), "slab header")
    with pytest.raises(SystemExit):
        options_of("--volumes", str(cut))
    assert "is open in another process" in capsys.readouterr().err
    file.close()
    before = cut.read_bytes(), foreign.read_bytes()
    for path, said in ((cut, "1 of 3 slabs cut"), (foreign, "is not an offloadd volume")):
        with pytest.raises(SystemExit):
            options_of("--volumes", str(path))
        assert said in " ".join(capsys.readouterr().err.split())
    assert options_of("--volumes", str(empty), str(tmp_path / "new")).volume_count == 2
    assert (cut.read_bytes(), foreign.read_bytes()) == before and not (tmp_path / "new").exists()


def _page(value: int) -> memoryview:
    from offloadd.tiers.volume_io import allocate

    page = allocate(SECTOR_BYTES)
    page[:] = bytes([value]) * SECTOR_BYTES
    return page


def test_every_case_comes_once_and_has_a_name_of_its_own() -> None:
    for words in ((), ("--quick",), ("--full",), ("--tiny",), ("--gpus", "4", "--volumes", "/tmp/a-new-one", "/tmp/another-new-one")):
        options = options_of(*words)
        cases = [case for group in plan_groups(options, MODELS) for case in group.cases] + plan_recompute(options, MODELS)
        names = [case.name for case in cases]
        assert cases and len(set(names)) == len(names)


def test_the_usual_grid_varies_one_axis_at_a_time_and_the_full_one_all() -> None:
    usual, full = options_of("--gpus", "1"), options_of("--full", "--gpus", "1")
    cases = [case for group in plan_groups(usual, MODELS) for case in group.cases if case.gpu_count]
    assert {case.path for case in cases} == {"gds", "bounce", "ddr"}
    assert {case.model for case in cases} == set(MODELS) and {case.tensor_parallel for case in cases} == {1, 2, 4, 8}
    assert {case.kv_dtype for case in cases} == {"bf16", "fp8"}
    assert {case.block_count for case in cases} >= {1, 2048} and {case.queue_depth for case in cases} == {1, 4, 16}
    assert all(case.queue_depth == 1 for case in cases if case.model != "llama-3-70b")
    points = len(FULL.models) * len(FULL.tensor_parallel) * len(FULL.kv_dtypes) * len(FULL.tokens) * len(FULL.depths)
    assert sum(len(group.cases) for group in plan_groups(full, MODELS) if group.gpu_count) == points * 3 * 2


def test_more_gpus_and_volumes_are_axes() -> None:
    options = options_of("--gpus", "4", "--volumes", "/tmp/a-new-one", "/tmp/another-new-one", "--paths", "gds", "ddr", "host")
    groups = {(group.gpu_count, group.volume_count): group.cases for group in plan_groups(options, MODELS)}
    assert set(groups) == {(0, 1), (0, 2), (1, 1), (1, 2), (4, 1), (4, 2)}
    assert {case.path for case in groups[4, 2]} == {"gds"} and {case.path for case in groups[4, 1]} == {"gds", "ddr"}
    assert len({(case.model, case.tokens) for case in groups[4, 2]}) == 1


def test_the_last_block_may_hold_fewer_tokens() -> None:
    (case,) = plan_groups(options_of("--tokens", "17", "--depths", "1", "--models", "llama-3-8b", "--tp", "8", "--dtypes", "bf16", "--gpus", "0",
                                     "--paths", "host", "--operations", "evict"), MODELS)[0].cases  # fmt: skip
    assert (case.block_count, case.ack, case.operation) == (2, "durable", Operation.EVICT)


def test_recompute_takes_the_longer_of_computing_and_reading_the_weights() -> None:
    gpus = load_gpus()
    gpu = next(one for one in gpus.gpu if one.name == "H100")
    model = MODELS["llama-3-70b"]
    # 2 × 70.6e9 × 8192 operations, and 80 layers × 64 heads × 256 × 8192² for attention, over 8 GPUs of 989e12, half of which is reached.
    expected = (2 * 70.6e9 * 8192 + 80 * 64 * 256 * 8192**2) / (989e12 * 8 * 0.5)
    assert prefill_s(model, tensor_parallel=8, tokens=8192, gpu=gpu, efficiency=0.5) == pytest.approx(expected)
    # One token: the weights, 141.2 GB, at 3.35 TB/s.
    assert prefill_s(model, tensor_parallel=1, tokens=1, gpu=gpu, efficiency=1.0) == pytest.approx(141.2e9 / 3.35e12)
    mixture = MODELS["qwen3-30b-a3b"]
    assert prefill_s(mixture, tensor_parallel=1, tokens=1, gpu=gpu, efficiency=1.0) == pytest.approx(3.3e9 * 2 / 3.35e12)
    (case,) = plan_recompute(options_of("--tokens", "8192", "--depths", "1", "--models", "llama-3-70b", "--tp", "8", "--dtypes", "bf16"), MODELS)
    row = recompute_row(case, model, gpu, 0.5)
    assert row.estimated and row.seconds == [pytest.approx(expected)] and not row.proven and not row.skipped


def test_what_there_is_no_room_for_says_how_much_it_needs() -> None:
    (ddr,) = [case for group in plan_groups(options_of("--tokens", "8192", "--depths", "1", "--models", "llama-3-70b", "--tp", "1", "--dtypes", "bf16",
                                            "--gpus", "0", "--paths", "ddr", "--operations", "restore"), MODELS) for case in group.cases]  # fmt: skip
    need = arena_need(ddr)
    assert need >= 2 * ddr.payload_bytes
    assert HostRoom(ddr.payload_bytes, need).fault(ddr) == "" and "2.5 GiB of engine memory" in HostRoom(ddr.payload_bytes - 1, need).fault(ddr)
    assert "can be given to it" in HostRoom(ddr.payload_bytes, need - 1).fault(ddr)
    assert gpu_fault(ddr, 4 * GIB) == "" and "needs 2.5 GiB of GPU memory" in gpu_fault(ddr, 3 * GIB)


@pytest.mark.parametrize("tokens", ["16", "2048", "32768"])
def test_a_volume_of_the_size_asked_for_has_room(tokens: str) -> None:
    for group in plan_groups(options_of("--tokens", tokens, "--depths", "1", "4", "--gpus", "2", "--paths", "host", "gds"), MODELS):
        for case in group.cases:
            geometry = plan_geometry(volume_uuid=bytes(16), volume_bytes=volume_need(case, 256 * MIB), slab_bytes=256 * MIB, namespace_count=1024)
            slots = geometry.slab_count * slot_count_for(256 * MIB, slot_bytes_for(case.block_bytes))
            assert volume_fault(case, [slots], 256 * MIB) == ""
            assert f"one has room for {volume_slots(case)}" in volume_fault(case, [volume_slots(case)], 256 * MIB)

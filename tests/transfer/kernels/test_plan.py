"""Launches cover everything once and none is long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.transfer.kernels.base import COPY_BYTES_PER_S
from offloadd.transfer.kernels.cuda import CRC_BYTES_PER_S
from offloadd.transfer.kernels.plan import GRID_X_MAX, GRID_Y_MAX, LAUNCH_S_MAX, Launch, plan_launches
from offloadd.transfer.kernels.source import COPY_TILE_BYTES, CRC_PIECE_BYTES
from offloadd.units import KIB, MIB


@given(
    payloads=st.integers(0, 60),
    tiles=st.integers(0, 60),
    tile_bytes=st.sampled_from([1, 1000, COPY_TILE_BYTES, CRC_PIECE_BYTES]),
    budget_tiles=st.floats(0.01, 5000, allow_nan=False),
)
def test_each_tile_of_each_payload_is_in_one_launch_and_none_is_too_long(payloads, tiles, tile_bytes, budget_tiles):
    bytes_per_s = budget_tiles * tile_bytes / LAUNCH_S_MAX
    plan = plan_launches(payloads, tiles, tile_bytes, bytes_per_s=bytes_per_s)
    covered = [
        (payload, tile)
        for part in plan
        for payload in range(part.first_payload, part.first_payload + part.payload_count)
        for tile in range(part.first_tile, part.first_tile + part.tile_count)
    ]
    assert sorted(covered) == [(payload, tile) for payload in range(payloads) for tile in range(tiles)]
    for part in plan:
        size = part.payload_count * part.tile_count
        assert size == 1 or size * tile_bytes / bytes_per_s <= LAUNCH_S_MAX * 1.0001
        assert size >= 1


@given(payloads=st.integers(1, 300), tiles=st.integers(1, 300), tiles_max=st.integers(1, 1000))
def test_launches_are_as_few_as_whole_payloads_allow_and_of_equal_size(payloads, tiles, tiles_max):
    plan = plan_launches(payloads, tiles, 1, bytes_per_s=(tiles_max + 0.5) / LAUNCH_S_MAX)
    if tiles <= tiles_max:
        assert len(plan) == -(-payloads // (tiles_max // tiles))
        counts = [part.payload_count for part in plan]
    else:
        assert len(plan) == payloads * -(-tiles // tiles_max)
        counts = [part.tile_count for part in plan]
    assert max(counts) - min(counts) <= 1


def test_the_grid_limits_cut_as_well():
    plan = plan_launches(2 * GRID_Y_MAX + 1, 1, 1, bytes_per_s=1e30)
    assert [part.payload_count for part in plan] == [43690, 43690, 43691]
    assert len(plan_launches(1, GRID_X_MAX + 1, 1, bytes_per_s=1e30)) == 2


@pytest.mark.parametrize(
    ("payload_bytes", "count", "tile_bytes", "bytes_per_s", "launches"),
    [
        (640 * KIB, 12, COPY_TILE_BYTES, COPY_BYTES_PER_S, 1),
        (640 * KIB, 512, COPY_TILE_BYTES, COPY_BYTES_PER_S, 1),
        (640 * KIB, 12, CRC_PIECE_BYTES, CRC_BYTES_PER_S, 1),
        (640 * KIB, 512, CRC_PIECE_BYTES, CRC_BYTES_PER_S, 2),
        (512 * MIB, 1, CRC_PIECE_BYTES, CRC_BYTES_PER_S, 3),
    ],
)
def test_slices_and_requests_take_few_launches(payload_bytes, count, tile_bytes, bytes_per_s, launches):
    assert len(plan_launches(count, payload_bytes // tile_bytes, tile_bytes, bytes_per_s=bytes_per_s)) == launches


def test_payloads_stay_together_and_are_spread_evenly():
    assert plan_launches(5, 10, 100, bytes_per_s=25e5, launch_s_max=1e-3) == [Launch(0, 1, 0, 10), Launch(1, 2, 0, 10), Launch(3, 2, 0, 10)]
    assert plan_launches(1, 10, 100, bytes_per_s=4e5, launch_s_max=1e-3) == [Launch(0, 1, 0, 3), Launch(0, 1, 3, 3), Launch(0, 1, 6, 4)]

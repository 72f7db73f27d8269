"""AUTO's choice, without a byte moved: what is told to `Bandwidths`, and what it then takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadd.model.enums import Path
from offloadd.offload.bandwidth import LARGE_BYTES, MARGIN, MEASUREMENT_WEIGHT, REQUEST_WEIGHT, Bandwidths, Choice, Direction, Route, SizeClass

BOUNCE, GDS = Route("cuda:0", 0, Path.BOUNCE), Route("cuda:0", 0, Path.GDS)
SMALL, LARGE = 640 << 10, 32 << 20


class Told:
    """Choices of one GPU and volume by both paths; rates in GB/s."""

    def __init__(self) -> None:
        self.changes: list[Choice] = []
        self.of = Bandwidths(self.changes.append)
        self.of.serve(GDS)
        self.of.serve(BOUNCE)
        self.changes.clear()

    def rate(self, route: Route, rate: float, payload_bytes: int = LARGE, direction: Direction = Direction.RESTORE, weight: float = MEASUREMENT_WEIGHT) -> None:
        self.of.measured(route, direction, payload_bytes, payload_bytes / (rate * 1e9), weight)

    def choice(self, payload_bytes: int = LARGE, direction: Direction = Direction.RESTORE, device: str = "cuda:0", volume: int = 0) -> Path:
        return self.of.choice(device, volume, direction, payload_bytes)


@pytest.fixture
def told() -> Told:
    return Told()


def test_before_both_are_measured_bounce_is_taken(told: Told) -> None:
    assert told.choice() == Path.BOUNCE
    told.rate(GDS, 20)
    assert told.choice() == Path.BOUNCE
    told.rate(BOUNCE, 5)
    assert told.choice() == Path.GDS


def test_the_first_comparison_needs_no_margin(told: Told) -> None:
    told.rate(BOUNCE, 5)
    told.rate(GDS, 5.1)
    assert told.choice() == Path.GDS


def test_each_direction_and_size_is_chosen_by_itself(told: Told) -> None:
    for direction, size_bytes, faster in (
        (Direction.EVICT, SMALL, BOUNCE),
        (Direction.EVICT, LARGE, GDS),
        (Direction.RESTORE, SMALL, GDS),
        (Direction.RESTORE, LARGE, BOUNCE),
    ):
        for route in (BOUNCE, GDS):
            told.rate(route, 9 if route == faster else 3, size_bytes, direction)
    assert [told.choice(size, direction) for direction in Direction for size in (SMALL, LARGE)] == [Path.BOUNCE, Path.GDS, Path.GDS, Path.BOUNCE]
    assert told.choice(LARGE_BYTES - 1) == told.choice(SMALL) != told.choice(LARGE_BYTES)


def test_each_gpu_and_volume_is_chosen_by_itself(told: Told) -> None:
    for device, volume, faster in (("cuda:0", 1, Path.GDS), ("cuda:1", 0, Path.GDS), ("cuda:0", 0, Path.BOUNCE)):
        for path in (Path.BOUNCE, Path.GDS):
            told.of.serve(Route(device, volume, path))
            told.rate(Route(device, volume, path), 9 if path == faster else 3)
    assert [told.choice(device=device, volume=volume) for device, volume in (("cuda:0", 0), ("cuda:0", 1), ("cuda:1", 0))] == [Path.BOUNCE, Path.GDS, Path.GDS]
    assert told.choice(device="cuda:1", volume=1) == Path.AUTO


def test_a_size_that_was_not_measured_goes_as_the_other_one(told: Told) -> None:
    told.rate(BOUNCE, 3, SMALL)
    told.rate(GDS, 9, SMALL)
    assert told.choice(LARGE) == Path.GDS
    told.rate(BOUNCE, 9, LARGE)
    told.rate(GDS, 3, LARGE)
    assert (told.choice(LARGE), told.choice(SMALL)) == (Path.BOUNCE, Path.GDS)


@pytest.mark.parametrize(("order", "factor"), [((BOUNCE, GDS), 0.5), ((GDS, BOUNCE), 2)])
def test_a_round_of_measurements_is_judged_as_a_whole(told: Told, order: tuple[Route, Route], factor: float) -> None:
    rates = {BOUNCE: 10, GDS: 9}
    for route, rate in rates.items():
        told.rate(route, rate)
    # The machine became slower, or faster, for both: the first of them, beside what the other one was before, would turn the choice for a moment.
    told.of.measured_together([(route, Direction.RESTORE, LARGE, LARGE / (factor * rates[route] * 1e9)) for route in order], weight=1.0)
    assert told.choice() == Path.BOUNCE and told.changes == []


def test_a_choice_turns_only_beyond_the_margin_and_is_told_once(told: Told) -> None:
    told.rate(BOUNCE, 10)
    told.rate(GDS, 9)
    assert told.choice() == Path.BOUNCE
    told.changes.clear()
    told.rate(GDS, 10 * MARGIN * 0.99, weight=1.0)
    assert told.choice() == Path.BOUNCE and not told.changes
    told.rate(GDS, 10 * MARGIN * 1.01, weight=1.0)
    assert told.choice() == Path.GDS
    turned = [change for change in told.changes if (change.direction, change.size) == (Direction.RESTORE, SizeClass.LARGE)]
    assert [(change.before, change.path) for change in turned] == [(Path.BOUNCE, Path.GDS)]
    # And not back by the same step.
    told.rate(GDS, 10, weight=1.0)
    assert told.choice() == Path.GDS


@given(st.lists(st.tuples(st.sampled_from([BOUNCE, GDS]), st.floats(9.2, 10.9)), max_size=60))
def test_ways_that_differ_by_less_than_the_margin_never_flap(samples: list[tuple[Route, float]]) -> None:
    told = Told()
    told.rate(BOUNCE, 10)
    told.rate(GDS, 10.1)
    told.changes.clear()
    for route, rate in samples:
        told.rate(route, rate)
    assert told.choice() == Path.GDS and not told.changes


def test_one_outlier_of_a_request_does_not_turn_the_choice(told: Told) -> None:
    told.rate(BOUNCE, 10)
    told.rate(GDS, 10.1)
    told.rate(GDS, 0.001, weight=REQUEST_WEIGHT)
    assert told.choice() == Path.GDS


def test_requests_that_stay_slow_turn_it(told: Told) -> None:
    told.rate(BOUNCE, 5)
    told.rate(GDS, 10)
    count = 0
    while told.choice() == Path.GDS:
        told.rate(GDS, 1, weight=REQUEST_WEIGHT)
        count += 1
    assert 1 < count < 20


def test_a_way_that_failed_is_not_taken_until_it_was_measured_again(told: Told) -> None:
    told.rate(BOUNCE, 3)
    told.rate(GDS, 9)
    told.of.failed(GDS, "bounced")
    assert told.choice() == Path.BOUNCE and told.of.failure(GDS) == "bounced"
    assert told.of.rate_of(GDS, Direction.RESTORE, SizeClass.LARGE) == 0
    told.rate(GDS, 9)
    assert told.choice() == Path.GDS and told.of.failure(GDS) == ""


def test_where_all_ways_failed_one_is_taken_all_the_same(told: Told) -> None:
    told.of.failed(BOUNCE, "hangs")
    assert told.choice() == Path.GDS
    told.of.failed(GDS, "hangs")
    assert told.choice() == Path.BOUNCE


def test_a_way_that_went_is_not_taken_and_one_that_came_back_starts_anew(told: Told) -> None:
    told.rate(BOUNCE, 3)
    told.rate(GDS, 9)
    told.of.serve(GDS)
    assert told.of.rate_of(GDS, Direction.RESTORE, SizeClass.LARGE) == 0, "what another mover achieved says nothing of this one"
    told.rate(GDS, 9)
    told.of.withdraw(GDS)
    assert told.choice() == Path.BOUNCE
    told.of.serve(GDS)
    assert told.choice() == Path.BOUNCE, "what another mover achieved says nothing of this one"
    told.of.withdraw(GDS)
    told.of.withdraw(BOUNCE)
    assert told.choice() == Path.AUTO

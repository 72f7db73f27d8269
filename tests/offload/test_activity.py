"""What `offloadd top` is told: counts, and percentiles that are times which something took."""

from offloadd.offload.activity import RECENT_MAX, RECENT_S, ClassActivity, Percentiles


def test_percentiles_are_times_that_were_taken() -> None:
    activity = ClassActivity()
    for number in range(1, 101):
        activity.took(number / 1000, now_s=50.0)
    assert activity.percentiles(50.0) == Percentiles(count=100, p50_s=0.05, p99_s=0.099)
    assert activity.done_count == 100


def test_one_time_is_both_percentiles() -> None:
    activity = ClassActivity()
    activity.took(0.25, now_s=0.0)
    assert activity.percentiles(1.0) == Percentiles(1, 0.25, 0.25)


def test_old_times_are_not_the_present() -> None:
    activity = ClassActivity()
    activity.took(9.0, now_s=0.0)
    activity.took(1.0, now_s=30.0)
    assert activity.percentiles(RECENT_S) == Percentiles(2, 1.0, 9.0)
    assert activity.percentiles(RECENT_S + 1) == Percentiles(1, 1.0, 1.0)
    assert activity.percentiles(RECENT_S + 31) == Percentiles()


def test_what_is_kept_is_bounded() -> None:
    activity = ClassActivity()
    for _ in range(RECENT_MAX):
        activity.took(5.0, now_s=0.0)
    for _ in range(RECENT_MAX):
        activity.took(1.0, now_s=0.0)
    assert activity.percentiles(0.0) == Percentiles(RECENT_MAX, 1.0, 1.0)
    assert activity.done_count == 2 * RECENT_MAX


def test_moved_blocks_and_bytes_add_up() -> None:
    activity = ClassActivity()
    activity.moved(3, 300)
    activity.moved(2, 100)
    assert (activity.block_count, activity.payload_bytes, activity.done_count) == (5, 400, 0)
    assert activity.percentiles(0.0).count == 0

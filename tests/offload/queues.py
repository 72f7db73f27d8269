"""Lane queues with windows of a test's size."""

from offloadd.scheduler.arbiter import Arbiter
from offloadd.scheduler.job_class import ARENA_PRECEDENCE
from offloadd.scheduler.lane_queue import LaneQueue, Windows


def queue_of(evict_bytes_in_flight: int = 1 << 20, *, job_bytes: int = 1 << 20, arbiter: Arbiter | None = None) -> LaneQueue:
    windows = Windows.of(
        restore_bytes_in_flight=2 * job_bytes,
        evict_bytes_in_flight=evict_bytes_in_flight,
        evict_job_bytes=job_bytes,
        slice_bytes=job_bytes,
        blocks_max=1000,
    )
    return LaneQueue(arbiter or Arbiter(ARENA_PRECEDENCE, slice_bytes=job_bytes, bytes_in_flight=1 << 20), windows)

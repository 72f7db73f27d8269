"""A mover that moves nothing: it answers every job at once with the messages of a real one, as many slices as a real one would cut.

Cheap on purpose, since it shares the cores with the front that is measured: one NumPy pass a job, then one encode and one send a slice.
"""

import argparse
import math
import socket

import numpy as np

from offloadd.ipc.channel import Channel
from offloadd.model.slots import BLOCK_DTYPE, RESULT_DTYPE
from offloadd.mover.messages import Copied, Job, Operation, SliceDone
from offloadd.units import align_up

_EVICTS = (Operation.EVICT, Operation.ARENA_EVICT)


def serve(lane: "Channel[Job]", *, thread_count: int, staging_slot_bytes: int) -> None:
    """Answer jobs until the front closes the lane."""
    while (received := lane.receive()) is not None:
        job, _ = received
        records = np.frombuffer(job.blocks, dtype=BLOCK_DTYPE)
        count = len(records)
        results = np.zeros(count, dtype=RESULT_DTYPE)
        results["position"] = records["position"]
        payload_bytes = int(records["payload_bytes"][0])
        raw = results.tobytes()
        limit = max(1, staging_slot_bytes // job.slot_bytes)
        slice_count = min(count, align_up(math.ceil(count / limit), thread_count))
        for number in range(slice_count):
            begin, end = count * number // slice_count, count * (number + 1) // slice_count
            if job.operation in _EVICTS:
                lane.send(Copied(job=job.job, count=end - begin))
            lane.send(
                SliceDone(
                    job=job.job,
                    results=raw[begin * RESULT_DTYPE.itemsize : end * RESULT_DTYPE.itemsize],
                    queue_ns=1000,
                    copy_ns=1000,
                    checksum_ns=1000,
                    io_ns=1000,
                    payload_bytes=(end - begin) * payload_bytes,
                    io_bytes=(end - begin) * job.slot_bytes,
                )
            )


def main() -> None:
    """Serve the lane at an inherited descriptor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--staging", type=int, required=True)
    arguments = parser.parse_args()
    lane: Channel[Job] = Channel(socket.socket(fileno=arguments.fd), Job)
    try:
        serve(lane, thread_count=arguments.threads, staging_slot_bytes=arguments.staging)
    except (BrokenPipeError, ConnectionResetError):
        # The front has closed the lane while answers were on their way: that is how a benchmark ends.
        return


if __name__ == "__main__":
    main()

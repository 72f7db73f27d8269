"""What a figure should be before it is measured: bytes over bandwidth plus operations times latency.

The parts were measured once, on 2 cores of a Xeon with AVX-512 and a virtio disk. They are the expectation, not the ceiling: a figure that misses its sketch by
far means that something else happens than is thought.
"""

#: One process reading through O_DIRECT with 4 threads.
DISK_BYTES_PER_S = 1.7e9
#: `crc32c` on one core.
CRC_BYTES_PER_S = 8.4e9
#: One copy out of the cache's way on one core.
COPY_BYTES_PER_S = 5.7e9
#: A call of an empty method over a unix socket, blocking client.
CALL_S = 0.6e-3
#: Front to mover and back.
HOP_S = 0.09e-3
#: One 644 KiB read of an idle disk.
SLOT_READ_S = 0.5e-3


def stages(size_bytes: float, *rates: float) -> float:
    """Seconds for bytes that pass one stage after the other."""
    return sum(size_bytes / rate for rate in rates)

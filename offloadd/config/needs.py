"""How much memory a configuration needs, part by part: what a service's MemoryMax, a container's limit or a machine must have for it."""

from dataclasses import dataclass

from offloadd.config.schema import Config
from offloadd.units import KIB, MIB

#: Private memory of the processes themselves, measured idle, rounded up.
FRONT_BYTES = 64 * MIB
MOVER_BYTES = 64 * MIB
KEEPER_BYTES = 64 * MIB
#: What the front holds for one session with its stream and a region: 52 KiB were measured.
SESSION_BYTES = 64 * KIB
#: For one connection that has seen long messages: gRPC keeps a buffer as long as what it once read at a time, at most twice a socket's send buffer of 208 KiB.
CONNECTION_BYTES = 448 * KIB
#: For one call that waits within gRPC for the event loop: 12 KiB were measured, and the first 16 KiB of a message come on top (rpc/server.py).
PENDING_CALL_BYTES = 28 * KIB
PENDING_CALLS_PER_CALL = 16
#: Of one block in flight: its record, its key and its results.
IN_FLIGHT_BLOCK_BYTES = 640


@dataclass(frozen=True, slots=True)
class Need:
    """One part of the memory that a daemon may take. `bytes` at most."""

    what: str
    bytes: int


def memory_needs(config: Config) -> tuple[Need, ...]:
    """The parts; their sum is what the daemon may take with all of its processes, if clients use all that the limits let them. GPU memory is not in it.

    Engine memory is the engines', unless they hand it over before they touched it.
    """
    limits, volumes = config.limits, config.volume
    movers = 1 + len(config.gpu.devices)
    slots = sum(volume.io_threads for volume in volumes) * movers
    return (
        Need("arena", config.arena.arena_bytes),
        Need("block index, when full", limits.index_bytes_max),
        Need("staging slots", slots * config.mover.staging_slot_bytes),
        Need("processes", FRONT_BYTES + movers * MOVER_BYTES + len(volumes) * KEEPER_BYTES),
        Need("sessions, if there are as many as may be", limits.sessions_max * SESSION_BYTES),
        Need("connections, if each has seen long messages", limits.connections_max * CONNECTION_BYTES),
        Need("calls that wait, if there are as many as may be", limits.calls_max * PENDING_CALLS_PER_CALL * PENDING_CALL_BYTES),
        Need("blocks in flight, if there are as many as may be", limits.blocks_in_flight_max * IN_FLIGHT_BLOCK_BYTES),
        Need("messages, if each call brings the longest", limits.calls_max * limits.message_bytes_max),
    )

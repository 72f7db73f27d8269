"""How much memory a configuration needs, part by part: what a service's MemoryMax, a container's limit or a machine must have for it."""

from dataclasses import dataclass

from offloadd.config.schema import Config
from offloadd.units import KIB, MIB

#: Private memory of the processes themselves, measured idle with the default configuration; see docs/decisions/0020-admission-at-the-door.md.
FRONT_BYTES = 64 * MIB
MOVER_BYTES = 48 * MIB
KEEPER_BYTES = 32 * MIB
#: What the front holds for one session with its connection, its stream and a region.
SESSION_BYTES = 100 * KIB
#: For one block in flight: its record, its key and its results.
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
        Need("sessions and connections, if there are as many as may be", max(limits.sessions_max, limits.connections_max) * SESSION_BYTES),
        Need("blocks in flight, if there are as many as may be", limits.blocks_in_flight_max * IN_FLIGHT_BLOCK_BYTES),
        Need("messages, if each call brings the longest", limits.calls_max * limits.message_bytes_max),
    )

"""What the checks need of the configuration, as plain values that travel to the process of a check."""

import msgspec

from offloadd.config import Config


class VolumeSettings(msgspec.Struct, frozen=True):
    """One configured volume."""

    path: str
    io_threads: int
    prewrite: bool


class Settings(msgspec.Struct, frozen=True):
    """Sizes in bytes."""

    runtime_dir: str
    arena_bytes: int
    huge_pages: str
    staging_slot_bytes: int
    index_bytes_max: int
    sessions_max: int
    connections_max: int
    memories_per_session_max: int
    volumes: tuple[VolumeSettings, ...]
    #: Whether the daemon looks at NUMA nodes at all.
    numa: bool = True
    #: Where this came from: a file's name, empty for the defaults.
    source: str = ""
    #: Why these are the defaults although a file was named; empty if all is well.
    error: str = ""

    def staging_bytes(self, mover_count: int) -> int:
        """Staging slots of all volumes' threads in so many movers."""
        return self.staging_slot_bytes * sum(volume.io_threads for volume in self.volumes) * mover_count


def settings_of(config: Config, *, source: str, error: str = "") -> Settings:
    """The plain values of a configuration."""
    return Settings(
        runtime_dir=str(config.daemon.runtime_dir),
        arena_bytes=config.arena.arena_bytes,
        huge_pages=config.arena.huge_pages,
        staging_slot_bytes=config.mover.staging_slot_bytes,
        index_bytes_max=config.limits.index_bytes_max,
        sessions_max=config.limits.sessions_max,
        connections_max=config.limits.connections_max,
        memories_per_session_max=config.limits.memories_per_session_max,
        volumes=tuple(VolumeSettings(path=str(volume.path), io_threads=volume.io_threads, prewrite=volume.prewrite) for volume in config.volume),
        numa=config.mover.numa,
        source=source,
        error=error,
    )

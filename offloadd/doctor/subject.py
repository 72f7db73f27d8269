"""What a check is about: the machine, or one volume on it."""

from dataclasses import dataclass

from offloadd.doctor.settings import Settings, VolumeSettings


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the daemon that is to run on it."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Volume:
    """One configured volume. `follow_links` is off when the volume hangs: following a path could hang too."""

    settings: Settings
    options: VolumeSettings
    follow_links: bool = True

"""What passes between the doctor and the processes of its checks: one JSON task in, one JSON line per answer out."""

import msgspec

from offloadd.doctor.finding import Finding
from offloadd.doctor.settings import Settings


class LoadConfig(msgspec.Struct, frozen=True, tag=True):
    """Read the configuration; None: the defaults. One `Settings` comes back."""

    config_path: str | None


class RunChecks(msgspec.Struct, frozen=True, tag=True):
    """Run checks from the one numbered `first` on, of a volume or (`volume_index` None) of the machine. A `Checked` comes back for each."""

    root: str
    environment: dict[str, str]
    settings: Settings
    volume_index: int | None = None
    first: int = 0
    #: Set after what the subject's checks ask (`Check.asks`) was seen to hang: those that would ask it answer so.
    hangs: bool = False


class Checked(msgspec.Struct, frozen=True):
    """What one check found."""

    findings: list[Finding]


Task = LoadConfig | RunChecks

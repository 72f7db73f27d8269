"""Every error that offloadd raises on purpose, and what the caller should do about it.

A miss, a rejection and a full tier are outcomes, not errors. An exception means that the caller erred or the world failed.

    OffloaddError
    ├── InvalidRequest        the request can never work: mend it                                INVALID_ARGUMENT
    ├── UnknownSession        attach again, register the regions again, repeat                   UNAUTHENTICATED
    ├── UnknownRegion         register the region, repeat                                        NOT_FOUND
    ├── NotAllowed            another owner's thing                                              PERMISSION_DENIED
    ├── AlreadyOpen           attach again: this session has its stream                          ALREADY_EXISTS
    ├── LimitExceeded         wait, or ask for less                                              RESOURCE_EXHAUSTED
    ├── PathUnavailable       ask for another path, or drop `require_path`                       FAILED_PRECONDITION
    ├── Unavailable           the daemon (or a part of it) is away: repeat after a pause         UNAVAILABLE
    ├── DeadlineExpired       it was not over by the deadline: recompute, or repeat              DEADLINE_EXCEEDED
    ├── DaemonFailed          the daemon has a fault: report it, recompute                       INTERNAL
    ├── ConfigError           mend the configuration file                                        (start-up)
    ├── AlreadyRunning        another daemon owns this socket                                    (start-up)
    └── VolumeError           the volume can't be used as it is                                  (start-up, command line)
        ├── VolumeForeign     the file is not an offloadd volume
        ├── VolumeDamaged     the file is a volume, but its superblock or size is wrong
        ├── VolumeBusy        another process has it open
        └── VolumeNotEmpty    the volume holds blocks
"""


class OffloaddError(Exception):
    """Root of the tree; never raised itself. `retry_after_s`: after which pause the call may well work; None where it will not, or at once."""

    retry_after_s: float | None = None


class InvalidRequest(OffloaddError):
    """The request can never work."""


class UnknownSession(OffloaddError):
    """No live session has this token."""


class UnknownRegion(OffloaddError):
    """The session has no such region."""


class NotAllowed(OffloaddError):
    """The thing named belongs to somebody else."""


class AlreadyOpen(OffloaddError):
    """The session has its stream already."""


class LimitExceeded(OffloaddError):
    """A configured limit is reached; the message names the number and the limit."""

    #: Some requests of tens of milliseconds end meanwhile.
    retry_after_s = 0.1


class PathUnavailable(OffloaddError):
    """The demanded path does not exist for this tier and device on this node."""


class Unavailable(OffloaddError):
    """The daemon, a mover or a keeper is away; the request may be repeated."""

    #: A worker is back in about half a second.
    retry_after_s = 0.5


class DeadlineExpired(OffloaddError):
    """The deadline passed before a move was started, or before anything else was over."""


class DaemonFailed(OffloaddError):
    """The daemon, or an answer of it, is not as the protocol promises."""


class ConfigError(OffloaddError):
    """The configuration is wrong; the message names the key."""


class AlreadyRunning(OffloaddError):
    """Another daemon holds the lock of this runtime directory."""


class VolumeError(OffloaddError):
    """A volume can't be used as it is."""


class VolumeForeign(VolumeError):
    """The file is not an offloadd volume."""


class VolumeDamaged(VolumeError):
    """The superblock or the size of the volume is wrong."""


class VolumeBusy(VolumeError):
    """Another process has the volume open."""


class VolumeNotEmpty(VolumeError):
    """The volume holds blocks."""

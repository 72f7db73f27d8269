"""One line of a diagnosis: how bad, why, and what mends it."""

import enum

import msgspec


class Level(enum.StrEnum):
    """FAIL: the daemon, or a path that this machine is meant to have, does not work. WARN: it works, but slower or less safely than it could."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    NOT_APPLICABLE = "N/A"


class Finding(msgspec.Struct, frozen=True):
    """`cause` is for people; `mend` is a shell command where there is one, else a setting or a step, and empty where nothing is wrong.

    `subject` and `check` are filled in by whoever runs the check.
    """

    level: Level
    cause: str
    mend: str = ""
    subject: str = ""
    check: str = ""


def ok(cause: str) -> Finding:
    """As it should be."""
    return Finding(Level.OK, cause)


def warn(cause: str, mend: str = "") -> Finding:
    """Works, but costs something."""
    return Finding(Level.WARN, cause, mend)


def fail(cause: str, mend: str = "") -> Finding:
    """Does not work."""
    return Finding(Level.FAIL, cause, mend)


def not_applicable(reason: str) -> Finding:
    """Nothing to check here."""
    return Finding(Level.NOT_APPLICABLE, reason)

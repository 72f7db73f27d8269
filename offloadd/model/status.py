"""Which gRPC code stands for which error, in both directions: one table for the server's interceptor, the attach socket and the clients."""

from offloadd import errors
from offloadd.errors import OffloaddError

#: Names of `grpc.StatusCode` members, so that this layer needs no gRPC.
CODE_OF: dict[type[OffloaddError], str] = {
    errors.InvalidRequest: "INVALID_ARGUMENT",
    errors.UnknownSession: "UNAUTHENTICATED",
    errors.UnknownRegion: "NOT_FOUND",
    errors.NotAllowed: "PERMISSION_DENIED",
    errors.AlreadyOpen: "ALREADY_EXISTS",
    errors.LimitExceeded: "RESOURCE_EXHAUSTED",
    errors.PathUnavailable: "FAILED_PRECONDITION",
    errors.Unavailable: "UNAVAILABLE",
    errors.DeadlineExpired: "DEADLINE_EXCEEDED",
    errors.DaemonFailed: "INTERNAL",
}

#: Key of the trailing metadata that say after how many milliseconds a refused call may be repeated.
RETRY_AFTER_KEY = "offloadd-retry-after-ms"

_CLASS_OF: dict[str, type[OffloaddError]] = {code: kind for kind, code in CODE_OF.items()} | {
    # gRPC itself gives these. A call that the transport cancelled was cut off by a daemon that stops; nobody cancels calls by gRPC on purpose.
    "CANCELLED": errors.Unavailable,
    "UNIMPLEMENTED": errors.InvalidRequest,
    "OUT_OF_RANGE": errors.InvalidRequest,
}


def code_of(error: BaseException) -> str:
    """Name of the code for `error`: the one of its nearest class in the table, INTERNAL for everything that offloadd does not raise on purpose."""
    for kind in type(error).__mro__:
        code = CODE_OF.get(kind)
        if code is not None:
            return code
    return "INTERNAL"


def error_of_code(code: str, message: str) -> OffloaddError:
    """The error that a gRPC answer with this code and message stands for; DaemonFailed for codes that the protocol does not give."""
    return _CLASS_OF.get(code, errors.DaemonFailed)(message)


def error_of_kind(kind: str, message: str) -> OffloaddError:
    """The error whose class name travelled as `Refused.kind`; DaemonFailed for names that are not in the table."""
    for known in CODE_OF:
        if known.__name__ == kind:
            return known(message)
    return errors.DaemonFailed(f"{kind}: {message}")

"""Has the kernel refuse a system call of the process that runs this, as the filters of container runtimes do (seccomp)."""

import ctypes
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_RET_ALLOW, _RET_ERRNO = 0x7FFF0000, 0x00050000
#: Classic BPF: load the number of the call; if it is the one, answer with the error, else allow it.
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06


def refuse(number: int, error: int) -> None:
    """From now on, in this thread and in all that it starts, the call of this number fails with `error`. Raises OSError."""
    steps = ((_LOAD, 0, 0, 0), (_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _RET_ERRNO | error), (_RETURN, 0, 0, _RET_ALLOW))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), "prctl")

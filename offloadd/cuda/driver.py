"""The CUDA driver through cuda-bindings: loaded when it is first asked for; a failed call becomes an exception that names it."""

import errno
import functools
from typing import Any


class CudaError(OSError):
    """A call of the driver failed, or what it needs is not there.

    An OSError, so that a failed copy ends as a failed read does. `operation`: what was tried, with its numbers; `name`: the driver's name of the code, empty if
    no call was made; `text`: what that means.
    """

    def __init__(self, operation: str, name: str, text: str) -> None:
        super().__init__(errno.EIO, text)
        self.operation = operation
        self.name = name
        self.text = text

    def __str__(self) -> str:
        return ": ".join(part for part in (self.operation, self.name, self.text) if part)


@functools.cache
def load() -> Any:
    """The module `cuda.bindings.driver`, after cuInit. Raises CudaError without the module, the driver or a GPU."""
    operation = "load the CUDA driver"
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaError(
            operation, "", f"the Python package cuda-bindings can't be imported ({error}); install offloadd with its extra cuda12 or cuda13"
        ) from error
    try:
        result = driver.cuInit(0)
    except RuntimeError as error:
        # The bindings open libcuda.so.1 at the first call.
        raise CudaError(operation, "", f"libcuda.so.1 can't be loaded ({error})") from error
    if int(result[0]):
        raise _error(driver, result[0], operation, "")
    return driver


def check(result: tuple[Any, ...], operation: str, hint: str = "") -> Any:
    """What a call of the bindings returned beside its code: None, the value, or a tuple of values. Raises CudaError; `hint` says what may be behind it."""
    code, *values = result
    if int(code):
        raise _error(load(), code, operation, hint)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def code_error(code: int, operation: str) -> CudaError:
    """The error for a code that came past the bindings."""
    driver = load()
    return _error(driver, driver.CUresult(code), operation, "")


def _error(driver: Any, code: Any, operation: str, hint: str) -> CudaError:
    unknown, text = driver.cuGetErrorString(code)
    meaning = "the driver has no text for it" if int(unknown) or text is None else text.decode()
    return CudaError(operation, code.name, f"{meaning}; {hint}" if hint else meaning)


def available() -> str:
    """Empty if a GPU can be used, else why not. Never raises."""
    try:
        count = check(load().cuDeviceGetCount(), "count the GPUs")
    except CudaError as error:
        return str(error)
    return "" if count else "count the GPUs: the CUDA driver knows none"

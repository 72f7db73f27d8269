"""Child processes that use CUDA: real ones, with the driver that their environment leads to, and told by a test what to do."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

# Runs what it is sent, one JSON object a line, in one namespace; answers with the value of `result`.
SERVER = """
import json, os, sys, traceback
answers, sys.stdout = sys.stdout, sys.stderr
names = {}
for line in sys.stdin:
    names["result"] = None
    try:
        exec(compile(json.loads(line), "<test>", "exec"), names)
        answer = {"result": names["result"]}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), file=answers, flush=True)
# Streams may be held for ever: leave without the driver's own end.
os._exit(0)
"""

PRELUDE = """
import ctypes, os
from cuda.bindings import driver as cu

def ok(answer):
    error, *values = answer
    if int(error):
        raise RuntimeError(error.name)
    return values[0] if len(values) == 1 else tuple(values)

def error(answer):
    return answer[0].name.removeprefix("CUDA_ERROR_")

def device_context(ordinal=0):
    ok(cu.cuInit(0))
    device = ok(cu.cuDeviceGet(ordinal))
    context = ok(cu.cuDevicePrimaryCtxRetain(device))
    ok(cu.cuCtxSetCurrent(context))
    return device

def page_locked(byte_count):
    # Its address, and a view of it.
    address = int(ok(cu.cuMemHostAlloc(byte_count, 0)))
    return address, memoryview((ctypes.c_ubyte * byte_count).from_address(address)).cast("B")

def handle_bytes(handle):
    return ctypes.string_at(handle.getPtr(), 64).hex()

def memory_handle(pointer):
    return handle_bytes(ok(cu.cuIpcGetMemHandle(pointer)))

def event_handle(event):
    return handle_bytes(ok(cu.cuIpcGetEventHandle(event)))

def open_memory(text):
    handle = cu.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(text), 64)
    return cu.cuIpcOpenMemHandle(handle, 1)

def open_event(text):
    handle = cu.CUipcEventHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(text), 64)
    return cu.cuIpcOpenEventHandle(handle)

def read(pointer, byte_count):
    buffer = bytearray(byte_count)
    view = (ctypes.c_char * byte_count).from_buffer(buffer)
    ok(cu.cuMemcpyDtoH(ctypes.addressof(view), pointer, byte_count))
    return bytes(buffer)

def write(pointer, data):
    view = ctypes.create_string_buffer(data, len(data))
    ok(cu.cuMemcpyHtoD(pointer, ctypes.addressof(view), len(data)))
"""


class Child:
    """A Python process that runs pieces of code; they share their names."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment), text=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, code: str) -> None:
        """Begins a piece of code; `finish` waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        self._process.stdin.flush()

    def finish(self) -> Any:
        """What the code that was started left in `result`. Raises RuntimeError with its traceback."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the child ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def run(self, code: str) -> Any:
        self.start(code)
        return self.finish()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Lets it end by itself; its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

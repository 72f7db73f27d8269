"""Flags that order an engine's streams against the daemon's where interprocess events can't be opened, as in containers without a common /dev/shm."""

import threading
from collections import deque
from typing import Any

from offloadd.client.cuda.driver import Context, checked, handle_bytes, load_driver
from offloadd.errors import InvalidRequest, PathUnavailable
from offloadd.model.device_event import FLAG_WORD_BYTES, FlagValue

#: Words that are made at once, in 4 KiB: one allocation for the daemon to open, however many flags there are.
WORDS = 512


class _Word:
    """8 bytes of GPU memory. `value`: the last that was queued to be written there."""

    __slots__ = ("address", "handle", "offset_bytes", "value")

    def __init__(self, address: int, handle: bytes, offset_bytes: int) -> None:
        self.address = address
        self.handle = handle
        self.offset_bytes = offset_bytes
        self.value = 0


class _Words:
    """Words of one CUDA context that no flag has. They are never given back to the driver: the daemon keeps their memory open as long as a region that named
    one, and freeing it before would be undefined, and stop the engine until its GPU is idle."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._free: deque[_Word] = deque()

    def take(self, context: Context) -> _Word:
        """The word that has been free for longest, or a new one. Raises PathUnavailable."""
        with self.lock:
            if not self._free:
                with context.current():
                    self._free.extend(_make(context.driver))
            return self._free.popleft()

    def give_back(self, word: _Word) -> None:
        """For another flag, which goes on behind its value: whoever still waits for the flag before sees no smaller one."""
        with self.lock:
            self._free.append(word)


def _make(driver: Any) -> list[_Word]:
    size_bytes = WORDS * FLAG_WORD_BYTES
    address = int(checked(driver.cuMemAlloc(size_bytes), f"{size_bytes} bytes for flags can't be allocated"))
    try:
        # Not cuMemsetD8: it may return before it is done, and other streams do not wait for it. A word must be 0 before anybody looks or writes.
        stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), "no stream can be made")
        try:
            checked(driver.cuMemsetD8Async(address, 0, size_bytes, stream), "flags can't be set to 0")
            checked(driver.cuStreamSynchronize(stream), "flags can't be set to 0")
        finally:
            driver.cuStreamDestroy(stream)
        base, _ = checked(driver.cuMemGetAddressRange(address), f"address {address:#x} lies in no allocation")
        handle = handle_bytes(checked(driver.cuIpcGetMemHandle(base), f"the allocation at {int(base):#x} can't be exported"))
    except BaseException:
        driver.cuMemFree(address)
        raise
    first = address - int(base)
    return [_Word(address + at, handle, first + at) for at in range(0, size_bytes, FLAG_WORD_BYTES)]


#: By CUcontext.
_words: dict[int, _Words] = {}
_words_lock = threading.Lock()


class DeviceFlag:
    """A word in GPU memory that the work of one stream raises, step by step.

    Its calls may come from any thread, whatever CUDA context that has; they queue work and do not wait for it.

    For one stream: on two, the later value could be there before the work of the earlier one is done. `new_flag` makes it.
    """

    def __init__(self, context: Context, words: _Words, word: _Word) -> None:
        self._context = context
        self._words = words
        self._word: _Word | None = word
        self._lock = threading.Lock()
        self._stream_handle: int | None = None

    def write(self, stream_handle: int) -> FlagValue:
        """Have the flag come when all work queued so far in the CUstream `stream_handle` (torch `cuda_stream`, CuPy `ptr`) is done.

        The answer is what `source_ready` and `destination_free` take. Raises InvalidRequest for another stream than before, PathUnavailable.
        """
        driver = self._context.driver
        with self._lock:
            word = self._word
            if word is None:
                raise InvalidRequest("the flag is closed")
            if self._stream_handle not in (None, stream_handle):
                raise InvalidRequest(
                    f"the flag belongs to stream {self._stream_handle:#x} and can't be written in stream {stream_handle:#x}; make one for each"
                )
            # Without CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER: what the work before it wrote must be visible to the daemon's copies before the flag is.
            barrier = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
            with self._context.current():
                checked(driver.cuStreamWriteValue64(stream_handle, word.address, word.value + 1, barrier), f"stream {stream_handle:#x} can't write the flag")
            self._stream_handle = stream_handle
            word.value += 1
            return FlagValue(word.handle, word.offset_bytes, word.value)

    def close(self) -> None:
        """Give the word back, for another flag. Only after the answers of all requests that name it. May be called again."""
        with self._lock:
            word, self._word = self._word, None
        if word is not None:
            self._words.give_back(word)
            self._context.release()

    def __enter__(self) -> "DeviceFlag":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def new_flag(device: int | None = None) -> DeviceFlag:
    """A flag for the daemon, on the device of that ordinal in this process, or in the calling thread's CUDA context.

    Raises InvalidRequest (neither), PathUnavailable: also if the device has no 64-bit stream memory operations.
    """
    context = Context.open(load_driver(), device)
    driver = context.driver
    try:
        with context.current():
            ordinal = checked(driver.cuCtxGetDevice(), "the context's device can't be asked for")
            capable = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
            if not checked(driver.cuDeviceGetAttribute(capable, ordinal), "the device can't be asked for its stream memory operations"):
                raise PathUnavailable(
                    f"device {int(ordinal)} has no 64-bit stream memory operations, so no stream can write a flag; order requests by an event "
                    "(new_event), or synchronize the stream before the call"
                )
        with _words_lock:
            words = _words.setdefault(context.key, _Words())
        return DeviceFlag(context, words, words.take(context))
    except BaseException:
        context.release()
        raise

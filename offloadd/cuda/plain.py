"""Single copies and fills on a stream: what staging needs beside gather and scatter."""

from offloadd.cuda.driver import check, load
from offloadd.cuda.streams import Stream


def copy(target: int, source: int, size_bytes: int, stream: Stream) -> None:
    """Queue a copy between two addresses, of the GPU or of page-locked host memory. Raises CudaError."""
    stream.device.make_current()
    check(load().cuMemcpyAsync(target, source, size_bytes, stream.handle), f"queue a copy of {size_bytes} bytes on {stream.device}")


def clear(address: int, size_bytes: int, stream: Stream) -> None:
    """Queue zeros. Raises CudaError."""
    stream.device.make_current()
    check(load().cuMemsetD8Async(address, 0, size_bytes, stream.handle), f"queue {size_bytes} zeros on {stream.device}")

"""Page-locked memory of the host, which a GPU reaches by DMA."""

import contextlib
from collections.abc import Iterator

from offloadd.cuda.device import Device
from offloadd.cuda.memory import HostRegistration
from offloadd.memory.mapping import map_private


@contextlib.contextmanager
def page_locked(device: Device, size_bytes: int) -> Iterator[int]:
    """Its address, for the length of the `with` block. Raises CudaError, OSError."""
    mapping = map_private(size_bytes)
    try:
        registration = HostRegistration.register(device, mapping.bytes.ctypes.data, mapping.bytes.nbytes)
        try:
            yield mapping.bytes.ctypes.data
        finally:
            registration.close()
    finally:
        mapping.close()

"""What a CUDA engine hands to the daemon: its memory and its events, as other processes open them. Needs the package cuda-bindings, at the first use."""

from offloadd.client.cuda.driver import IPC_HANDLE_BYTES
from offloadd.client.cuda.events import DeviceEvent, export_event, new_event
from offloadd.client.cuda.memory import CHUNKS_MAX, Chunk, DeviceMemory, export_memory, export_pointer

__all__ = [
    "CHUNKS_MAX",
    "IPC_HANDLE_BYTES",
    "Chunk",
    "DeviceEvent",
    "DeviceMemory",
    "export_event",
    "export_memory",
    "export_pointer",
    "new_event",
]

"""What a CUDA engine hands to the daemon: memory, events and flags, as other processes open them. Needs the package cuda-bindings, at the first use."""

from offloadd.client.cuda.driver import IPC_HANDLE_BYTES
from offloadd.client.cuda.events import DeviceEvent, export_event, new_event
from offloadd.client.cuda.flags import DeviceFlag, new_flag
from offloadd.client.cuda.memory import CHUNKS_MAX, Chunk, DeviceMemory, export_memory, export_pointer
from offloadd.model.device_event import FlagValue

__all__ = [
    "CHUNKS_MAX",
    "IPC_HANDLE_BYTES",
    "Chunk",
    "DeviceEvent",
    "DeviceFlag",
    "DeviceMemory",
    "FlagValue",
    "export_event",
    "export_memory",
    "export_pointer",
    "new_event",
    "new_flag",
]

"""The attach protocol: JSON messages on the side SEQPACKET socket, one a packet, told apart by "type". See docs/protocol.md."""

import msgspec

#: Version of this protocol; a daemon refuses others by number.
ATTACH_VERSION = 1
#: Largest packet in either direction.
ATTACH_MESSAGE_BYTES_MAX = 16 * 1024


class Attach(msgspec.Struct, frozen=True, tag_field="type", tag="attach", forbid_unknown_fields=True):
    """First message of a client. Processes of one engine name the same instance; `process` is for logs only."""

    version: int
    instance: str
    process: str = ""


class AttachMemory(msgspec.Struct, frozen=True, tag_field="type", tag="attach_memory", forbid_unknown_fields=True):
    """Hands over one sealed memfd by SCM_RIGHTS; `memory_bytes` must equal its size."""

    memory_bytes: int


class AttachDeviceMemory(msgspec.Struct, frozen=True, tag_field="type", tag="attach_device_memory", forbid_unknown_fields=True):
    """Hands over GPU memory made by virtual memory management: one descriptor a chunk, all by SCM_RIGHTS of this message, in the order of addresses.

    `chunk_bytes`: as much of each chunk as is mapped, from its start. The memory is `memory_bytes` of the chunks side by side, from `offset_bytes` on.
    """

    device_uuid: str
    chunk_bytes: tuple[int, ...]
    offset_bytes: int
    memory_bytes: int


class DetachMemory(msgspec.Struct, frozen=True, tag_field="type", tag="detach_memory", forbid_unknown_fields=True):
    """Lets the daemon close the memory's descriptors once no region uses it."""

    memory_id: str


class Attached(msgspec.Struct, frozen=True, tag_field="type", tag="attached"):
    """Answer to `attach`. `token` goes into the gRPC metadata "offloadd-session" of each call; whoever has it is the session."""

    token: str
    session: str
    tenant: str


class MemoryAttached(msgspec.Struct, frozen=True, tag_field="type", tag="memory_attached"):
    """Answer to `attach_memory` and `attach_device_memory`. `memory_id` is hexadecimal; its bytes go into `Memory.attached_id`."""

    memory_id: str


class MemoryDetached(msgspec.Struct, frozen=True, tag_field="type", tag="memory_detached"):
    """Answer to `detach_memory`."""


class Refused(msgspec.Struct, frozen=True, tag_field="type", tag="refused"):
    """Answer to anything that can't be done; after a refused `attach` the daemon closes the socket. `kind` names a class of offloadd.errors."""

    kind: str
    error: str


AttachRequest = Attach | AttachMemory | AttachDeviceMemory | DetachMemory
AttachAnswer = Attached | MemoryAttached | MemoryDetached | Refused

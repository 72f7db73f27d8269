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


class DetachMemory(msgspec.Struct, frozen=True, tag_field="type", tag="detach_memory", forbid_unknown_fields=True):
    """Lets the daemon close the descriptor once no region uses it."""

    memory_id: str


class Attached(msgspec.Struct, frozen=True, tag_field="type", tag="attached"):
    """Answer to `attach`. `token` goes into the gRPC metadata "offloadd-session" of each call; whoever has it is the session."""

    token: str
    session: str
    tenant: str


class MemoryAttached(msgspec.Struct, frozen=True, tag_field="type", tag="memory_attached"):
    """Answer to `attach_memory`. `memory_id` is hexadecimal; its bytes go into `Memory.attached_id`."""

    memory_id: str


class MemoryDetached(msgspec.Struct, frozen=True, tag_field="type", tag="memory_detached"):
    """Answer to `detach_memory`."""


class Refused(msgspec.Struct, frozen=True, tag_field="type", tag="refused"):
    """Answer to anything that can't be done; after a refused `attach` the daemon closes the socket. `kind` names a class of offloadd.errors."""

    kind: str
    error: str


AttachRequest = Attach | AttachMemory | DetachMemory
AttachAnswer = Attached | MemoryAttached | MemoryDetached | Refused

"""What copies of a request wait for, so that they keep order with the work of an engine on its GPU."""

from dataclasses import dataclass

#: Bytes of a flag's word. Aligned to as many, it is read and written as one.
FLAG_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class FlagValue:
    """A 64-bit word in CUDA memory, and the `value` from which on it has come: word >= value, unsigned. A word only rises while a region lives that named it.

    `handle`: 64 bytes of the cudaIpcMemHandle of its allocation's base; `offset_bytes`: where in it the word is.
    """

    handle: bytes
    offset_bytes: int
    value: int


#: A cudaIpcEventHandle (64 bytes; empty for none), or a flag.
EventName = bytes | FlagValue

"""The control block in shared memory, as control.h declares it, and the values that stand in it."""

import ctypes
import enum
from dataclasses import dataclass, fields

MAGIC = 0x31444E5453464F4C
FAULTS, PROCESSES, FUNCTIONS, NAME_BYTES = 32, 256, 192, 48


class CufileMode(enum.IntEnum):
    """Which way cuFile moves bytes: through nvidia-fs, by PCI P2PDMA, or bounced through host memory."""

    NVFS = 0
    P2P = 1
    COMPAT = 2


class ComputeMode(enum.IntEnum):
    """Who may use a device."""

    DEFAULT = 0
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class Action(enum.IntEnum):
    """What a fault does to the calls that it hits."""

    FAIL = 0
    SHORT = 1
    DELAY = 2
    HANG = 3


@dataclass(frozen=True, slots=True)
class Counters:
    """What one process did. Names ending in `_now` are levels that fall again, all others only rise."""

    host_to_device_copies: int
    host_to_device_bytes: int
    device_to_host_copies: int
    device_to_host_bytes: int
    device_to_device_copies: int
    device_to_device_bytes: int
    host_to_host_copies: int
    host_to_host_bytes: int
    batches: int
    kernels: int
    pageable_copies: int
    context_synchronizes: int
    implicit_synchronizes: int
    freed_while_registered: int
    work_queued: int
    work_done: int
    contexts_now: int
    streams_now: int
    events_now: int
    event_handles_open_now: int
    allocations_now: int
    allocated_bytes_now: int
    memory_handles_open_now: int
    allocation_handles_now: int
    reservations_now: int
    mappings_now: int
    host_allocations_now: int
    host_registrations_now: int
    host_registered_bytes_now: int
    cufile_handles_now: int
    cufile_buffers_now: int
    cufile_buffer_bytes_now: int
    cufile_calls_now: int
    cufile_reads: int
    cufile_read_bytes: int
    cufile_writes: int
    cufile_write_bytes: int
    cufile_registered: int
    cufile_bounced: int
    cufile_unaligned: int
    cufile_host_buffers: int
    cufile_host_copies: int
    cufile_host_copy_bytes: int

    @property
    def host_copies(self) -> int:
        """Copies between host and device, by the driver's calls and inside cuFile."""
        return self.host_to_device_copies + self.device_to_host_copies + self.cufile_host_copies

    @property
    def held(self) -> dict[str, int]:
        """Every level that is not zero: what the process holds, and leaks if it should hold nothing."""
        return {field.name: value for field in fields(self) if field.name.endswith("_now") and (value := getattr(self, field.name))}

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(*(getattr(self, field.name) - getattr(before, field.name) for field in fields(self)))


class FaultRecord(ctypes.Structure):
    """struct standin_fault."""

    _fields_ = (
        ("active", ctypes.c_int32),
        ("pid", ctypes.c_int32),
        ("function", ctypes.c_char * NAME_BYTES),
        ("skip", ctypes.c_int64),
        ("times", ctypes.c_int64),
        ("action", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("value", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("hits", ctypes.c_int64),
        ("waiting_now", ctypes.c_int64),
    )


class FunctionRecord(ctypes.Structure):
    """struct standin_function."""

    _fields_ = (("name", ctypes.c_char * NAME_BYTES), ("calls", ctypes.c_uint64))


class ProcessRecord(ctypes.Structure):
    """struct standin_process."""

    _fields_ = (
        ("pid", ctypes.c_int32),
        ("hold", ctypes.c_int32),
        ("permitted", ctypes.c_int64),
        ("taken", ctypes.c_int64),
        ("devices", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("counters", ctypes.c_int64 * len(fields(Counters))),
        ("functions", FunctionRecord * FUNCTIONS),
    )


class Management(ctypes.Structure):
    """struct standin_management."""

    _fields_ = (
        ("persistence", ctypes.c_uint32),
        ("mig", ctypes.c_uint32),
        ("pid_shift", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("uncorrected_errors", ctypes.c_uint64),
        ("bar1_bytes", ctypes.c_uint64),
        ("others_bytes", ctypes.c_uint64),
    )


class Block(ctypes.Structure):
    """struct standin_block."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("block_bytes", ctypes.c_uint64),
        ("device_count", ctypes.c_uint32),
        ("compute_mode", ctypes.c_uint32),
        ("cufile_mode", ctypes.c_uint32),
        ("hold", ctypes.c_int32),
        ("no_stream_memory_operations", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("device_bytes_max", ctypes.c_uint64),
        ("host_register_bytes_max", ctypes.c_uint64),
        ("bar_bytes_max", ctypes.c_uint64),
        ("mps", ctypes.c_uint64),
        ("management", Management),
        ("faults", FaultRecord * FAULTS),
        ("processes", ProcessRecord * PROCESSES),
    )


#: Sizes as standin_layout() tells them.
LAYOUT = (ctypes.sizeof(Block), ctypes.sizeof(FaultRecord), ctypes.sizeof(ProcessRecord))

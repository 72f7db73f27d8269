/* The control block: one file in shared memory through which a test sets faults in, and reads counters of, every process that loaded a stand-in.
 *
 * block.py declares the same layout with ctypes; standin_layout() lets a test compare the two. A process takes a record when it loads libcuda.so.1 and
 * keeps it for ever, so that its counters can be read after its death. */
#pragma once
#include <stdatomic.h>
#include <stdint.h>

#define STANDIN_MAGIC 0x31444e5453464f4cull
#define STANDIN_FAULTS 32
#define STANDIN_PROCESSES 256
#define STANDIN_FUNCTIONS 192
#define STANDIN_NAME_BYTES 48

enum standin_cufile_mode { STANDIN_NVFS = 0, STANDIN_P2P = 1, STANDIN_COMPAT = 2 };

enum standin_action { STANDIN_FAIL = 0, STANDIN_SHORT = 1, STANDIN_DELAY = 2, STANDIN_HANG = 3 };

/* Counters only rise; gauges, whose names end in _now, fall again. Both are 64-bit words of a process record, in this order. */
#define STANDIN_COUNTERS(X)                                                                                                                            \
    X(host_to_device_copies) X(host_to_device_bytes) X(device_to_host_copies) X(device_to_host_bytes) X(device_to_device_copies)                     \
    X(device_to_device_bytes) X(host_to_host_copies) X(host_to_host_bytes) X(batches) X(kernels) X(pageable_copies) X(context_synchronizes) X(implicit_synchronizes)   \
    X(freed_while_registered) X(work_queued) X(work_done) X(contexts_now) X(streams_now) X(events_now) X(event_handles_open_now)                     \
    X(allocations_now) X(allocated_bytes_now) X(memory_handles_open_now) X(allocation_handles_now) X(reservations_now) X(mappings_now)               \
    X(host_allocations_now) X(host_registrations_now) X(host_registered_bytes_now) X(cufile_handles_now) X(cufile_buffers_now)                       \
    X(cufile_buffer_bytes_now) X(cufile_calls_now) X(cufile_reads) X(cufile_read_bytes) X(cufile_writes) X(cufile_write_bytes)                       \
    X(cufile_registered) X(cufile_bounced) X(cufile_unaligned) X(cufile_host_buffers) X(cufile_host_copies) X(cufile_host_copy_bytes)

enum standin_counter {
#define X(name) COUNT_##name,
    STANDIN_COUNTERS(X)
#undef X
    COUNT_COUNTERS
};

struct standin_fault {
    _Atomic int32_t active;  /* a number of its own, written last by the test; clearing it releases what hangs */
    int32_t pid;             /* 0: any process */
    char function[STANDIN_NAME_BYTES];
    int64_t skip;   /* matching calls that pass first */
    int64_t times;  /* calls hit after those; -1: all */
    int32_t action;
    int32_t code;   /* FAIL: what is returned. DELAY, HANG: returned after it, 0 to go on */
    int64_t value;  /* SHORT: bytes moved. DELAY: microseconds */
    _Atomic int64_t calls;
    _Atomic int64_t hits;
    _Atomic int64_t waiting_now;
};

struct standin_function {
    char name[STANDIN_NAME_BYTES];
    _Atomic uint64_t calls;
};

struct standin_process {
    _Atomic int32_t pid;
    _Atomic int32_t hold;     /* stream work of this process waits */
    _Atomic int64_t permitted; /* pieces of work, ever, that may run although it is held: only the test writes this, */
    _Atomic int64_t taken;     /* and only the process this */
    _Atomic uint32_t devices; /* bit n: has a context on the n-th device of the machine */
    uint32_t unused;
    _Atomic int64_t counters[COUNT_COUNTERS];
    struct standin_function functions[STANDIN_FUNCTIONS];
};

/* What only the management library tells, or what it tells otherwise than the driver. */
struct standin_management {
    _Atomic uint32_t persistence, mig;
    _Atomic uint32_t pid_shift; /* of the process ids in its lists, as seen from a container: those of the host */
    _Atomic uint32_t unused;
    _Atomic uint64_t uncorrected_errors; /* of memory, since the driver was loaded */
    _Atomic uint64_t bar1_bytes;
    _Atomic uint64_t others_bytes;       /* of device memory that no process here has allocated */
};

struct standin_block {
    uint64_t magic;
    uint64_t block_bytes;
    uint32_t device_count;
    _Atomic uint32_t compute_mode;  /* a CUcomputemode */
    _Atomic uint32_t cufile_mode;
    _Atomic int32_t hold;   /* as in a process, for all of them, those that start later too */
    _Atomic uint32_t no_stream_memory_operations; /* devices have none, and say so */
    uint32_t unused;
    _Atomic uint64_t device_bytes_max;
    _Atomic uint64_t host_register_bytes_max;  /* of one process; 0: none */
    _Atomic uint64_t bar_bytes_max;            /* of one process and device; 0: none */
    _Atomic uint64_t mps;                      /* an MPS server serves all devices */
    struct standin_management management;
    struct standin_fault faults[STANDIN_FAULTS];
    struct standin_process processes[STANDIN_PROCESSES];
};

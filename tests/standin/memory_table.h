/* The table of all memory that the driver knows in this process, and what the parts that fill it share. */
#pragma once
#include "standin.h"
#include <pthread.h>
#include <sys/types.h>

enum { PAGE = 4096, TABLE = 16384 };

struct allocation { /* behind a CUmemGenericAllocationHandle */
    int references, fd, device;
    bool exportable, ours;
    size_t bytes;
};

struct memory {
    enum standin_kind kind;
    CUdeviceptr base;
    char *host;
    size_t bytes;
    int fd, device, opens, registrations;
    bool accessible;
    uint64_t id;
    pid_t owner; /* IMPORTED: who exported it */
    ino_t inode;
    struct allocation *allocation;
};

extern pthread_mutex_t memory_lock;
extern struct memory memory_table[TABLE];
extern int memory_table_end; /* one past the highest entry used so far */

static inline size_t memory_whole_pages(size_t bytes) { return (bytes + PAGE - 1) & ~(size_t)(PAGE - 1); }
static inline bool memory_on_device(enum standin_kind kind) {
    return kind == DEVICE_ALLOCATION || kind == IMPORTED || kind == MAPPED_CHUNK || kind == MANAGED;
}
static inline bool memory_overlaps(const struct memory *memory, CUdeviceptr first, size_t bytes) {
    return first < memory->base + memory->bytes && first + bytes > memory->base;
}

/* These three with `memory_lock` held; what they return is valid as long. */
struct memory *memory_find(CUdeviceptr address);
struct memory *memory_find_base(CUdeviceptr base, enum standin_kind kind);
struct memory *memory_add(struct memory memory);

bool memory_take_bytes(int device, size_t bytes); /* false: the device's memory is used up */
void memory_give_bytes(int device, size_t bytes);
size_t memory_taken_bytes(int device);

int memory_make_file(const char *name, size_t bytes); /* -1 if there is no memory */
bool memory_map_twice(int fd, size_t bytes, bool managed, CUdeviceptr *base, char **host);
void memory_unmap(struct memory memory); /* and closes its file */
void memory_open_to_kernels(bool open);
int memory_device_of(const CUuuid *uuid); /* -1 if it is not visible */

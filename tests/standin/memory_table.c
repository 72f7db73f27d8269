/* All memory that the driver knows in this process.
 *
 * "Device" memory is a memfd mapped twice: without any access at the address that is handed out, so that host code which touches it faults, and readable and
 * writable at an alias that only the stand-ins know. The first is opened for the time that a kernel runs. */
#define _GNU_SOURCE
#include "memory_table.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
struct memory memory_table[TABLE];
int memory_table_end;
static uint64_t last_id;
static _Atomic size_t device_bytes[16];

struct memory *memory_find(CUdeviceptr address) {
    for (int i = 0; i < memory_table_end; i++)
        if (memory_table[i].kind && address >= memory_table[i].base && address < memory_table[i].base + memory_table[i].bytes) return &memory_table[i];
    return 0;
}

struct memory *memory_find_base(CUdeviceptr base, enum standin_kind kind) {
    struct memory *memory = memory_find(base);
    return memory && memory->base == base && memory->kind == kind ? memory : 0;
}

struct memory *memory_add(struct memory memory) {
    int i = 0;
    while (i < TABLE && memory_table[i].kind) i++;
    if (i == TABLE) abort(); /* too small for this test */
    memory.id = ++last_id;
    memory_table[i] = memory;
    if (i >= memory_table_end) memory_table_end = i + 1;
    return &memory_table[i];
}

EXPORT bool standin_find(CUdeviceptr address, size_t bytes, struct standin_place *place) {
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_find(address);
    *place = (struct standin_place){.kind = NOWHERE, .host = (char *)address, .bytes = bytes, .base = address};
    bool fits = true;
    if (memory) {
        *place = (struct standin_place){memory->kind, memory->host + (address - memory->base), memory->device, memory_on_device(memory->kind), memory->base,
                                        memory->bytes};
        CUdeviceptr end = memory->base + memory->bytes;
        fits = memory->accessible;
        while (fits && address + bytes > end) { /* neighbouring chunks of one reservation are one range; neighbouring registrations may not be one */
            struct memory *next = memory->kind == MAPPED_CHUNK ? memory_find(end) : 0;
            fits = next && next->kind == memory->kind && next->accessible && next->host == memory->host + memory->bytes;
            if (fits) end = next->base + next->bytes, memory = next;
        }
    }
    pthread_mutex_unlock(&memory_lock);
    return fits;
}

/* The host's view of device memory, for tests: what a copy to the host would show. */
EXPORT void *standin_alias(CUdeviceptr address) {
    struct standin_place place;
    return standin_find(address, 1, &place) && place.on_device ? place.host : 0;
}

EXPORT void standin_registered(CUdeviceptr base, int change) {
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_find(base);
    if (memory) memory->registrations += change;
    pthread_mutex_unlock(&memory_lock);
}

/* ---- bytes and files ---- */

bool memory_take_bytes(int device, size_t bytes) {
    if (atomic_fetch_add(&device_bytes[device], bytes) + bytes <= standin_block()->device_bytes_max) {
        standin_count(COUNT_allocated_bytes_now, (int64_t)bytes);
        return true;
    }
    atomic_fetch_sub(&device_bytes[device], bytes);
    return false;
}

void memory_give_bytes(int device, size_t bytes) {
    atomic_fetch_sub(&device_bytes[device], bytes);
    standin_count(COUNT_allocated_bytes_now, -(int64_t)bytes);
}

size_t memory_taken_bytes(int device) { return device_bytes[device]; }

int memory_make_file(const char *name, size_t bytes) {
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && !ftruncate(fd, (off_t)memory_whole_pages(bytes))) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

bool memory_map_twice(int fd, size_t bytes, bool managed, CUdeviceptr *base, char **host) {
    char *alias = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *device = managed ? alias : mmap(0, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    if (alias != MAP_FAILED && device != MAP_FAILED) {
        *base = (CUdeviceptr)device, *host = alias;
        return true;
    }
    if (alias != MAP_FAILED) munmap(alias, bytes);
    if (device != MAP_FAILED) munmap(device, bytes);
    return false;
}

/* A kernel knows no alias: while one runs, device memory can be read and written where it was handed out, by all threads. */
void memory_open_to_kernels(bool open) {
    pthread_mutex_lock(&memory_lock);
    for (int i = 0; i < memory_table_end; i++) {
        struct memory *memory = &memory_table[i];
        if (!memory_on_device(memory->kind) || memory->kind == MANAGED) continue;
        if (mprotect((void *)memory->base, memory_whole_pages(memory->bytes), open && memory->accessible ? PROT_READ | PROT_WRITE : PROT_NONE)) abort();
    }
    pthread_mutex_unlock(&memory_lock);
}

void memory_unmap(struct memory memory) {
    munmap(memory.host, memory_whole_pages(memory.bytes));
    if (memory.host != (char *)memory.base) munmap((void *)memory.base, memory_whole_pages(memory.bytes));
    if (memory.fd >= 0) close(memory.fd);
}

int memory_device_of(const CUuuid *uuid) {
    for (int i = 0; i < standin_device_count(); i++) {
        CUuuid other;
        standin_uuid(i, &other);
        if (!memcmp(&other, uuid, sizeof other)) return i;
    }
    return -1;
}

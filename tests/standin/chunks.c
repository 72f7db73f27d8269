/* Virtual memory management: chunks of memory, each a memfd, mapped into a pair of reservations as all device memory is mapped twice. */
#define _GNU_SOURCE
#include "memory_table.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GRANULARITY = 2 << 20 };

struct reservation {
    CUdeviceptr base;
    char *host;
    size_t bytes;
};

static struct reservation reservations[TABLE];

static CUresult check_properties(const CUmemAllocationProp *properties) {
    if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    return properties->location.id >= 0 && properties->location.id < standin_device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties, int option) {
    ENTER(cuMemGetAllocationGranularity, INITIALISED);
    if (option != 0 && option != 1) return CUDA_ERROR_INVALID_VALUE;
    *bytes = GRANULARITY;
    return check_properties(properties);
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags) {
    ENTER(cuMemCreate, INITIALISED);
    CUresult refused = check_properties(properties);
    if (refused) return refused;
    if (flags || !bytes || bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    int device = properties->location.id;
    CUuuid uuid;
    standin_uuid(device, &uuid);
    char name[32];
    snprintf(name, sizeof name, "standin-chunk-%d", uuid.bytes[15]);
    if (!memory_take_bytes(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = memory_make_file(name, bytes);
    if (fd < 0) {
        memory_give_bytes(device, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct allocation *made = malloc(sizeof *made);
    *made = (struct allocation){1, fd, device, properties->requestedHandleTypes != 0, true, bytes};
    standin_count(COUNT_allocation_handles_now, 1);
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
    return CUDA_SUCCESS;
}

/* With `memory_lock` held. */
static void drop(struct allocation *allocation) {
    if (--allocation->references) return;
    close(allocation->fd);
    if (allocation->ours) memory_give_bytes(allocation->device, allocation->bytes);
    free(allocation);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(cuMemRelease, INITIALISED);
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    drop((struct allocation *)handle);
    pthread_mutex_unlock(&memory_lock);
    standin_count(COUNT_allocation_handles_now, -1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER(cuMemRetainAllocationHandle, INITIALISED);
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_find((CUdeviceptr)address);
    bool found = memory && memory->kind == MAPPED_CHUNK;
    if (found) memory->allocation->references++, *handle = (CUmemGenericAllocationHandle)(uintptr_t)memory->allocation;
    pthread_mutex_unlock(&memory_lock);
    if (found) standin_count(COUNT_allocation_handles_now, 1);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    ENTER(cuMemGetAllocationPropertiesFromHandle, INITIALISED);
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    struct allocation *allocation = (struct allocation *)handle;
    *properties = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = allocation->exportable,
                                        .location = {CU_MEM_LOCATION_TYPE_DEVICE, {allocation->device}}};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags) {
    ENTER(cuMemExportToShareableHandle, INITIALISED);
    struct allocation *allocation = (struct allocation *)handle;
    if (!allocation || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !allocation->exportable) return CUDA_ERROR_INVALID_VALUE;
    int fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor, int type) {
    ENTER(cuMemImportFromShareableHandle, INITIALISED);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    char path[64], target[64] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)descriptor);
    int index;
    struct stat status;
    if (readlink(path, target, sizeof target - 1) < 0 || sscanf(target, "/memfd:standin-chunk-%d", &index) != 1) return CUDA_ERROR_INVALID_VALUE;
    CUuuid uuid;
    standin_uuid(0, &uuid);
    uuid.bytes[15] = (char)index;
    int device = memory_device_of(&uuid), fd = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
    if (device < 0 || fd < 0 || fstat(fd, &status)) {
        if (fd >= 0) close(fd);
        return CUDA_ERROR_INVALID_DEVICE;
    }
    struct allocation *made = malloc(sizeof *made);
    *made = (struct allocation){1, fd, device, true, false, (size_t)status.st_size};
    standin_count(COUNT_allocation_handles_now, 1);
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
    return CUDA_SUCCESS;
}

static struct reservation *reservation_of(CUdeviceptr address, size_t bytes) {
    for (int i = 0; i < TABLE; i++) {
        struct reservation *one = &reservations[i];
        if (one->bytes && address >= one->base && address + bytes <= one->base + one->bytes) return one;
    }
    return 0;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    ENTER(cuMemAddressReserve, INITIALISED);
    (void)hint;
    if (flags || !bytes || bytes % GRANULARITY || alignment & (alignment - 1)) return CUDA_ERROR_INVALID_VALUE;
    if (alignment < GRANULARITY) alignment = GRANULARITY;
    char *wide = mmap(0, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *host = mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (wide == MAP_FAILED || host == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    char *base = (char *)(((uintptr_t)wide + alignment - 1) & ~(uintptr_t)(alignment - 1)), *end = wide + bytes + alignment;
    if (base > wide) munmap(wide, (size_t)(base - wide));
    if (end > base + bytes) munmap(base + bytes, (size_t)(end - base - bytes));
    pthread_mutex_lock(&memory_lock);
    int i = 0;
    while (i < TABLE && reservations[i].bytes) i++;
    if (i == TABLE) abort();
    reservations[i] = (struct reservation){(CUdeviceptr)base, host, bytes};
    pthread_mutex_unlock(&memory_lock);
    standin_count(COUNT_reservations_now, 1);
    *pointer = (CUdeviceptr)base;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
    ENTER(cuMemAddressFree, INITIALISED);
    pthread_mutex_lock(&memory_lock);
    struct reservation *one = reservation_of(pointer, bytes);
    bool whole = one && one->base == pointer && one->bytes == bytes;
    for (int i = 0; i < memory_table_end; i++)
        if (memory_table[i].kind == MAPPED_CHUNK && memory_table[i].base >= pointer && memory_table[i].base < pointer + bytes) whole = false;
    if (whole) munmap((void *)one->base, bytes), munmap(one->host, bytes), one->bytes = 0;
    pthread_mutex_unlock(&memory_lock);
    if (whole) standin_count(COUNT_reservations_now, -1);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER(cuMemMap, INITIALISED);
    struct allocation *allocation = (struct allocation *)handle;
    if (!allocation || flags || offset || bytes != allocation->bytes || pointer % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct reservation *one = reservation_of(pointer, bytes);
    CUresult result = one ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < memory_table_end; i++)
        if (memory_table[i].kind == MAPPED_CHUNK && memory_overlaps(&memory_table[i], pointer, bytes)) result = CUDA_ERROR_ALREADY_MAPPED;
    if (!result) {
        char *host = one->host + (pointer - one->base);
        if (mmap((void *)pointer, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd, 0) == MAP_FAILED
            || mmap(host, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, allocation->fd, 0) == MAP_FAILED) abort();
        memory_add((struct memory){MAPPED_CHUNK, pointer, host, bytes, -1, .device = allocation->device, .allocation = allocation});
        allocation->references++;
        standin_count(COUNT_mappings_now, 1);
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

/* True if mapped chunks cover the range exactly. With `memory_lock` held. */
static bool covered(CUdeviceptr pointer, size_t bytes) {
    CUdeviceptr at = pointer;
    while (at < pointer + bytes) {
        struct memory *memory = memory_find_base(at, MAPPED_CHUNK);
        if (!memory) return false;
        at += memory->bytes;
    }
    return bytes && at == pointer + bytes;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    ENTER(cuMemSetAccess, INITIALISED);
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    bool accessible = false;
    for (size_t i = 0; i < count; i++)
        accessible |= access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    pthread_mutex_lock(&memory_lock);
    bool whole = covered(pointer, bytes);
    for (CUdeviceptr at = pointer; whole && at < pointer + bytes;) {
        struct memory *memory = memory_find_base(at, MAPPED_CHUNK);
        memory->accessible = accessible, at += memory->bytes;
    }
    pthread_mutex_unlock(&memory_lock);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer) {
    ENTER(cuMemGetAccess, INITIALISED);
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_find(pointer);
    bool found = memory && memory->kind == MAPPED_CHUNK;
    if (found) *flags = memory->accessible ? 3 : 0;
    pthread_mutex_unlock(&memory_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    ENTER(cuMemUnmap, INITIALISED);
    standin_wait_for_all();
    pthread_mutex_lock(&memory_lock);
    bool whole = covered(pointer, bytes);
    for (CUdeviceptr at = pointer; whole && at < pointer + bytes;) {
        struct memory *memory = memory_find_base(at, MAPPED_CHUNK);
        if (memory->registrations) standin_count(COUNT_freed_while_registered, 1);
        if (mmap((void *)at, memory->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED
            || mmap(memory->host, memory->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) abort();
        drop(memory->allocation);
        memory->kind = NOWHERE, at += memory->bytes;
        standin_count(COUNT_mappings_now, -1);
    }
    pthread_mutex_unlock(&memory_lock);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Device memory: allocations, and what is known of a pointer. */
#define _GNU_SOURCE
#include "memory_table.h"
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, enum standin_kind kind) {
    if (!pointer || !bytes) return CUDA_ERROR_INVALID_VALUE;
    int device = standin_current()->device;
    if (!memory_take_bytes(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = memory_make_file("standin-memory", bytes);
    struct stat status;
    struct memory memory = {.kind = kind, .bytes = bytes, .fd = fd, .device = device, .accessible = true};
    if (fd < 0 || fstat(fd, &status) || !memory_map_twice(fd, memory_whole_pages(bytes), kind == MANAGED, &memory.base, &memory.host)) {
        if (fd >= 0) close(fd);
        memory_give_bytes(device, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory.inode = status.st_ino;
    pthread_mutex_lock(&memory_lock);
    memory_add(memory);
    pthread_mutex_unlock(&memory_lock);
    standin_count(COUNT_allocations_now, 1);
    *pointer = memory.base;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    ENTER(cuMemAlloc, CONTEXT);
    return allocate(pointer, bytes, DEVICE_ALLOCATION);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags) {
    ENTER(cuMemAllocManaged, CONTEXT);
    return flags == 1 || flags == 2 ? allocate(pointer, bytes, MANAGED) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) {
    ENTER(cuMemFree, CONTEXT);
    if (!pointer) return CUDA_SUCCESS;
    standin_wait_for_all();
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_find_base(pointer, DEVICE_ALLOCATION), freed = {0};
    if (!memory) memory = memory_find_base(pointer, MANAGED);
    if (memory) freed = *memory, memory->kind = NOWHERE;
    pthread_mutex_unlock(&memory_lock);
    if (!memory) return CUDA_ERROR_INVALID_VALUE;
    if (freed.registrations) standin_count(COUNT_freed_while_registered, 1);
    memory_unmap(freed);
    memory_give_bytes(freed.device, freed.bytes);
    standin_count(COUNT_allocations_now, -1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTER(cuMemGetInfo, CONTEXT);
    *total_bytes = standin_block()->device_bytes_max;
    *free_bytes = *total_bytes - memory_taken_bytes(standin_current()->device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
    ENTER(cuMemGetAddressRange, CONTEXT);
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_find(pointer);
    if (memory && base) *base = memory->base;
    if (memory && bytes) *bytes = memory->bytes;
    pthread_mutex_unlock(&memory_lock);
    return memory ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- pointer attributes ---- */

static CUresult attribute_of(void *out, int attribute, CUdeviceptr pointer) {
    pthread_mutex_lock(&memory_lock);
    struct memory *found = memory_find(pointer), memory = found ? *found : (struct memory){0};
    pthread_mutex_unlock(&memory_lock);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    bool device = memory_on_device(memory.kind);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = memory.kind == MAPPED_CHUNK ? 0 : standin_primary(memory.device); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = pointer; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (device && memory.kind != MANAGED) return CUDA_ERROR_INVALID_VALUE;
        *(void **)out = (void *)pointer;
        break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)out = 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(uint64_t *)out = memory.id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)out = memory.kind == MANAGED; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = memory.device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned *)out = memory.kind == DEVICE_ALLOCATION; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)out = memory.base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = memory.bytes; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned *)out = memory.accessible; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(uint64_t *)out = memory.allocation && memory.allocation->exportable; break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(unsigned *)out = device && memory.kind != MANAGED; break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(unsigned *)out = memory.accessible ? 3 : 0; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(void **)out = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr pointer) {
    ENTER(cuPointerGetAttribute, INITIALISED);
    return attribute_of(out, attribute, pointer);
}

/* cuFile sets SYNC_MEMOPS of what it registers. It promises what is so here anyway: a call that must be synchronous is. */
EXPORT CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr pointer) {
    ENTER(cuPointerSetAttribute, CONTEXT);
    struct standin_place place;
    if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
    return standin_find(pointer, 1, &place) && place.on_device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static size_t bytes_of(int attribute) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: case CU_POINTER_ATTRIBUTE_HOST_POINTER: case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: case CU_POINTER_ATTRIBUTE_RANGE_SIZE: case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: return 8;
    default: return 4;
    }
}

/* Unlike the single form it succeeds for memory that CUDA does not know: zeros, and no device. */
EXPORT CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **out, CUdeviceptr pointer) {
    ENTER(cuPointerGetAttributes, INITIALISED);
    for (unsigned i = 0; i < count; i++) {
        if (!attribute_of(out[i], attributes[i], pointer)) continue;
        memset(out[i], 0, bytes_of(attributes[i]));
        if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)out[i] = CU_DEVICE_INVALID;
    }
    return CUDA_SUCCESS;
}

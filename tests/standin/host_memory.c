/* Page-locked host memory. */
#define _GNU_SOURCE
#include "memory_table.h"
#include <stdlib.h>
#include <sys/mman.h>

EXPORT CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    ENTER(cuMemHostAlloc, CONTEXT);
    if (!bytes || flags & ~7u) return CUDA_ERROR_INVALID_VALUE;
    void *made = mmap(0, memory_whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&memory_lock);
    memory_add((struct memory){HOST_ALLOCATION, (CUdeviceptr)made, made, bytes, -1, .device = standin_current()->device, .accessible = true});
    pthread_mutex_unlock(&memory_lock);
    standin_count(COUNT_host_allocations_now, 1);
    *pointer = made;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAllocHost_v2(void **pointer, size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }

EXPORT CUresult cuMemFreeHost(void *pointer) {
    ENTER(cuMemFreeHost, CONTEXT);
    standin_wait_for_all();
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_find_base((CUdeviceptr)pointer, HOST_ALLOCATION), freed = {0};
    if (memory) freed = *memory, memory->kind = NOWHERE;
    pthread_mutex_unlock(&memory_lock);
    if (!memory) return CUDA_ERROR_INVALID_VALUE;
    munmap(freed.host, memory_whole_pages(freed.bytes));
    standin_count(COUNT_host_allocations_now, -1);
    return CUDA_SUCCESS;
}

static bool mapped_by_the_process(void *pointer, size_t bytes) {
    char *first = (char *)((uintptr_t)pointer & ~(uintptr_t)(PAGE - 1));
    size_t span = memory_whole_pages((size_t)((char *)pointer + bytes - first));
    unsigned char *resident = malloc(span / PAGE);
    bool mapped = resident && !mincore(first, span, resident);
    free(resident);
    return mapped;
}

EXPORT CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags) {
    ENTER(cuMemHostRegister, CONTEXT);
    if (!pointer || !bytes || flags & ~15u || !mapped_by_the_process(pointer, bytes)) return CUDA_ERROR_INVALID_VALUE;
    uint64_t max = standin_block()->host_register_bytes_max;
    pthread_mutex_lock(&memory_lock);
    CUresult result = CUDA_SUCCESS;
    CUdeviceptr first = (CUdeviceptr)pointer;
    for (int i = 0; i < memory_table_end; i++)
        if (memory_table[i].kind && memory_overlaps(&memory_table[i], first, bytes)) result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (!result && max && (uint64_t)standin_counted(COUNT_host_registered_bytes_now) + bytes > max) result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!result) {
        memory_add((struct memory){HOST_REGISTERED, first, pointer, bytes, -1, .device = standin_current()->device, .accessible = true});
        standin_count(COUNT_host_registrations_now, 1), standin_count(COUNT_host_registered_bytes_now, (int64_t)bytes);
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

EXPORT CUresult cuMemHostUnregister(void *pointer) {
    ENTER(cuMemHostUnregister, CONTEXT);
    standin_wait_for_all();
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_find_base((CUdeviceptr)pointer, HOST_REGISTERED);
    if (memory) {
        standin_count(COUNT_host_registrations_now, -1), standin_count(COUNT_host_registered_bytes_now, -(int64_t)memory->bytes);
        memory->kind = NOWHERE;
    }
    pthread_mutex_unlock(&memory_lock);
    return memory ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned flags) {
    ENTER(cuMemHostGetDevicePointer, CONTEXT);
    struct standin_place place;
    if (flags || !standin_find((CUdeviceptr)host, 1, &place) || place.kind == NOWHERE || place.on_device) return CUDA_ERROR_INVALID_VALUE;
    *device = (CUdeviceptr)host;
    return CUDA_SUCCESS;
}

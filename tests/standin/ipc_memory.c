/* Memory of another process by cuIpc... handles, which name a memfd of the process that exported it. */
#define _GNU_SOURCE
#include "memory_table.h"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct ipc_handle {
    uint64_t magic;
    int32_t pid, fd;
    uint64_t inode, bytes;
    CUuuid uuid;
};
_Static_assert(sizeof(struct ipc_handle) <= sizeof(CUipcMemHandle), "an IPC handle has 64 bytes");
static const uint64_t IPC_MAGIC = 0x6d656d2d64617473ull;

int standin_open_of(int pid, int fd, uint64_t inode) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (opened >= 0 && !fstat(opened, &status) && status.st_ino == inode) return opened;
    if (opened >= 0) close(opened);
    return -1;
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    ENTER(cuIpcGetMemHandle, CONTEXT);
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_find(pointer);
    CUresult result = memory && memory->kind == DEVICE_ALLOCATION ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (!result) {
        struct ipc_handle made = {IPC_MAGIC, getpid(), memory->fd, memory->inode, memory->bytes, {{0}}};
        standin_uuid(memory->device, &made.uuid);
        memset(handle, 0, sizeof *handle), memcpy(handle, &made, sizeof made);
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
    ENTER(cuIpcOpenMemHandle, CONTEXT);
    struct ipc_handle wanted;
    memcpy(&wanted, &handle, sizeof wanted);
    if (wanted.magic != IPC_MAGIC || flags != 1) return CUDA_ERROR_INVALID_VALUE;
    if (wanted.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT; /* what the real driver says of a process's own handle */
    int device = memory_device_of(&wanted.uuid);
    if (device < 0) return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = 0;
    for (int i = 0; i < memory_table_end && !memory; i++)
        if (memory_table[i].kind == IMPORTED && memory_table[i].owner == wanted.pid && memory_table[i].inode == wanted.inode) memory = &memory_table[i];
    if (!memory) {
        struct memory made = {.kind = IMPORTED, .bytes = wanted.bytes, .device = device, .accessible = true, .owner = wanted.pid, .inode = wanted.inode};
        made.fd = standin_open_of(wanted.pid, wanted.fd, wanted.inode);
        if (made.fd >= 0 && memory_map_twice(made.fd, memory_whole_pages(made.bytes), false, &made.base, &made.host)) memory = memory_add(made);
        else if (made.fd >= 0) close(made.fd);
    }
    if (memory) memory->opens++, *pointer = memory->base;
    pthread_mutex_unlock(&memory_lock);
    if (memory) standin_count(COUNT_memory_handles_open_now, 1);
    return memory ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    ENTER(cuIpcCloseMemHandle, CONTEXT);
    standin_wait_for_all();
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_find_base(pointer, IMPORTED), closed = {0};
    if (memory && !--memory->opens) closed = *memory, memory->kind = NOWHERE;
    pthread_mutex_unlock(&memory_lock);
    if (!memory) return CUDA_ERROR_INVALID_VALUE;
    standin_count(COUNT_memory_handles_open_now, -1);
    if (closed.registrations) standin_count(COUNT_freed_while_registered, 1);
    if (closed.kind) memory_unmap(closed);
    return CUDA_SUCCESS;
}

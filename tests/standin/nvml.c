/* libnvidia-ml.so.1: what the management library tells of the machine's devices and of the processes that have contexts on them. */
#include "nvml_abi.h"
#include "standin.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of device memory, besides what a process allocates. */
enum { CONTEXT_BYTES = 300 << 20 };
static _Atomic int initialised;

#define ENTER_NVML(function)                                                                                                                           \
    do {                                                                                                                                               \
        static struct standin_entry entry_ = {.name = #function};                                                                                      \
        int code_ = standin_enter(&entry_).code;                                                                                                       \
        if (code_) return code_;                                                                                                                       \
        if (!initialised) return NVML_ERROR_UNINITIALIZED;                                                                                             \
    } while (0)

/* A handle is the number of its device, from one on. */
static int index_of(nvmlDevice_t device) { return (int)(uintptr_t)device - 1; }

#define NEEDS_DEVICE(device)                                                                                                                           \
    if (index_of(device) < 0 || index_of(device) >= (int)standin_block()->device_count) return NVML_ERROR_INVALID_ARGUMENT

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    static struct standin_entry entry = {.name = "nvmlInit"};
    int code = flags ? NVML_ERROR_INVALID_ARGUMENT : standin_enter(&entry).code;
    if (!code) initialised++;
    return code;
}
EXPORT nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT nvmlReturn_t nvmlShutdown(void) {
    ENTER_NVML(nvmlShutdown);
    initialised--;
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code) { return code ? "stand-in management library: an error" : "no error"; }

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned length) {
    ENTER_NVML(nvmlSystemGetDriverVersion);
    snprintf(text, length, "580.65.06");
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER_NVML(nvmlDeviceGetCount);
    *count = standin_block()->device_count;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    ENTER_NVML(nvmlDeviceGetHandleByIndex);
    if (index >= standin_block()->device_count) return NVML_ERROR_INVALID_ARGUMENT;
    *device = (nvmlDevice_t)(uintptr_t)(index + 1);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    ENTER_NVML(nvmlDeviceGetHandleByUUID);
    for (unsigned i = 0; i < standin_block()->device_count; i++) {
        char text[48];
        standin_uuid_text((int)i, text);
        if (strcmp(text, uuid)) continue;
        *device = (nvmlDevice_t)(uintptr_t)(i + 1);
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length) {
    ENTER_NVML(nvmlDeviceGetUUID);
    NEEDS_DEVICE(device);
    char whole[48];
    standin_uuid_text(index_of(device), whole);
    snprintf(text, length, "%s", whole);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length) {
    ENTER_NVML(nvmlDeviceGetName);
    NEEDS_DEVICE(device);
    snprintf(text, length, "Stand-in GPU");
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    ENTER_NVML(nvmlDeviceGetPciInfo);
    NEEDS_DEVICE(device);
    *info = (nvmlPciInfo_t){.bus = 0x10u + (unsigned)index_of(device)};
    snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", info->bus);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned *mode) {
    ENTER_NVML(nvmlDeviceGetComputeMode);
    NEEDS_DEVICE(device);
    *mode = standin_block()->compute_mode;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *mode) {
    ENTER_NVML(nvmlDeviceGetPersistenceMode);
    NEEDS_DEVICE(device);
    *mode = standin_block()->management.persistence;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    ENTER_NVML(nvmlDeviceGetMigMode);
    NEEDS_DEVICE(device);
    *current = *pending = standin_block()->management.mig;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter, unsigned long long *count) {
    ENTER_NVML(nvmlDeviceGetTotalEccErrors);
    NEEDS_DEVICE(device);
    if (type > 1 || counter > 1) return NVML_ERROR_INVALID_ARGUMENT;
    *count = type == 1 && counter == 0 ? standin_block()->management.uncorrected_errors : 0;
    return NVML_SUCCESS;
}

/* ---- processes ---- */

static int uses(struct standin_process *process, int index) { return process->pid && process->devices >> index & 1 && !kill(process->pid, 0); }

/* Processes that use several devices have all of their allocations on each: the record does not tell them apart. */
static unsigned long long bytes_of(struct standin_process *process) {
    return CONTEXT_BYTES + (unsigned long long)process->counters[COUNT_allocated_bytes_now];
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ENTER_NVML(nvmlDeviceGetMemoryInfo);
    NEEDS_DEVICE(device);
    struct standin_block *block = standin_block();
    *memory = (nvmlMemory_t){.total = 1ull << 36, .used = block->management.others_bytes};
    for (int i = 0; i < STANDIN_PROCESSES; i++)
        if (uses(&block->processes[i], index_of(device))) memory->used += bytes_of(&block->processes[i]);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory) {
    ENTER_NVML(nvmlDeviceGetBAR1MemoryInfo);
    NEEDS_DEVICE(device);
    struct standin_block *block = standin_block();
    *memory = (nvmlBAR1Memory_t){.bar1Total = block->management.bar1_bytes};
    for (int i = 0; i < STANDIN_PROCESSES; i++)
        if (uses(&block->processes[i], index_of(device))) memory->bar1Used += (unsigned long long)block->processes[i].counters[COUNT_cufile_buffer_bytes_now];
    memory->bar1Free = memory->bar1Total - memory->bar1Used;
    return NVML_SUCCESS;
}

static nvmlReturn_t list(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {
    struct standin_block *block = standin_block();
    unsigned room = infos ? *count : 0, found = 0;
    for (int i = 0; i < STANDIN_PROCESSES; i++) {
        struct standin_process *process = &block->processes[i];
        if (!uses(process, index_of(device))) continue;
        if (found < room) infos[found] = (nvmlProcessInfo_t){(unsigned)process->pid + block->management.pid_shift, bytes_of(process), ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* Clients of MPS stand in a list of their own. */
EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {
    ENTER_NVML(nvmlDeviceGetComputeRunningProcesses);
    NEEDS_DEVICE(device);
    if (!standin_block()->mps) return list(device, count, infos);
    *count = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {
    ENTER_NVML(nvmlDeviceGetMPSComputeRunningProcesses);
    NEEDS_DEVICE(device);
    if (standin_block()->mps) return list(device, count, infos);
    *count = 0;
    return NVML_SUCCESS;
}

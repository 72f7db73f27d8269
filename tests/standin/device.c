/* Devices, contexts, errors. */
#define _GNU_SOURCE
#include "errors.h"
#include "standin.h"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICES = 16, STACK = 16 };

static _Atomic bool initialised;
static int visible[DEVICES], visible_count; /* ordinal -> index on the machine, as CUDA_VISIBLE_DEVICES asks */
static struct standin_context primaries[DEVICES];
static _Atomic int retained[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread struct standin_context *stack[STACK];
static __thread int depth;
__thread bool standin_in_host_function;

static CUuuid machine_uuid(int index) { return (CUuuid){{'s', 't', 'a', 'n', 'd', 'i', 'n', '-', 'g', 'p', 'u', 0, 0, 0, 0, (char)index}}; }

EXPORT void standin_uuid_text(int index, char text[48]) {
    const unsigned char *b = (const unsigned char *)machine_uuid(index).bytes;
    snprintf(text, 48, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9],
             b[10], b[11], b[12], b[13], b[14], b[15]);
}

/* An entry that names no device ends the list, as in the real driver. */
static void read_visible(void) {
    int count = (int)standin_block()->device_count;
    const char *asked = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!asked) {
        while (visible_count < count) visible[visible_count] = visible_count, visible_count++;
        return;
    }
    char *copy = strdup(asked), *rest = 0;
    for (char *entry = strtok_r(copy, ",", &rest); entry && visible_count < DEVICES; entry = strtok_r(0, ",", &rest)) {
        int found = -1;
        for (int i = 0; i < count && found < 0; i++) {
            char text[48], number[16];
            standin_uuid_text(i, text), snprintf(number, sizeof number, "%d", i);
            if (!strcmp(entry, number) || (!strncmp(entry, "GPU-", 4) && !strncmp(entry, text, strlen(entry)))) found = i;
        }
        if (found < 0) break;
        visible[visible_count++] = found;
    }
    free(copy);
}

struct standin_context *standin_current(void) { return depth ? stack[depth - 1] : 0; }
struct standin_context *standin_primary(int device) { return &primaries[device]; }
EXPORT void standin_uuid(int device, CUuuid *uuid) { *uuid = machine_uuid(visible[device]); }
EXPORT int standin_device_count(void) { return visible_count; }
EXPORT bool standin_has_context(void) { return depth > 0; }

EXPORT void standin_with_context(struct standin_context *context, bool enter) {
    if (enter) stack[depth++] = context;
    else depth--;
}

CUresult standin_cuda_enter(struct standin_entry *entry, enum standin_need need) {
    if (standin_in_host_function) return CUDA_ERROR_NOT_PERMITTED;
    struct standin_context *context = standin_current();
    CUresult refused = CUDA_SUCCESS;
    if (need >= INITIALISED && !initialised) refused = CUDA_ERROR_NOT_INITIALIZED;
    else if (need == CONTEXT && !context) refused = CUDA_ERROR_INVALID_CONTEXT;
    else if (need == CONTEXT && context->primary && !retained[context->device]) refused = 709; /* CONTEXT_IS_DESTROYED */
    else if (need == CONTEXT && context->sticky) refused = context->sticky;
    CUresult injected = standin_enter(entry).code;
    return refused ? refused : injected;
}

EXPORT CUresult cuInit(unsigned flags) {
    ENTER(cuInit, ANY_TIME);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!initialised) {
        read_visible();
        for (int i = 0; i < DEVICES; i++) primaries[i] = (struct standin_context){.device = i, .primary = true};
        initialised = visible_count > 0;
    }
    pthread_mutex_unlock(&lock);
    return initialised ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    ENTER(cuDriverGetVersion, ANY_TIME);
    *version = 13000;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
    switch (error) {
    case 0: *text = "CUDA_SUCCESS"; return CUDA_SUCCESS;
#define X(code, name) case code: *text = "CUDA_" #name; return CUDA_SUCCESS;
        STANDIN_ERRORS(X)
#undef X
    default: *text = 0; return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    switch (error) {
    case 0: *text = "no error"; return CUDA_SUCCESS;
#define X(code, name) case code: *text = "stand-in driver: " #name; return CUDA_SUCCESS;
        STANDIN_ERRORS(X)
#undef X
    default: *text = 0; return CUDA_ERROR_INVALID_VALUE;
    }
}

/* ---- devices ---- */

#define NEEDS_DEVICE(device) if ((device) < 0 || (device) >= visible_count) return CUDA_ERROR_INVALID_DEVICE

EXPORT CUresult cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount, INITIALISED);
    *count = visible_count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(cuDeviceGet, INITIALISED);
    NEEDS_DEVICE(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(cuDeviceGetName, INITIALISED);
    NEEDS_DEVICE(device);
    snprintf(name, (size_t)length, "Stand-in GPU");
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid, INITIALISED);
    NEEDS_DEVICE(device);
    standin_uuid(device, uuid);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER(cuDeviceTotalMem, INITIALISED);
    NEEDS_DEVICE(device);
    *bytes = standin_block()->device_bytes_max;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    ENTER(cuDeviceGetPCIBusId, INITIALISED);
    NEEDS_DEVICE(device);
    snprintf(text, (size_t)length, "0000:%02X:00.0", 0x10 + visible[device]);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER(cuDeviceCanAccessPeer, INITIALISED);
    NEEDS_DEVICE(device);
    NEEDS_DEVICE(peer);
    *can = device != peer;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER(cuDeviceGetAttribute, INITIALISED);
    NEEDS_DEVICE(device);
    switch (attribute) {
    case 1: *value = 1024; break;         /* MAX_THREADS_PER_BLOCK */
    case 10: *value = 32; break;          /* WARP_SIZE */
    case 11: *value = 0x7fffffff; break;  /* MAX_PITCH */
    case 16: *value = 132; break;         /* MULTIPROCESSOR_COUNT */
    case 20: *value = (int)standin_block()->compute_mode; break;
    case 33: *value = 0x10 + visible[device]; break; /* PCI_BUS_ID */
    case 39: *value = 2048; break;        /* MAX_THREADS_PER_MULTIPROCESSOR */
    case 40: *value = 3; break;           /* ASYNC_ENGINE_COUNT */
    case 75: *value = 9; break;           /* COMPUTE_CAPABILITY_MAJOR */
    case 15:                              /* GPU_OVERLAP */
    case 19:                              /* CAN_MAP_HOST_MEMORY */
    case 31:                              /* CONCURRENT_KERNELS */
    case 41:                              /* UNIFIED_ADDRESSING */
    case 78:                              /* STREAM_PRIORITIES_SUPPORTED */
    case 83:                              /* MANAGED_MEMORY */
    case 91:                              /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    case 99:                              /* HOST_REGISTER_SUPPORTED */
    case 102:                             /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    case 103:                             /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
    case 110:                             /* GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
    case 116:                             /* GPU_DIRECT_RDMA_SUPPORTED */
    case 125: *value = 1; break;          /* IPC_EVENT_SUPPORTED */
    case 133: *value = standin_block()->mps != 0; break; /* MPS_ENABLED */
    case 92: case 93: case 94:            /* stream memory operations, 64 bit, NOR, first version */
    case 122: case 123: *value = !standin_block()->no_stream_memory_operations; break; /* 64 bit, NOR */
    default:
        if (attribute < 1 || attribute >= 162) return CUDA_ERROR_INVALID_VALUE;
        *value = 0; /* all else, HOST_NUMA_ID (node 0) and memory pools among it */
    }
    return CUDA_SUCCESS;
}

/* ---- contexts ---- */

static CUresult may_use(int device) {
    struct standin_block *block = standin_block();
    if (block->compute_mode == CU_COMPUTEMODE_PROHIBITED) return CUDA_ERROR_DEVICE_UNAVAILABLE;
    /* To the driver all clients of MPS are one process: its server. */
    if (block->compute_mode != CU_COMPUTEMODE_EXCLUSIVE_PROCESS || block->mps) return CUDA_SUCCESS;
    for (int i = 0; i < STANDIN_PROCESSES; i++) {
        struct standin_process *other = &block->processes[i];
        if (other != standin_process() && other->pid && other->devices >> visible[device] & 1 && !kill(other->pid, 0)) return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(cuDevicePrimaryCtxRetain, INITIALISED);
    NEEDS_DEVICE(device);
    CUresult refused = may_use(device);
    if (refused) return refused;
    pthread_mutex_lock(&lock);
    if (!retained[device]++) standin_count(COUNT_contexts_now, 1);
    atomic_fetch_or(&standin_process()->devices, 1u << visible[device]);
    pthread_mutex_unlock(&lock);
    *context = &primaries[device];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(cuDevicePrimaryCtxRelease, INITIALISED);
    NEEDS_DEVICE(device);
    pthread_mutex_lock(&lock);
    CUresult result = retained[device] ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (!result && !--retained[device]) {
        standin_count(COUNT_contexts_now, -1);
        atomic_fetch_and(&standin_process()->devices, ~(1u << visible[device]));
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER(cuDevicePrimaryCtxGetState, INITIALISED);
    NEEDS_DEVICE(device);
    *flags = 0, *active = retained[device] > 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(cuCtxPushCurrent, INITIALISED);
    if (!context || depth == STACK) return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER(cuCtxPopCurrent, INITIALISED);
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    struct standin_context *popped = stack[--depth];
    if (context) *context = popped;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(cuCtxSetCurrent, INITIALISED);
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(cuCtxGetCurrent, INITIALISED);
    *context = standin_current();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(cuCtxGetDevice, INITIALISED);
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    *device = standin_current()->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(cuCtxGetStreamPriorityRange, CONTEXT);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

static CUresult create(CUcontext *context, int flags, CUdevice device) {
    NEEDS_DEVICE(device);
    CUresult refused = may_use(device);
    if (refused) return refused;
    if (depth == STACK) return CUDA_ERROR_INVALID_CONTEXT;
    struct standin_context *made = calloc(1, sizeof *made);
    made->device = device, made->flags = flags;
    standin_count(COUNT_contexts_now, 1);
    *context = stack[depth++] = made;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    ENTER(cuCtxCreate, INITIALISED);
    return create(context, (int)flags, device);
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned flags, CUdevice device) {
    ENTER(cuCtxCreate, INITIALISED);
    return parameters ? CUDA_ERROR_NOT_SUPPORTED : create(context, (int)flags, device);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context) {
    ENTER(cuCtxDestroy, INITIALISED);
    if (!context || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
    if (standin_current() == context) depth--;
    standin_count(COUNT_contexts_now, -1);
    return CUDA_SUCCESS; /* not freed: other threads may still hold it on their stacks */
}

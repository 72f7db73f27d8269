/* Modules and kernels: CUDA sources that were compiled for the CPU, each grid run to its end when the stream comes to it.
 *
 * A module is a shared library with two functions: `parameters(name)` gives a letter for each parameter of a kernel, p for a pointer and v for a value, all of
 * them 8 bytes long, or null; `launch(name, grid x, grid y, threads, arguments, count)` runs it. */
#define _GNU_SOURCE
#include "memory_table.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GRID_X_MAX = 0x7fffffff, GRID_YZ_MAX = 65535, THREADS_MAX = 1024, WARP = 32 };

struct standin_module {
    struct standin_context *context;
    const char *(*parameters)(const char *name);
    int (*launch)(const char *name, unsigned grid_x, unsigned grid_y, unsigned threads, const uint64_t *arguments, unsigned count);
};

struct standin_kernel {
    struct standin_module *module;
    const char *parameters;
    struct standin_entry entry;
    char title[STANDIN_NAME_BYTES]; /* "kernel ", and its name */
    const char *name;
};

struct launch {
    struct standin_work work;
    struct standin_kernel *kernel;
    unsigned grid_x, grid_y, threads;
    uint64_t arguments[];
};

/* The built-ins of CUDA on a CPU are global, and so is the access to device memory: kernels of different streams have no order, but run one after another. */
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) {
    ENTER(cuModuleLoad, CONTEXT);
    if (!module || !path) return CUDA_ERROR_INVALID_VALUE;
    if (access(path, R_OK)) return CUDA_ERROR_FILE_NOT_FOUND;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL), *parameters = library ? dlsym(library, "parameters") : 0;
    void *launch = library ? dlsym(library, "launch") : 0;
    if (!parameters || !launch) return CUDA_ERROR_INVALID_IMAGE;
    struct standin_module *made = malloc(sizeof *made);
    *made = (struct standin_module){standin_current(), parameters, launch};
    *module = made;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER(cuModuleGetFunction, CONTEXT);
    if (!function || !module || !name) return CUDA_ERROR_INVALID_VALUE;
    const char *parameters = module->parameters(name);
    if (!parameters) return CUDA_ERROR_NOT_FOUND;
    struct standin_kernel *made = calloc(1, sizeof *made);
    int before = 0;
    snprintf(made->title, sizeof made->title, "kernel %n%s", &before, name);
    made->module = module, made->parameters = parameters, made->entry.name = made->title, made->name = made->title + before;
    *function = made;
    return CUDA_SUCCESS;
}

/* The end of memory too: an empty payload may lie there. */
static bool kernels_reach(CUdeviceptr address) {
    struct standin_place place;
    return (standin_find(address, 1, &place) && place.kind != NOWHERE) || (standin_find(address - 1, 1, &place) && place.kind != NOWHERE);
}

static int what_is_wrong(struct launch *launch) {
    static struct standin_entry any = {.name = "kernel"};
    struct standin_kernel *kernel = launch->kernel;
    int code = standin_enter(&any).code, code_of_this = standin_enter(&kernel->entry).code;
    if (code || code_of_this) return code ? code : code_of_this;
    if (launch->work.context != kernel->module->context) return CUDA_ERROR_INVALID_HANDLE; /* the driver says so when it is queued */
    for (size_t i = 0; kernel->parameters[i]; i++)
        if (kernel->parameters[i] == 'p' && !kernels_reach(launch->arguments[i])) return CUDA_ERROR_ILLEGAL_ADDRESS;
    return CUDA_SUCCESS;
}

static void run_kernel(struct standin_work *work) {
    struct launch *launch = (struct launch *)work;
    struct standin_kernel *kernel = launch->kernel;
    int code = what_is_wrong(launch);
    if (code) standin_fail_context(work, code);
    if (work->context->sticky) return;
    pthread_mutex_lock(&one_at_a_time);
    memory_open_to_kernels(true);
    kernel->module->launch(kernel->name, launch->grid_x, launch->grid_y, launch->threads, launch->arguments, (unsigned)strlen(kernel->parameters));
    memory_open_to_kernels(false);
    pthread_mutex_unlock(&one_at_a_time);
    standin_count(COUNT_kernels, 1);
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads_x, unsigned threads_y,
                               unsigned threads_z, unsigned shared_bytes, CUstream stream, void **parameters, void **extra) {
    ENTER(cuLaunchKernel, CONTEXT);
    if (!function || function->module->context != standin_current()) return CUDA_ERROR_INVALID_HANDLE;
    if (!grid_x || !grid_y || !grid_z || grid_x > GRID_X_MAX || grid_y > GRID_YZ_MAX || grid_z > GRID_YZ_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (!threads_x || !threads_y || !threads_z || (uint64_t)threads_x * threads_y * threads_z > THREADS_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (grid_z != 1 || threads_y != 1 || threads_z != 1 || threads_x % WARP || shared_bytes || extra) return CUDA_ERROR_NOT_SUPPORTED;
    size_t count = strlen(function->parameters);
    for (size_t i = 0; i < count; i++)
        if (!parameters || !parameters[i]) return CUDA_ERROR_INVALID_VALUE;
    struct launch *launch = calloc(1, sizeof *launch + count * sizeof *launch->arguments);
    launch->kernel = function, launch->grid_x = grid_x, launch->grid_y = grid_y, launch->threads = threads_x, launch->work.run = run_kernel;
    for (size_t i = 0; i < count; i++) memcpy(&launch->arguments[i], parameters[i], sizeof *launch->arguments);
    return standin_enqueue(stream, &launch->work);
}

/* cuGetProcAddress: which function answers to a name at a version of the API. */
#define _GNU_SOURCE
#include "standin.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Names of which a version has another signature than the one before; all others are the newest that we have, `name_v2` before `name`. */
static const struct {
    const char *name;
    int since;
    const char *symbol; /* null: not here */
} versions[] = {
    {"cuCtxCreate", 3020, "cuCtxCreate_v2"},
    {"cuCtxCreate", 11040, 0},
    {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuCtxGetDevice", 2000, "cuCtxGetDevice"},
    {"cuCtxGetDevice", 13000, 0},
    {"cuCtxSynchronize", 2000, "cuCtxSynchronize"},
    {"cuCtxSynchronize", 13000, 0},
    {"cuMemcpyBatchAsync", 12080, "cuMemcpyBatchAsync"},
    {"cuMemcpyBatchAsync", 13000, "cuMemcpyBatchAsync_v2"},
    {"cuLaunchHostFunc", 10000, "cuLaunchHostFunc"},
    {"cuLaunchHostFunc", 13020, 0},
    {"cuGetProcAddress", 11030, "cuGetProcAddress"},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
};

static void *symbol(const char *name) {
    Dl_info self;
    dladdr((void *)(uintptr_t)&symbol, &self);
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD), *found = library ? dlsym(library, name) : 0;
    if (library) dlclose(library);
    return found;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    ENTER(cuGetProcAddress, ANY_TIME);
    int ignored;
    if (!status) status = &ignored;
    if (!name || !function || flags & ~3ull) return CUDA_ERROR_INVALID_VALUE;
    *function = 0, *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const char *wanted = 0;
    bool listed = false;
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        if (strcmp(versions[i].name, name)) continue;
        listed = true;
        if (version >= versions[i].since) wanted = versions[i].symbol;
    }
    if (listed && !wanted) *status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    if (wanted) *function = symbol(wanted);
    if (!listed) {
        char newer[128];
        snprintf(newer, sizeof newer, "%s_v2", name);
        *function = symbol(newer);
        if (!*function) *function = symbol(name);
    }
    if (*function) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}

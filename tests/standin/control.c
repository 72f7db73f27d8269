/* The control block: found by name, or private to this process; counters, and faults that a test set. */
#define _GNU_SOURCE
#include "standin.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static struct standin_block *block;
static struct standin_process *process;
static pthread_mutex_t functions_lock = PTHREAD_MUTEX_INITIALIZER;

#define TEXT(text) #text
#define X(name) TEXT(name) ","
EXPORT const char standin_counter_names[] = STANDIN_COUNTERS(X);
#undef X

EXPORT void standin_layout(uint64_t sizes[3]) {
    sizes[0] = sizeof(struct standin_block), sizes[1] = sizeof(struct standin_fault), sizes[2] = sizeof(struct standin_process);
}

static void fail(const char *path, const char *why) {
    fprintf(stderr, "stand-in CUDA driver: control block %s %s\n", path, why);
    abort();
}

static unsigned number_from_environment(const char *name, unsigned otherwise) {
    const char *text = getenv(name);
    return text ? (unsigned)strtoul(text, 0, 10) : otherwise;
}

/* At the first call, not when the library is loaded: a process that never calls the driver takes no record. */
static void find_block(void) {
    const char *path = getenv("CUDA_STANDIN_CONTROL");
    if (path) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        struct stat status;
        if (fd < 0 || fstat(fd, &status)) fail(path, "can't be opened");
        if ((size_t)status.st_size != sizeof *block) fail(path, "has another size: it was made by other sources");
        block = mmap(0, sizeof *block, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
    } else {
        block = mmap(0, sizeof *block, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    if (block == MAP_FAILED) fail(path ? path : "(private)", "can't be mapped");
    if (!path) {
        block->magic = STANDIN_MAGIC, block->block_bytes = sizeof *block, block->device_bytes_max = 1ull << 30;
        block->management.bar1_bytes = 1ull << 36;
        block->device_count = number_from_environment("CUDA_STANDIN_DEVICES", 2);
        block->cufile_mode = number_from_environment("CUDA_STANDIN_CUFILE_MODE", STANDIN_NVFS);
    }
    if (block->magic != STANDIN_MAGIC || block->block_bytes != sizeof *block) fail(path, "is none");
    if (block->device_count > 16) fail(path ? path : "(private)", "asks for more than 16 devices");
    for (int i = 0; i < STANDIN_PROCESSES && !process; i++) {
        int32_t nobody = 0;
        if (atomic_compare_exchange_strong(&block->processes[i].pid, &nobody, getpid())) process = &block->processes[i];
    }
    if (!process) fail(path, "has no record left: all of its processes have used it");
}

static pthread_once_t once = PTHREAD_ONCE_INIT;

EXPORT struct standin_process *standin_process(void) {
    pthread_once(&once, find_block);
    return process;
}

EXPORT struct standin_block *standin_block(void) {
    pthread_once(&once, find_block);
    return block;
}

EXPORT void standin_count(enum standin_counter counter, int64_t amount) { atomic_fetch_add(&standin_process()->counters[counter], amount); }
EXPORT int64_t standin_counted(enum standin_counter counter) { return standin_process()->counters[counter]; }

EXPORT void standin_pause(void) { nanosleep(&(struct timespec){0, 50000}, 0); }

static struct standin_function *find_function(const char *name) {
    struct standin_function *found = 0;
    pthread_mutex_lock(&functions_lock);
    for (int i = 0; i < STANDIN_FUNCTIONS && !found; i++) {
        struct standin_function *function = &process->functions[i];
        if (!function->name[0]) strncpy(function->name, name, STANDIN_NAME_BYTES - 1);
        if (!strcmp(function->name, name)) found = function;
    }
    pthread_mutex_unlock(&functions_lock);
    if (!found) abort(); /* STANDIN_FUNCTIONS is too small for the calls that the stand-ins have */
    return found;
}

static void apply(struct standin_fault *fault, int32_t number, struct standin_verdict *verdict) {
    int64_t call = atomic_fetch_add(&fault->calls, 1);
    if (call < fault->skip || (fault->times >= 0 && call >= fault->skip + fault->times)) return;
    atomic_fetch_add(&fault->hits, 1);
    if (fault->action == STANDIN_SHORT) {
        verdict->bytes_max = fault->value;
        return;
    }
    atomic_fetch_add(&fault->waiting_now, 1);
    if (fault->action == STANDIN_DELAY) nanosleep(&(struct timespec){fault->value / 1000000, fault->value % 1000000 * 1000}, 0);
    if (fault->action == STANDIN_HANG)
        while (fault->active == number) standin_pause();
    atomic_fetch_sub(&fault->waiting_now, 1);
    if (!verdict->code) verdict->code = fault->code;
}

EXPORT struct standin_verdict standin_enter(struct standin_entry *entry) {
    pthread_once(&once, find_block);
    if (!entry->function) entry->function = find_function(entry->name);
    atomic_fetch_add(&entry->function->calls, 1);
    struct standin_verdict verdict = {0, -1};
    for (int i = 0; i < STANDIN_FAULTS; i++) {
        struct standin_fault *fault = &block->faults[i];
        int32_t number = fault->active;
        if (!number || (fault->pid && fault->pid != process->pid) || strcmp(fault->function, entry->name)) continue;
        apply(fault, number, &verdict);
    }
    return verdict;
}

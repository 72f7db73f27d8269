/* Events, in this process and between processes.
 *
 * What is known of an event lies in a small state: a number for each record, and which of them are done. An interprocess event keeps it in a memfd, and its
 * handle says whose and which, so that two processes see the same state. */
#define _GNU_SOURCE
#include "standin.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { RECORDS = 64 }; /* of one event that may be under way at once */

struct event_state {
    _Atomic uint64_t recorded;
    _Atomic uint64_t done[RECORDS]; /* by number modulo RECORDS: the last one that is done */
    _Atomic int64_t done_ns;
};

struct standin_event {
    _Atomic int references; /* the handle, and work under way */
    unsigned flags;
    bool opened; /* by handle */
    int fd;
    ino_t inode;
    struct standin_context *context;
    struct event_state *state;
};

struct ipc_event {
    uint64_t magic;
    int32_t pid, fd;
    uint64_t inode;
};
static const uint64_t IPC_MAGIC = 0x7665652d64617473ull;

static void release_event(struct standin_event *event) {
    if (atomic_fetch_sub(&event->references, 1) > 1) return;
    if (event->fd >= 0) munmap(event->state, sizeof *event->state), close(event->fd);
    else free(event->state);
    free(event);
}

static bool is_done(struct event_state *state, uint64_t number) { return state->done[number % RECORDS] >= number; }

static CUresult state_of(struct standin_event *event) {
    if (event->context->sticky) return event->context->sticky;
    return is_done(event->state, event->state->recorded) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventCreate(CUevent *out, unsigned flags) {
    ENTER(cuEventCreate, CONTEXT);
    if (flags & ~7u || (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING))) return CUDA_ERROR_INVALID_VALUE;
    struct standin_event *event = calloc(1, sizeof *event);
    event->references = 1;
    event->flags = flags, event->fd = -1, event->context = standin_current();
    if (flags & CU_EVENT_INTERPROCESS) {
        event->fd = memfd_create("standin-event", MFD_CLOEXEC);
        struct stat status;
        if (event->fd < 0 || ftruncate(event->fd, sizeof *event->state) || fstat(event->fd, &status)) abort();
        event->inode = status.st_ino;
        event->state = mmap(0, sizeof *event->state, PROT_READ | PROT_WRITE, MAP_SHARED, event->fd, 0);
        if (event->state == MAP_FAILED) abort();
    } else {
        event->state = calloc(1, sizeof *event->state);
    }
    standin_count(COUNT_events_now, 1);
    *out = event;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    ENTER(cuEventDestroy, CONTEXT);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    standin_count(event->opened ? COUNT_event_handles_open_now : COUNT_events_now, -1);
    release_event(event);
    return CUDA_SUCCESS;
}

struct event_work {
    struct standin_work work;
    struct standin_event *event;
    uint64_t number;
};

static void finish_record(struct standin_work *work) {
    struct event_work *record = (struct event_work *)work;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    record->event->state->done_ns = now.tv_sec * 1000000000ll + now.tv_nsec;
    _Atomic uint64_t *done = &record->event->state->done[record->number % RECORDS];
    uint64_t before = *done;
    while (before < record->number && !atomic_compare_exchange_weak(done, &before, record->number)) {}
}

static bool is_recorded(struct standin_work *work) {
    struct event_work *wait = (struct event_work *)work;
    return is_done(wait->event->state, wait->number);
}

static void nothing(struct standin_work *work) { (void)work; }

static void release_work(struct standin_work *work) {
    release_event(((struct event_work *)work)->event);
    free(work);
}

static CUresult enqueue(CUstream stream, struct standin_event *event, uint64_t number, bool wait) {
    struct event_work *made = calloc(1, sizeof *made);
    made->work.run = wait ? nothing : finish_record, made->work.ready = wait ? is_recorded : 0, made->work.release = release_work;
    made->event = event, made->number = number;
    event->references++;
    return standin_enqueue(stream, &made->work);
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER(cuEventRecord, CONTEXT);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    return enqueue(stream, event, atomic_fetch_add(&event->state->recorded, 1) + 1, false);
}

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    return flags ? CUDA_ERROR_NOT_SUPPORTED : cuEventRecord(event, stream);
}

/* Waits for the record that is the latest now; a later one does not matter, and an event that was never recorded is done. */
EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    ENTER(cuStreamWaitEvent, CONTEXT);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    return flags ? CUDA_ERROR_NOT_SUPPORTED : enqueue(stream, event, event->state->recorded, true);
}

EXPORT CUresult cuEventQuery(CUevent event) {
    ENTER(cuEventQuery, CONTEXT);
    return event ? state_of(event) : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuEventSynchronize(CUevent event) {
    ENTER(cuEventSynchronize, CONTEXT);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    uint64_t number = event->state->recorded;
    while (!is_done(event->state, number) && !event->context->sticky) standin_pause();
    return event->context->sticky;
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    ENTER(cuEventElapsedTime, CONTEXT);
    if (!start || !end || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
    if (!start->state->recorded || !end->state->recorded) return CUDA_ERROR_INVALID_HANDLE;
    CUresult first = state_of(start), second = state_of(end);
    *milliseconds = (float)(end->state->done_ns - start->state->done_ns) / 1e6f;
    return first ? first : second;
}
EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) { return cuEventElapsedTime_v2(milliseconds, start, end); }

EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event) {
    ENTER(cuIpcGetEventHandle, CONTEXT);
    if (!event || !(event->flags & CU_EVENT_INTERPROCESS) || event->opened) return CUDA_ERROR_INVALID_HANDLE;
    struct ipc_event made = {IPC_MAGIC, getpid(), event->fd, event->inode};
    memset(handle, 0, sizeof *handle), memcpy(handle, &made, sizeof made);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle) {
    ENTER(cuIpcOpenEventHandle, CONTEXT);
    struct ipc_event wanted;
    memcpy(&wanted, &handle, sizeof wanted);
    if (wanted.magic != IPC_MAGIC) return CUDA_ERROR_INVALID_VALUE;
    if (wanted.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    int fd = standin_open_of(wanted.pid, wanted.fd, wanted.inode);
    if (fd < 0) return CUDA_ERROR_MAP_FAILED;
    struct standin_event *event = calloc(1, sizeof *event);
    event->references = 1;
    event->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, event->opened = true, event->fd = fd, event->context = standin_current();
    event->state = mmap(0, sizeof *event->state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (event->state == MAP_FAILED) abort();
    standin_count(COUNT_event_handles_open_now, 1);
    *out = event;
    return CUDA_SUCCESS;
}

/* Streams: each is a queue with a thread of its own, so that work is done after the call that queued it returned, and a missing wait is seen.
 *
 * The order is the driver's: first in, first out within a stream; between streams only what events, values in memory or the legacy default stream demand. A
 * test can hold all of a process's streams and let single pieces of work run. */
#define _GNU_SOURCE
#include "standin.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct standin_stream {
    struct standin_context *context;
    unsigned flags;
    int priority;
    struct standin_work *head, **tail;
    uint64_t submitted;
    _Atomic uint64_t completed;
    _Atomic int references; /* the handle, the thread, and work of other streams that waits for this one */
    bool destroyed;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct standin_stream *next; /* in `all`, until it is destroyed and its work is done: that is still waited for */
};

static struct standin_stream *all;
static pthread_mutex_t order_lock = PTHREAD_MUTEX_INITIALIZER; /* of `all`, and of the order in which work is queued */

static void release_stream(struct standin_stream *stream) {
    if (atomic_fetch_sub(&stream->references, 1) == 1) free(stream);
}

static void wait_for_permission(void) {
    struct standin_process *process = standin_process();
    for (;;) {
        if (!process->hold && !standin_block()->hold) return;
        int64_t taken = process->taken;
        if (taken < process->permitted && atomic_compare_exchange_strong(&process->taken, &taken, taken + 1)) return;
        standin_pause();
    }
}

static void do_work(struct standin_work *work) {
    for (int i = 0; i < work->after_count; i++) {
        while (work->after[i].stream->completed < work->after[i].number) standin_pause();
        release_stream(work->after[i].stream);
    }
    free(work->after);
    while (work->ready && !work->context->sticky && !work->ready(work)) standin_pause();
    wait_for_permission();
    static struct standin_entry entry = {.name = "work"};
    int code = standin_enter(&entry).code;
    if (code) standin_fail_context(work, code);
    if (!work->context->sticky) work->run(work);
    standin_count(COUNT_work_done, 1);
}

static void *serve(void *argument) {
    struct standin_stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->head && !stream->destroyed) pthread_cond_wait(&stream->changed, &stream->lock);
        if (!stream->head) break;
        struct standin_work *work = stream->head;
        stream->head = work->next;
        if (!stream->head) stream->tail = &stream->head;
        pthread_mutex_unlock(&stream->lock);
        do_work(work);
        uint64_t number = work->number;
        if (work->release) work->release(work);
        else free(work);
        pthread_mutex_lock(&stream->lock);
        stream->completed = number;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    pthread_mutex_lock(&order_lock);
    struct standin_stream **link = &all;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    pthread_mutex_unlock(&order_lock);
    release_stream(stream);
    return 0;
}

/* With `order_lock` held. */
static struct standin_stream *make(struct standin_context *context, unsigned flags, int priority) {
    struct standin_stream *stream = calloc(1, sizeof *stream);
    stream->context = context, stream->flags = flags, stream->priority = priority, stream->tail = &stream->head, stream->references = 2;
    pthread_mutex_init(&stream->lock, 0);
    pthread_cond_init(&stream->changed, 0);
    pthread_t thread;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &detached, serve, stream)) abort();
    pthread_attr_destroy(&detached);
    stream->next = all, all = stream;
    return stream;
}

static CUstream LEGACY = (CUstream)1;

/* The stream behind a handle; null if it is none, as CU_STREAM_PER_THREAD, which the stand-in does not have. With `order_lock` held. */
static struct standin_stream *resolve(CUstream handle) {
    if (handle && handle != LEGACY) {
        for (struct standin_stream *one = all; one; one = one->next)
            if (one == handle && !one->destroyed) return one;
        return 0;
    }
    struct standin_context *context = standin_current();
    if (!context->legacy) context->legacy = make(context, 0, 0);
    return context->legacy;
}

static void wait_also_for(struct standin_work *work, struct standin_stream *stream) {
    if (stream->completed == stream->submitted) return;
    work->after = realloc(work->after, sizeof *work->after * (size_t)(work->after_count + 1));
    work->after[work->after_count].stream = stream, work->after[work->after_count++].number = stream->submitted;
    stream->references++;
}

EXPORT CUresult standin_enqueue(CUstream handle, struct standin_work *work) {
    pthread_mutex_lock(&order_lock);
    struct standin_stream *stream = resolve(handle);
    if (!stream) {
        pthread_mutex_unlock(&order_lock);
        if (work->release) work->release(work);
        else free(work);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    work->context = stream->context;
    bool legacy = stream == stream->context->legacy; /* it waits for every blocking stream, and every blocking stream for it */
    if (!legacy && !(stream->flags & CU_STREAM_NON_BLOCKING) && stream->context->legacy) wait_also_for(work, stream->context->legacy);
    for (struct standin_stream *one = legacy ? all : 0; one; one = one->next)
        if (one != stream && one->context == stream->context && !(one->flags & CU_STREAM_NON_BLOCKING)) wait_also_for(work, one);
    pthread_mutex_lock(&stream->lock);
    work->number = ++stream->submitted;
    *stream->tail = work, stream->tail = &work->next;
    standin_count(COUNT_work_queued, 1);
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_mutex_unlock(&order_lock);
    return CUDA_SUCCESS;
}

void standin_fail_context(struct standin_work *work, int code) {
    int none = 0;
    atomic_compare_exchange_strong(&work->context->sticky, &none, code);
}

static void wait_until_done(struct standin_stream *stream, uint64_t number) {
    pthread_mutex_lock(&stream->lock);
    while (stream->completed < number) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
}

CUresult standin_stream_wait(CUstream handle) {
    pthread_mutex_lock(&order_lock);
    struct standin_stream *stream = resolve(handle);
    if (stream) stream->references++;
    uint64_t number = stream ? stream->submitted : 0;
    pthread_mutex_unlock(&order_lock);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    wait_until_done(stream, number);
    CUresult result = stream->context->sticky;
    release_stream(stream);
    return result;
}

/* All work queued so far, of one context or, if it is null, of all. */
static void wait_for(struct standin_context *only) {
    pthread_mutex_lock(&order_lock);
    int count = 0;
    for (struct standin_stream *one = all; one; one = one->next) count++;
    struct { struct standin_stream *stream; uint64_t number; } *busy = calloc((size_t)count + 1, sizeof *busy);
    int used = 0;
    for (struct standin_stream *one = all; one; one = one->next) {
        if ((only && one->context != only) || one->completed == one->submitted) continue;
        busy[used].stream = one, busy[used++].number = one->submitted, one->references++;
    }
    pthread_mutex_unlock(&order_lock);
    for (int i = 0; i < used; i++) {
        wait_until_done(busy[i].stream, busy[i].number);
        release_stream(busy[i].stream);
    }
    free(busy);
}

void standin_wait_for_all(void) {
    standin_count(COUNT_implicit_synchronizes, 1);
    wait_for(standin_current());
}

/* ---- the driver's calls ---- */

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    ENTER(cuStreamCreate, CONTEXT);
    if (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&order_lock);
    *stream = make(standin_current(), flags, priority < -5 ? -5 : priority > 0 ? 0 : priority);
    pthread_mutex_unlock(&order_lock);
    standin_count(COUNT_streams_now, 1);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

EXPORT CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    ENTER(cuStreamGetPriority, CONTEXT);
    pthread_mutex_lock(&order_lock);
    struct standin_stream *stream = resolve(handle);
    if (stream) *priority = stream->priority;
    pthread_mutex_unlock(&order_lock);
    return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* Returns at once; what is queued is still done. */
EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    ENTER(cuStreamDestroy, CONTEXT);
    pthread_mutex_lock(&order_lock);
    struct standin_stream *stream = handle && handle != LEGACY ? resolve(handle) : 0;
    if (stream) {
        pthread_mutex_lock(&stream->lock);
        stream->destroyed = true;
        pthread_cond_broadcast(&stream->changed);
        pthread_mutex_unlock(&stream->lock);
    }
    pthread_mutex_unlock(&order_lock);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    release_stream(stream);
    standin_count(COUNT_streams_now, -1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) {
    ENTER(cuStreamSynchronize, CONTEXT);
    return standin_stream_wait(stream);
}

EXPORT CUresult cuStreamQuery(CUstream handle) {
    ENTER(cuStreamQuery, CONTEXT);
    pthread_mutex_lock(&order_lock);
    struct standin_stream *stream = resolve(handle);
    CUresult result = !stream ? CUDA_ERROR_INVALID_HANDLE : stream->completed == stream->submitted ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&order_lock);
    return result;
}

EXPORT CUresult cuCtxSynchronize(void) {
    ENTER(cuCtxSynchronize, CONTEXT);
    standin_count(COUNT_context_synchronizes, 1);
    wait_for(standin_current());
    return standin_current()->sticky;
}

struct host_call {
    struct standin_work work;
    CUhostFn function;
    void *data;
};

static void call_host(struct standin_work *work) {
    struct host_call *call = (struct host_call *)work;
    standin_in_host_function = true;
    call->function(call->data);
    standin_in_host_function = false;
}

EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
    ENTER(cuLaunchHostFunc, CONTEXT);
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    struct host_call *call = calloc(1, sizeof *call);
    call->work.run = call_host, call->function = function, call->data = data;
    return standin_enqueue(stream, &call->work);
}

/* ---- values in memory ---- */

struct value {
    struct standin_work work;
    void *where;
    uint64_t value;
    unsigned flags;
    bool wide;
};

static bool value_is_there(struct standin_work *work) {
    struct value *wait = (struct value *)work;
    uint64_t now = wait->wide ? atomic_load((_Atomic uint64_t *)wait->where) : atomic_load((_Atomic uint32_t *)wait->where), wanted = wait->value;
    uint64_t mask = wait->wide ? ~0ull : 0xffffffffull;
    switch (wait->flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ: return wait->wide ? (int64_t)(now - wanted) >= 0 : (int32_t)(uint32_t)(now - wanted) >= 0; /* cyclic, as declared */
    case CU_STREAM_WAIT_VALUE_EQ: return now == wanted;
    case CU_STREAM_WAIT_VALUE_AND: return (now & wanted) != 0;
    default: return (~(now | wanted) & mask) != 0;
    }
}

static void nothing(struct standin_work *work) { (void)work; }

static void write_value(struct standin_work *work) {
    struct value *write = (struct value *)work;
    if (write->wide) atomic_store((_Atomic uint64_t *)write->where, write->value);
    else atomic_store((_Atomic uint32_t *)write->where, (uint32_t)write->value);
}

static CUresult enqueue_value(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags, bool wide, bool wait) {
    struct standin_place place;
    size_t bytes = wide ? 8 : 4;
    if (standin_block()->no_stream_memory_operations) return CUDA_ERROR_NOT_SUPPORTED;
    if (address % bytes || !standin_find(address, bytes, &place) || place.kind == NOWHERE) return CUDA_ERROR_INVALID_VALUE;
    struct value *made = calloc(1, sizeof *made);
    made->where = place.host, made->value = value, made->flags = flags, made->wide = wide;
    made->work.ready = wait ? value_is_there : 0, made->work.run = wait ? nothing : write_value;
    /* Without its barrier a write may be seen before what the work before it wrote; that it is seen right now shows who needed the barrier. */
    if (!wait && flags & CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) write_value(&made->work);
    return standin_enqueue(stream, &made->work);
}

EXPORT CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    ENTER(cuStreamWaitValue32, CONTEXT);
    if (flags & ~3u) return flags & CU_STREAM_WAIT_VALUE_FLUSH ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    return enqueue_value(stream, address, value, flags, false, true);
}

EXPORT CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    ENTER(cuStreamWaitValue64, CONTEXT);
    if (flags & ~3u) return flags & CU_STREAM_WAIT_VALUE_FLUSH ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    return enqueue_value(stream, address, value, flags, true, true);
}

EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    ENTER(cuStreamWriteValue32, CONTEXT);
    return flags & ~1u ? CUDA_ERROR_INVALID_VALUE : enqueue_value(stream, address, value, flags, false, false);
}

EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    ENTER(cuStreamWriteValue64, CONTEXT);
    return flags & ~1u ? CUDA_ERROR_INVALID_VALUE : enqueue_value(stream, address, value, flags, true, false);
}

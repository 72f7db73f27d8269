/* cuFile's batches, which are done when they are submitted, and its stream operations, which are done when the stream comes to them. */
#define _GNU_SOURCE
#include "cufile_parts.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCH = 128 };

struct batch {
    pthread_mutex_t lock;
    unsigned room, count;
    CUfileIOEvents_t events[BATCH];
};

EXPORT CUfileError_t cuFileBatchIOSetUp(CUfileBatchHandle_t *handle, unsigned entries) {
    ENTER_CUFILE(cuFileBatchIOSetUp);
    if (!handle || !entries || entries > BATCH) return cufile_error(CU_FILE_INVALID_VALUE);
    struct batch *batch = calloc(1, sizeof *batch);
    pthread_mutex_init(&batch->lock, 0);
    batch->room = entries;
    *handle = batch;
    return DONE;
}

EXPORT CUfileError_t cuFileBatchIOSubmit(CUfileBatchHandle_t handle, unsigned count, CUfileIOParams_t *entries, unsigned flags) {
    ENTER_CUFILE(cuFileBatchIOSubmit);
    (void)flags;
    struct batch *batch = handle;
    if (!batch || !entries) return cufile_error(CU_FILE_INVALID_VALUE);
    pthread_mutex_lock(&batch->lock);
    bool fits = batch->count + count <= batch->room;
    for (unsigned i = 0; i < count && fits; i++) {
        static struct standin_entry names[2] = {{.name = "cuFileBatchIO read"}, {.name = "cuFileBatchIO write"}};
        bool write = entries[i].opcode == CUFILE_WRITE;
        ssize_t result = cufile_transfer(write, entries[i].fh, entries[i].u.batch.devPtr_base, entries[i].u.batch.size, entries[i].u.batch.file_offset,
                                         entries[i].u.batch.devPtr_offset, standin_enter(&names[write]));
        batch->events[batch->count++] = (CUfileIOEvents_t){entries[i].cookie, result < 0 ? CUFILE_FAILED : CUFILE_COMPLETE, (size_t)result};
    }
    pthread_mutex_unlock(&batch->lock);
    return cufile_error(fits ? CU_FILE_SUCCESS : CU_FILE_BATCH_FULL);
}

EXPORT CUfileError_t cuFileBatchIOGetStatus(CUfileBatchHandle_t handle, unsigned least, unsigned *count, CUfileIOEvents_t *events, struct timespec *timeout) {
    ENTER_CUFILE(cuFileBatchIOGetStatus);
    (void)least, (void)timeout;
    struct batch *batch = handle;
    if (!batch || !count || !events) return cufile_error(CU_FILE_INVALID_VALUE);
    pthread_mutex_lock(&batch->lock);
    if (*count > batch->count) *count = batch->count;
    batch->count -= *count;
    memcpy(events, batch->events, *count * sizeof *events);
    memmove(batch->events, batch->events + *count, batch->count * sizeof *events);
    pthread_mutex_unlock(&batch->lock);
    return DONE;
}

EXPORT CUfileError_t cuFileBatchIOCancel(CUfileBatchHandle_t handle) {
    ENTER_CUFILE(cuFileBatchIOCancel);
    return cufile_error(handle ? CU_FILE_SUCCESS : CU_FILE_INVALID_VALUE);
}

EXPORT void cuFileBatchIODestroy(CUfileBatchHandle_t handle) { free(handle); }

struct stream_io {
    struct standin_work work;
    bool write;
    CUfileHandle_t file;
    void *base;
    size_t *bytes;
    off_t *file_offset, *buffer_offset;
    ssize_t *result;
    struct standin_verdict verdict;
};

/* The sizes and offsets are read now, as cuFile does: work before this may still have set them. */
static void do_stream_io(struct standin_work *work) {
    struct stream_io *io = (struct stream_io *)work;
    struct standin_context *context = work->context;
    standin_with_context(context, true);
    ssize_t result = cufile_transfer(io->write, io->file, io->base, *io->bytes, *io->file_offset, *io->buffer_offset, io->verdict);
    *io->result = result == -1 ? -errno : result;
    standin_with_context(context, false);
}

static CUfileError_t enqueue(struct stream_io io, CUstream stream) {
    if (!io.bytes || !io.file_offset || !io.buffer_offset || !io.result) return cufile_error(CU_FILE_INVALID_VALUE);
    if (!standin_has_context()) return cufile_error(CU_FILE_CUDA_DRIVER_ERROR);
    struct stream_io *made = malloc(sizeof *made);
    *made = io;
    made->work.run = do_stream_io;
    return cufile_error(standin_enqueue(stream, &made->work) ? CU_FILE_INVALID_VALUE : CU_FILE_SUCCESS);
}

EXPORT CUfileError_t cuFileReadAsync(CUfileHandle_t file, void *base, size_t *bytes, off_t *file_offset, off_t *buffer_offset, ssize_t *result,
                                     CUstream stream) {
    static struct standin_entry entry = {.name = "cuFileReadAsync"};
    return enqueue((struct stream_io){{0}, false, file, base, bytes, file_offset, buffer_offset, result, standin_enter(&entry)}, stream);
}

EXPORT CUfileError_t cuFileWriteAsync(CUfileHandle_t file, void *base, size_t *bytes, off_t *file_offset, off_t *buffer_offset, ssize_t *result,
                                      CUstream stream) {
    static struct standin_entry entry = {.name = "cuFileWriteAsync"};
    return enqueue((struct stream_io){{0}, true, file, base, bytes, file_offset, buffer_offset, result, standin_enter(&entry)}, stream);
}

EXPORT CUfileError_t cuFileStreamRegister(CUstream stream, unsigned flags) { ENTER_CUFILE(cuFileStreamRegister); (void)stream, (void)flags; return DONE; }
EXPORT CUfileError_t cuFileStreamDeregister(CUstream stream) { ENTER_CUFILE(cuFileStreamDeregister); (void)stream; return DONE; }

/* Copies and fills: checked when they are called, done when their turn comes in the stream, counted by direction when they are done. */
#define _GNU_SOURCE
#include "standin.h"
#include <stdlib.h>
#include <string.h>

static const size_t MAX_PITCH = 0x7fffffff, LONG_HOST_COPY = 256 << 10;

struct side { /* rows of one operand */
    CUdeviceptr address;
    size_t pitch;
    struct standin_place place;
};

struct copy {
    struct standin_work work;
    struct copy_piece {
        char *target, *source;
        size_t width, height, target_pitch, source_pitch;
        enum standin_counter copies, bytes;
        char *snapshot; /* of a source that may change as soon as the call has returned */
    } *pieces;
    size_t count;
};

static void release_copy(struct standin_work *work) {
    struct copy *copy = (struct copy *)work;
    for (size_t i = 0; i < copy->count; i++) free(copy->pieces[i].snapshot);
    free(copy->pieces);
    free(copy);
}

static void do_piece(struct copy_piece *piece) {
    for (size_t row = 0; row < piece->height; row++)
        memmove(piece->target + row * piece->target_pitch, piece->source + row * piece->source_pitch, piece->width);
    standin_count(piece->copies, 1), standin_count(piece->bytes, (int64_t)(piece->width * piece->height));
}

/* Of payloads, as opposed to headers and numbers: what a path past the host does not have. */
static size_t host_bytes(const struct copy *copy) {
    size_t total = 0;
    for (size_t i = 0; i < copy->count; i++)
        if (copy->pieces[i].copies == COUNT_host_to_device_copies || copy->pieces[i].copies == COUNT_device_to_host_copies)
            total += copy->pieces[i].width * copy->pieces[i].height;
    return total;
}

/* The pieces of a batch have no order among themselves: the last one first shows who relies on one. */
static void do_copy(struct standin_work *work) {
    struct copy *copy = (struct copy *)work;
    static struct standin_entry entry = {.name = "copy"};
    static struct standin_entry host_entry = {.name = "long host copy"};
    int code = standin_enter(&entry).code;
    if (!code && host_bytes(copy) >= LONG_HOST_COPY) code = standin_enter(&host_entry).code;
    if (code) standin_fail_context(work, code);
    for (size_t i = copy->count; i-- && !work->context->sticky;) do_piece(&copy->pieces[i]);
}

static struct copy *make_copy(size_t count) {
    struct copy *copy = calloc(1, sizeof *copy);
    copy->pieces = calloc(count, sizeof *copy->pieces), copy->count = count;
    copy->work.run = do_copy, copy->work.release = release_copy;
    return copy;
}

static bool place_side(struct side *side, size_t width, size_t height) {
    size_t span = height ? (height - 1) * side->pitch + width : 0;
    return (height < 2 || side->pitch >= width) && side->pitch <= (height < 2 ? SIZE_MAX : MAX_PITCH) && standin_find(side->address, span, &side->place);
}

static void direct(struct copy_piece *piece, bool to_device, bool from_device) {
    static const enum standin_counter counters[2][2][2] = {
        {{COUNT_host_to_host_copies, COUNT_host_to_host_bytes}, {COUNT_device_to_host_copies, COUNT_device_to_host_bytes}},
        {{COUNT_host_to_device_copies, COUNT_host_to_device_bytes}, {COUNT_device_to_device_copies, COUNT_device_to_device_bytes}},
    };
    piece->copies = counters[to_device][from_device][0], piece->bytes = counters[to_device][from_device][1];
}

static void take_snapshot(struct copy_piece *piece) {
    piece->snapshot = malloc(piece->width * piece->height);
    for (size_t row = 0; row < piece->height; row++) memcpy(piece->snapshot + row * piece->width, piece->source + row * piece->source_pitch, piece->width);
    piece->source = piece->snapshot, piece->source_pitch = piece->width;
}

enum wait { FOR_PAGEABLE_TARGET, UNLESS_ON_DEVICE };

/* Pageable host memory is read before the call returns, and written before it returns; page-locked memory when the stream comes to it. */
static CUresult copy_rows(struct side target, struct side source, size_t width, size_t height, CUstream stream, enum wait wait) {
    if (!width || !height) return CUDA_SUCCESS;
    if (!place_side(&target, width, height) || !place_side(&source, width, height)) return CUDA_ERROR_INVALID_VALUE;
    struct copy *copy = make_copy(1);
    copy->pieces[0] = (struct copy_piece){target.place.host, source.place.host, width, height, target.pitch, source.pitch, 0, 0, 0};
    direct(&copy->pieces[0], target.place.on_device, source.place.on_device);
    if (target.place.kind == NOWHERE || source.place.kind == NOWHERE) standin_count(COUNT_pageable_copies, 1);
    if (source.place.kind == NOWHERE && target.place.on_device) take_snapshot(&copy->pieces[0]);
    CUresult result = standin_enqueue(stream, &copy->work);
    bool within_device = target.place.on_device && source.place.on_device, within_host = !target.place.on_device && !source.place.on_device;
    bool must_wait = wait == UNLESS_ON_DEVICE ? !within_device : within_host || target.place.kind == NOWHERE;
    return result || !must_wait ? result : standin_stream_wait(stream);
}

static CUresult copy_bytes(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream, enum wait wait) {
    return copy_rows((struct side){.address = target, .pitch = bytes}, (struct side){.address = source, .pitch = bytes}, bytes, 1, stream, wait);
}

static bool is_device(CUdeviceptr address) {
    struct standin_place place;
    return standin_find(address, 1, &place) && place.on_device;
}

EXPORT CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t bytes) {
    ENTER(cuMemcpy, CONTEXT);
    return copy_bytes(target, source, bytes, 0, UNLESS_ON_DEVICE);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyAsync, CONTEXT);
    return copy_bytes(target, source, bytes, stream, FOR_PAGEABLE_TARGET);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t bytes) {
    ENTER(cuMemcpyHtoD, CONTEXT);
    return bytes && !is_device(target) ? CUDA_ERROR_INVALID_VALUE : copy_bytes(target, (CUdeviceptr)source, bytes, 0, UNLESS_ON_DEVICE);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyHtoDAsync, CONTEXT);
    return bytes && !is_device(target) ? CUDA_ERROR_INVALID_VALUE : copy_bytes(target, (CUdeviceptr)source, bytes, stream, FOR_PAGEABLE_TARGET);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t bytes) {
    ENTER(cuMemcpyDtoH, CONTEXT);
    return bytes && !is_device(source) ? CUDA_ERROR_INVALID_VALUE : copy_bytes((CUdeviceptr)target, source, bytes, 0, UNLESS_ON_DEVICE);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyDtoHAsync, CONTEXT);
    return bytes && !is_device(source) ? CUDA_ERROR_INVALID_VALUE : copy_bytes((CUdeviceptr)target, source, bytes, stream, FOR_PAGEABLE_TARGET);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes) {
    ENTER(cuMemcpyDtoD, CONTEXT);
    return bytes && (!is_device(target) || !is_device(source)) ? CUDA_ERROR_INVALID_VALUE : copy_bytes(target, source, bytes, 0, UNLESS_ON_DEVICE);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
    ENTER(cuMemcpyDtoDAsync, CONTEXT);
    return bytes && (!is_device(target) || !is_device(source)) ? CUDA_ERROR_INVALID_VALUE : copy_bytes(target, source, bytes, stream, FOR_PAGEABLE_TARGET);
}

/* ---- rows ---- */

static CUresult side_of(int type, const void *host, CUdeviceptr device, size_t x, size_t y, size_t pitch, size_t width, struct side *side) {
    if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED)
        return type == CU_MEMORYTYPE_ARRAY ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    if (!pitch) pitch = width + x;
    if (pitch < width + x) return CUDA_ERROR_INVALID_VALUE;
    *side = (struct side){.address = (type == CU_MEMORYTYPE_HOST ? (CUdeviceptr)host : device) + y * pitch + x, .pitch = pitch};
    return type == CU_MEMORYTYPE_UNIFIED || is_device(side->address) == (type == CU_MEMORYTYPE_DEVICE) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c, CUstream stream, enum wait wait) {
    struct side target, source;
    CUresult refused = side_of(c->dstMemoryType, c->dstHost, c->dstDevice, c->dstXInBytes, c->dstY, c->dstPitch, c->WidthInBytes, &target);
    if (!refused) refused = side_of(c->srcMemoryType, c->srcHost, c->srcDevice, c->srcXInBytes, c->srcY, c->srcPitch, c->WidthInBytes, &source);
    return refused ? refused : copy_rows(target, source, c->WidthInBytes, c->Height, stream, wait);
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream) {
    ENTER(cuMemcpy2DAsync, CONTEXT);
    return copy ? copy_2d(copy, stream, FOR_PAGEABLE_TARGET) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *copy) {
    ENTER(cuMemcpy2D, CONTEXT);
    return copy ? copy_2d(copy, 0, UNLESS_ON_DEVICE) : CUDA_ERROR_INVALID_VALUE;
}

/* ---- batches ---- */

static CUresult copy_batch(const CUdeviceptr *targets, const CUdeviceptr *sources, const size_t *sizes, size_t count, const CUmemcpyAttributes *attributes,
                           const size_t *starts, size_t attribute_count, size_t *failed, CUstream stream) {
    *failed = SIZE_MAX;
    if (!stream || stream == (CUstream)1 || !count || !attribute_count || attribute_count > count || starts[0]) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < attribute_count; i++) {
        int order = attributes[i].srcAccessOrder;
        if ((i && starts[i] <= starts[i - 1]) || starts[i] >= count || order < 1 || order > 3 || attributes[i].flags & ~1u) return CUDA_ERROR_INVALID_VALUE;
    }
    struct copy *copy = make_copy(count);
    bool wait = false;
    for (size_t i = 0, group = 0; i < count; i++) {
        if (group + 1 < attribute_count && i == starts[group + 1]) group++;
        struct standin_place target, source;
        if (!sizes[i] || !standin_find(targets[i], sizes[i], &target) || !standin_find(sources[i], sizes[i], &source)) {
            release_copy(&copy->work);
            *failed = i;
            return CUDA_ERROR_INVALID_VALUE;
        }
        copy->pieces[i] = (struct copy_piece){target.host, source.host, sizes[i], 1, 0, 0, 0, 0, 0};
        direct(&copy->pieces[i], target.on_device, source.on_device);
        if (target.kind == NOWHERE || source.kind == NOWHERE) standin_count(COUNT_pageable_copies, 1);
        /* Any other order than the stream's lets the driver read the source right now; that it does so shows who needed the stream's. */
        if (attributes[group].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || source.kind == NOWHERE) take_snapshot(&copy->pieces[i]);
        wait |= target.kind == NOWHERE;
    }
    CUresult result = standin_enqueue(stream, &copy->work);
    standin_count(COUNT_batches, 1);
    return result || !wait ? result : standin_stream_wait(stream);
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count, CUmemcpyAttributes *attributes, size_t *starts,
                                   size_t attribute_count, size_t *failed, CUstream stream) {
    ENTER(cuMemcpyBatchAsync, CONTEXT);
    size_t ignored;
    return copy_batch(targets, sources, sizes, count, attributes, starts, attribute_count, failed ? failed : &ignored, stream);
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count, CUmemcpyAttributes *attributes, size_t *starts,
                                      size_t attribute_count, CUstream stream) {
    ENTER(cuMemcpyBatchAsync, CONTEXT);
    size_t failed;
    return copy_batch(targets, sources, sizes, count, attributes, starts, attribute_count, &failed, stream);
}

/* ---- fills ---- */

struct fill {
    struct standin_work work;
    char *target;
    uint32_t value;
    size_t unit, count;
};

static void do_fill(struct standin_work *work) {
    struct fill *fill = (struct fill *)work;
    for (size_t i = 0; i < fill->count; i++) memcpy(fill->target + i * fill->unit, &fill->value, fill->unit); /* little-endian: the low bytes */
}

static CUresult enqueue_fill(CUdeviceptr target, uint32_t value, size_t unit, size_t count, CUstream stream) {
    struct standin_place place;
    if (!count) return CUDA_SUCCESS;
    if (target % unit || !standin_find(target, unit * count, &place) || place.kind == NOWHERE) return CUDA_ERROR_INVALID_VALUE;
    struct fill *fill = calloc(1, sizeof *fill);
    fill->work.run = do_fill, fill->target = place.host, fill->value = value, fill->unit = unit, fill->count = count;
    return standin_enqueue(stream, &fill->work);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, CUstream stream) {
    ENTER(cuMemsetD8Async, CONTEXT);
    return enqueue_fill(target, value, 1, count, stream);
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t count) {
    ENTER(cuMemsetD8, CONTEXT);
    return enqueue_fill(target, value, 1, count, 0);
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, CUstream stream) {
    ENTER(cuMemsetD32Async, CONTEXT);
    return enqueue_fill(target, value, 4, count, stream);
}

EXPORT CUresult cuMemsetD32_v2(CUdeviceptr target, unsigned value, size_t count) {
    ENTER(cuMemsetD32, CONTEXT);
    return enqueue_fill(target, value, 4, count, 0);
}

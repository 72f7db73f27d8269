/* libcufile.so.0: the driver, files, buffers and transfers.
 *
 * As cuFile does, it finds a registered buffer by its base pointer alone, and says through its statistics which way the bytes went. Modes: nvidia-fs and
 * PCI P2PDMA move bytes between file and "device" memory with no copy; compatibility mode bounces them through host memory. */
#define _GNU_SOURCE
#include "cufile_parts.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SECTOR = 4096, BUFFERS = 4096, FILES = 4096, BOOLEANS = CUFILE_PARAM_GDS_FALLBACK_IO + 1, HOST = -1 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int open_count;
static bool booleans[BOOLEANS] = {[CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE] = true};
static struct buffer {
    const char *base;
    size_t bytes;
    int device;
} buffers[BUFFERS];
static struct file {
    bool used;
    int fd;
} files[FILES];

/* ---- driver ---- */

bool cufile_is_open(void) { return open_count > 0; }

enum standin_cufile_mode cufile_mode(void) {
    return booleans[CUFILE_PARAM_FORCE_COMPAT_MODE] ? STANDIN_COMPAT : (enum standin_cufile_mode)standin_block()->cufile_mode;
}

static bool configuration_forbids_compat(void) {
    const char *path = getenv("CUFILE_ENV_PATH_JSON");
    FILE *file = path ? fopen(path, "r") : 0;
    if (!file) return false;
    static char text[1 << 16];
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    char *key = strstr(text, "\"allow_compat_mode\""), *colon = key ? strchr(key, ':') : 0;
    return colon && !strncmp(colon + 1 + strspn(colon + 1, " \t\n"), "false", 5);
}

static CUfileError_t open_driver(void) {
    ENTER_CUFILE(cuFileDriverOpen);
    pthread_mutex_lock(&lock);
    if (!open_count && configuration_forbids_compat()) booleans[CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE] = false;
    bool refused = cufile_mode() == STANDIN_COMPAT && !booleans[CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE];
    if (!refused) open_count++;
    pthread_mutex_unlock(&lock);
    return cufile_error(refused ? CU_FILE_DRIVER_NOT_INITIALIZED : CU_FILE_SUCCESS);
}

EXPORT CUfileError_t cuFileDriverOpen(void) { return open_driver(); }

EXPORT CUfileError_t cuFileDriverClose_v2(void) {
    ENTER_CUFILE(cuFileDriverClose);
    pthread_mutex_lock(&lock);
    bool was_open = open_count > 0;
    open_count -= was_open;
    pthread_mutex_unlock(&lock);
    return cufile_error(was_open ? CU_FILE_SUCCESS : CU_FILE_DRIVER_NOT_INITIALIZED);
}
EXPORT CUfileError_t cuFileDriverClose(void) { return cuFileDriverClose_v2(); }

EXPORT long cuFileUseCount(void) { return open_count; }

EXPORT CUfileError_t cuFileGetVersion(int *version) {
    ENTER_CUFILE(cuFileGetVersion);
    *version = 1200;
    return DONE;
}

EXPORT CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *properties) {
    ENTER_CUFILE(cuFileDriverGetProperties);
    memset(properties, 0, sizeof *properties);
    enum standin_cufile_mode mode = cufile_mode();
    if (mode == STANDIN_NVFS) {
        properties->nvfs.major_version = 2, properties->nvfs.minor_version = 28;
        properties->nvfs.dstatusflags = 1u << CU_FILE_NVME_SUPPORTED | 1u << CU_FILE_NVMEOF_SUPPORTED;
    }
    if (mode == STANDIN_P2P) properties->nvfs.dstatusflags = 1u << CU_FILE_NVME_SUPPORTED | 1u << CU_FILE_NVME_P2P_SUPPORTED;
    if (booleans[CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE]) properties->nvfs.dcontrolflags = 1u << CU_FILE_ALLOW_COMPAT_MODE;
    properties->nvfs.poll_thresh_size = 4, properties->nvfs.max_direct_io_size = 16384;
    properties->fflags = 1u << CU_FILE_BATCH_IO_SUPPORTED | 1u << CU_FILE_STREAMS_SUPPORTED | (mode == STANDIN_P2P ? 1u << CU_FILE_P2P_SUPPORTED : 0);
    properties->max_device_cache_size = 131072, properties->per_buffer_cache_size = 1024, properties->max_device_pinned_mem_size = 33554432;
    properties->max_batch_io_size = 128, properties->max_batch_io_timeout_msecs = 0;
    return DONE;
}

EXPORT CUfileError_t cuFileDriverGetP2PFlags(int target, int *flags) {
    ENTER_CUFILE(cuFileDriverGetP2PFlags);
    if (!open_count && open_driver().err) return cufile_error(CU_FILE_DRIVER_NOT_INITIALIZED);
    if (!flags || target < 0 || target >= CU_FILE_MAX_TARGET_TYPES) return cufile_error(CU_FILE_INVALID_VALUE);
    enum standin_cufile_mode mode = cufile_mode();
    bool nvme = target == CU_FILE_NVME_SUPPORTED, over_fabrics = target == CU_FILE_NVMEOF_SUPPORTED; /* P2PDMA does not reach NVMe-oF */
    *flags = mode == STANDIN_NVFS && (nvme || over_fabrics) ? 1 << CUFILE_NVFS : mode == STANDIN_P2P && nvme ? 1 << CUFILE_P2PDMA : 0;
    return DONE;
}

EXPORT CUfileError_t cuFileGetBARSizeInKB(int index, size_t *kilobytes) {
    ENTER_CUFILE(cuFileGetBARSizeInKB);
    if (!open_count) return cufile_error(CU_FILE_DRIVER_NOT_INITIALIZED);
    if (!kilobytes || index < 0 || index >= standin_device_count()) return cufile_error(CU_FILE_INVALID_VALUE);
    uint64_t limit = standin_block()->bar_bytes_max;
    *kilobytes = (limit ? limit : standin_block()->device_bytes_max) / 1024;
    return DONE;
}

EXPORT CUfileError_t cuFileSetParameterBool(int parameter, bool value) {
    ENTER_CUFILE(cuFileSetParameterBool);
    if (parameter < 0 || parameter >= BOOLEANS) return cufile_error(CU_FILE_INVALID_VALUE);
    booleans[parameter] = value;
    return DONE;
}

EXPORT CUfileError_t cuFileGetParameterBool(int parameter, bool *value) {
    ENTER_CUFILE(cuFileGetParameterBool);
    if (parameter < 0 || parameter >= BOOLEANS || !value) return cufile_error(CU_FILE_INVALID_VALUE);
    *value = booleans[parameter];
    return DONE;
}

/* Tuning that has no meaning here: accepted. */
EXPORT CUfileError_t cuFileDriverSetPollMode(bool poll, size_t threshold) { ENTER_CUFILE(cuFileDriverSetPollMode); (void)poll, (void)threshold; return DONE; }
EXPORT CUfileError_t cuFileDriverSetMaxDirectIOSize(size_t kilobytes) { ENTER_CUFILE(cuFileDriverSetMaxDirectIOSize); (void)kilobytes; return DONE; }
EXPORT CUfileError_t cuFileDriverSetMaxCacheSize(size_t kilobytes) { ENTER_CUFILE(cuFileDriverSetMaxCacheSize); (void)kilobytes; return DONE; }
EXPORT CUfileError_t cuFileDriverSetMaxPinnedMemSize(size_t kilobytes) { ENTER_CUFILE(cuFileDriverSetMaxPinnedMemSize); (void)kilobytes; return DONE; }

/* ---- files ---- */

static int register_file(CUfileHandle_t *handle, const CUfileDescr_t *description) {
    if (!open_count && open_driver().err) return CU_FILE_DRIVER_NOT_INITIALIZED;
    if (!handle || !description) return CU_FILE_INVALID_VALUE;
    if (description->type != CU_FILE_HANDLE_TYPE_OPAQUE_FD) return CU_FILE_IO_NOT_SUPPORTED;
    if (fcntl(description->handle.fd, F_GETFD) < 0) return CU_FILE_INVALID_VALUE;
    int result = CU_FILE_SUCCESS, slot = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < FILES; i++) {
        if (files[i].used && files[i].fd == description->handle.fd) result = CU_FILE_HANDLE_ALREADY_REGISTERED;
        if (!files[i].used && slot < 0) slot = i;
    }
    if (slot < 0) abort(); /* FILES is too small for this test */
    if (!result) files[slot] = (struct file){true, description->handle.fd}, *handle = &files[slot], standin_count(COUNT_cufile_handles_now, 1);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUfileError_t cuFileHandleRegister(CUfileHandle_t *handle, CUfileDescr_t *description) {
    ENTER_CUFILE(cuFileHandleRegister);
    int result = register_file(handle, description);
    cufile_note_handle(true, !result);
    return cufile_error(result);
}

EXPORT void cuFileHandleDeregister(CUfileHandle_t handle) {
    static struct standin_entry entry = {.name = "cuFileHandleDeregister"};
    standin_enter(&entry);
    struct file *file = handle;
    pthread_mutex_lock(&lock);
    bool was_used = file && file->used;
    if (was_used) file->used = false, standin_count(COUNT_cufile_handles_now, -1);
    pthread_mutex_unlock(&lock);
    cufile_note_handle(false, was_used);
}

/* ---- buffers ---- */

static int register_buffer(const char *base, size_t bytes, int *device) {
    struct standin_place place;
    if (!open_count && open_driver().err) return CU_FILE_DRIVER_NOT_INITIALIZED;
    if (!base || !bytes) return CU_FILE_INVALID_VALUE;
    if (!standin_find((CUdeviceptr)base, bytes, &place)) return CU_FILE_CUDA_POINTER_RANGE_ERROR;
    if (!standin_has_context()) return CU_FILE_CUDA_DRIVER_ERROR;
    if (place.kind == MANAGED) return CU_FILE_CUDA_MEMORY_TYPE_INVALID;
    *device = place.on_device ? place.device : HOST;
    int slot = -1, result = CU_FILE_SUCCESS;
    size_t pinned = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUFFERS; i++) {
        if (buffers[i].base == base) result = CU_FILE_MEMORY_ALREADY_REGISTERED;
        if (buffers[i].base && buffers[i].device == *device) pinned += buffers[i].bytes;
        if (!buffers[i].base && slot < 0) slot = i;
    }
    uint64_t max = standin_block()->bar_bytes_max;
    if (!result && max && *device != HOST && pinned + bytes > max) result = CU_FILE_GPU_MEMORY_PINNING_FAILED;
    if (slot < 0) abort(); /* BUFFERS is too small for this test */
    if (!result) {
        buffers[slot] = (struct buffer){base, bytes, *device};
        standin_count(COUNT_cufile_buffers_now, 1), standin_count(COUNT_cufile_buffer_bytes_now, (int64_t)bytes);
        standin_registered((CUdeviceptr)base, 1);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT CUfileError_t cuFileBufRegister(const void *base, size_t bytes, int flags) {
    ENTER_CUFILE(cuFileBufRegister);
    (void)flags;
    int device = HOST, result = register_buffer(base, bytes, &device);
    cufile_note_buffer(true, !result, device, bytes);
    return (CUfileError_t){(enum CUfileOpError)result, result == CU_FILE_CUDA_DRIVER_ERROR ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS};
}

EXPORT CUfileError_t cuFileBufDeregister(const void *base) {
    ENTER_CUFILE(cuFileBufDeregister);
    struct buffer found = {.device = HOST};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUFFERS && base; i++) {
        if (buffers[i].base != base) continue;
        found = buffers[i], buffers[i].base = 0;
        standin_count(COUNT_cufile_buffers_now, -1), standin_count(COUNT_cufile_buffer_bytes_now, -(int64_t)found.bytes);
        standin_registered((CUdeviceptr)base, -1);
        break;
    }
    pthread_mutex_unlock(&lock);
    cufile_note_buffer(false, found.base != 0, found.device, found.bytes);
    return cufile_error(found.base ? CU_FILE_SUCCESS : CU_FILE_MEMORY_NOT_REGISTERED);
}

static bool is_registered(const char *base, size_t end) {
    bool hit = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BUFFERS && !hit; i++) hit = buffers[i].base == base && end <= buffers[i].bytes;
    pthread_mutex_unlock(&lock);
    return hit;
}

/* ---- transfers ---- */

/* All bytes, or up to the end of the file; -1 with errno. */
static ssize_t move(bool write, int fd, char *memory, size_t bytes, off_t offset) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t got = write ? pwrite(fd, memory + done, bytes - done, offset + (off_t)done) : pread(fd, memory + done, bytes - done, offset + (off_t)done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (!got) break;
        done += (size_t)got;
        if (got % SECTOR) break; /* the end of the file: O_DIRECT can't go on from here */
    }
    return (ssize_t)done;
}

/* Through a buffer of whole sectors: what lies around the bytes is read first and written back, and the file grows by no more than was asked. */
static ssize_t move_through_sectors(bool write, int fd, char *memory, size_t bytes, off_t offset) {
    off_t first = offset & ~(off_t)(SECTOR - 1), end = (offset + (off_t)bytes + SECTOR - 1) & ~(off_t)(SECTOR - 1);
    size_t window = (size_t)(end - first), before = (size_t)(offset - first);
    void *sectors;
    struct stat status;
    if (posix_memalign(&sectors, SECTOR, window)) return errno = ENOMEM, -1;
    memset(sectors, 0, window);
    ssize_t result = move(false, fd, sectors, window, first);
    if (write && result >= 0 && !fstat(fd, &status)) {
        memcpy((char *)sectors + before, memory, bytes);
        result = move(true, fd, sectors, window, first);
        off_t wanted = offset + (off_t)bytes > status.st_size ? offset + (off_t)bytes : status.st_size;
        if (result >= 0 && S_ISREG(status.st_mode) && end > wanted && ftruncate(fd, wanted)) result = -1;
        if (result >= 0) result = (ssize_t)bytes;
    } else if (result >= 0) {
        size_t there = (size_t)result > before ? (size_t)result - before : 0;
        result = (ssize_t)(there < bytes ? there : bytes);
        memcpy(memory, (char *)sectors + before, (size_t)result);
    }
    free(sectors);
    return result;
}

/* Compatibility mode: file to host memory, host memory to the device, or the other way. */
static ssize_t move_through_host(bool write, int fd, char *memory, size_t bytes, off_t offset) {
    void *host;
    size_t room = (bytes + SECTOR - 1) & ~(size_t)(SECTOR - 1);
    if (posix_memalign(&host, SECTOR, room)) return errno = ENOMEM, -1;
    bool aligned = !((bytes | (size_t)offset) % SECTOR);
    if (write) memcpy(host, memory, bytes);
    ssize_t result = (aligned ? move : move_through_sectors)(write, fd, host, bytes, offset);
    if (!write && result > 0) memcpy(memory, host, (size_t)result);
    standin_count(COUNT_cufile_host_copies, 1), standin_count(COUNT_cufile_host_copy_bytes, result > 0 ? result : 0);
    free(host);
    return result;
}

/* cuFile 1.20 answers -1 to arguments that it does not take, and leaves its own code in errno. */
static ssize_t refuse(int code) { return errno = code, -1; }

static ssize_t transfer(bool write, struct file *file, char *base, size_t bytes, off_t file_offset, off_t buffer_offset, struct cufile_outcome *outcome) {
    struct standin_place place;
    if (!file || !file->used || !base) return refuse(EINVAL);
    if (file_offset < 0 || buffer_offset < 0) return refuse(CU_FILE_INVALID_VALUE);
    if (!standin_find((CUdeviceptr)base + (CUdeviceptr)buffer_offset, bytes, &place)) return refuse(CU_FILE_CUDA_POINTER_RANGE_ERROR);
    if (place.kind == MANAGED) return refuse(CU_FILE_CUDA_MEMORY_TYPE_INVALID);
    if (place.on_device && !standin_has_context()) return refuse(CU_FILE_CUDA_DRIVER_ERROR);
    outcome->device = place.on_device ? place.device : HOST;
    outcome->unaligned = ((size_t)file_offset | bytes | (size_t)place.host) % SECTOR != 0;
    if (!place.on_device) {
        outcome->path = STANDIN_COMPAT;
        standin_count(COUNT_cufile_host_buffers, 1);
        return (outcome->unaligned ? move_through_sectors : move)(write, file->fd, place.host, bytes, file_offset);
    }
    bool registered = is_registered(base, (size_t)buffer_offset + bytes);
    standin_count(registered ? COUNT_cufile_registered : COUNT_cufile_bounced, 1);
    if (outcome->unaligned) standin_count(COUNT_cufile_unaligned, 1);
    if (outcome->path == STANDIN_COMPAT) return move_through_host(write, file->fd, place.host, bytes, file_offset);
    return (outcome->unaligned ? move_through_sectors : move)(write, file->fd, place.host, bytes, file_offset);
}

ssize_t cufile_transfer(bool write, CUfileHandle_t file, void *base, size_t bytes, off_t file_offset, off_t buffer_offset, struct standin_verdict verdict) {
    struct cufile_outcome outcome = {.write = write, .device = HOST, .path = cufile_mode()};
    standin_count(COUNT_cufile_calls_now, 1);
    if (verdict.bytes_max >= 0 && (size_t)verdict.bytes_max < bytes) bytes = (size_t)verdict.bytes_max;
    if (verdict.code) { /* below 5000 it is an errno */
        errno = verdict.code;
        outcome.result = verdict.code < 5000 ? -1 : -verdict.code;
        struct standin_place place;
        if (standin_find((CUdeviceptr)base, 1, &place) && place.on_device) outcome.device = place.device;
    } else {
        outcome.result = transfer(write, file, base, bytes, file_offset, buffer_offset, &outcome);
    }
    int error = errno;
    standin_count(write ? COUNT_cufile_writes : COUNT_cufile_reads, 1);
    if (outcome.result > 0) standin_count(write ? COUNT_cufile_write_bytes : COUNT_cufile_read_bytes, outcome.result);
    standin_count(COUNT_cufile_calls_now, -1);
    cufile_note_transfer(outcome);
    errno = error;
    return outcome.result;
}

EXPORT ssize_t cuFileRead(CUfileHandle_t file, void *base, size_t bytes, off_t file_offset, off_t buffer_offset) {
    static struct standin_entry entry = {.name = "cuFileRead"};
    return cufile_transfer(false, file, base, bytes, file_offset, buffer_offset, standin_enter(&entry));
}

EXPORT ssize_t cuFileWrite(CUfileHandle_t file, const void *base, size_t bytes, off_t file_offset, off_t buffer_offset) {
    static struct standin_entry entry = {.name = "cuFileWrite"};
    return cufile_transfer(true, file, (void *)base, bytes, file_offset, buffer_offset, standin_enter(&entry));
}

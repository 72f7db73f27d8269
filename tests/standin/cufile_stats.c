/* cuFile's statistics: which way the bytes of each GPU really went. They count from cuFileStatsStart to cuFileStatsStop. */
#include "cufile_parts.h"
#include <pthread.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUfileStatsLevel3_t stats;
static int level;
static bool running;

static void tally(CUfileOpCounter_t *counter, bool ok) { *(ok ? &counter->ok : &counter->err) += 1; }

void cufile_note_handle(bool registered, bool ok) {
    pthread_mutex_lock(&lock);
    if (running) tally(registered ? &stats.detailed.basic.hdl_register_ops : &stats.detailed.basic.hdl_deregister_ops, ok);
    pthread_mutex_unlock(&lock);
}

void cufile_note_buffer(bool registered, bool ok, int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    if (running) tally(registered ? &stats.detailed.basic.buf_register_ops : &stats.detailed.basic.buf_deregister_ops, ok);
    if (running && device >= 0 && (registered || ok)) {
        CUfilePerGpuStats_t *gpu = &stats.per_gpu_stats[device];
        if (registered) gpu->n_mmap++, *(ok ? &gpu->n_mmap_ok : &gpu->n_mmap_err) += 1, gpu->reg_bytes += ok ? bytes : 0;
        else gpu->n_mmap_free++, gpu->reg_bytes -= bytes < gpu->reg_bytes ? bytes : gpu->reg_bytes;
    }
    pthread_mutex_unlock(&lock);
}

static int size_class(size_t bytes) { /* by powers of two of KiB */
    int class = 0;
    while (bytes >> (11 + class) && class < 31) class++;
    return class;
}

void cufile_note_transfer(struct cufile_outcome outcome) {
    bool ok = outcome.result >= 0, write = outcome.write;
    uint64_t bytes = ok ? (uint64_t)outcome.result : 0;
    pthread_mutex_lock(&lock);
    if (running) {
        CUfileStatsLevel1_t *basic = &stats.detailed.basic;
        tally(write ? &basic->write_ops : &basic->read_ops, ok);
        *(write ? &basic->write_bytes : &basic->read_bytes) += bytes;
        if (ok) (write ? stats.detailed.write_size_kb_hist : stats.detailed.read_size_kb_hist)[size_class(bytes)]++;
        if (outcome.device >= 0) {
            CUfilePerGpuStats_t *gpu = &stats.per_gpu_stats[outcome.device];
            *(write ? &gpu->n_total_writes : &gpu->n_total_reads) += 1;
            *(write ? &gpu->writes_bytes : &gpu->read_bytes) += bytes;
            if (!ok) *(write ? &gpu->n_writes_err : &gpu->n_reads_err) += 1;
            else if (outcome.path == STANDIN_NVFS) *(write ? &gpu->n_nvfs_writes : &gpu->n_nvfs_reads) += 1;
            else if (outcome.path == STANDIN_P2P) *(write ? &gpu->n_p2p_writes : &gpu->n_p2p_reads) += 1;
            else *(write ? &gpu->n_posix_writes : &gpu->n_posix_reads) += 1;
            if (ok && outcome.unaligned) *(write ? &gpu->n_unaligned_writes : &gpu->n_unaligned_reads) += 1;
        }
    }
    pthread_mutex_unlock(&lock);
}

EXPORT CUfileError_t cuFileSetStatsLevel(int wanted) {
    ENTER_CUFILE(cuFileSetStatsLevel);
    if (wanted < 0 || wanted > 3) return cufile_error(CU_FILE_INVALID_VALUE);
    level = wanted;
    return DONE;
}

EXPORT CUfileError_t cuFileGetStatsLevel(int *out) {
    ENTER_CUFILE(cuFileGetStatsLevel);
    if (!out) return cufile_error(CU_FILE_INVALID_VALUE);
    *out = level;
    return DONE;
}

static CUfileError_t run(bool wanted) {
    if (!cufile_is_open()) return cufile_error(CU_FILE_DRIVER_NOT_INITIALIZED);
    if (!level) return cufile_error(CU_FILE_INTERNAL_ERROR);
    pthread_mutex_lock(&lock);
    running = wanted;
    pthread_mutex_unlock(&lock);
    return DONE;
}

EXPORT CUfileError_t cuFileStatsStart(void) { ENTER_CUFILE(cuFileStatsStart); return run(true); }
EXPORT CUfileError_t cuFileStatsStop(void) { ENTER_CUFILE(cuFileStatsStop); return run(false); }

EXPORT CUfileError_t cuFileStatsReset(void) {
    ENTER_CUFILE(cuFileStatsReset);
    if (!cufile_is_open()) return cufile_error(CU_FILE_DRIVER_NOT_INITIALIZED);
    pthread_mutex_lock(&lock);
    memset(&stats, 0, sizeof stats);
    pthread_mutex_unlock(&lock);
    return DONE;
}

static CUfileError_t copy_out(void *out, size_t bytes, int needed) {
    if (!cufile_is_open()) return cufile_error(CU_FILE_DRIVER_NOT_INITIALIZED);
    if (!out || level < needed) return cufile_error(CU_FILE_INVALID_VALUE);
    pthread_mutex_lock(&lock);
    stats.num_gpus = (uint32_t)standin_device_count();
    for (int i = 0; i < (int)stats.num_gpus; i++) {
        CUuuid uuid;
        standin_uuid(i, &uuid);
        memcpy(stats.per_gpu_stats[i].uuid, &uuid, sizeof uuid);
    }
    memcpy(out, &stats, bytes); /* each level begins with the one below */
    pthread_mutex_unlock(&lock);
    return DONE;
}

EXPORT CUfileError_t cuFileGetStatsL1(CUfileStatsLevel1_t *out) { ENTER_CUFILE(cuFileGetStatsL1); return copy_out(out, sizeof *out, 1); }
EXPORT CUfileError_t cuFileGetStatsL2(CUfileStatsLevel2_t *out) { ENTER_CUFILE(cuFileGetStatsL2); return copy_out(out, sizeof *out, 2); }
EXPORT CUfileError_t cuFileGetStatsL3(CUfileStatsLevel3_t *out) { ENTER_CUFILE(cuFileGetStatsL3); return copy_out(out, sizeof *out, 3); }

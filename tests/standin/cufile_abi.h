/* The part of cuFile's declared ABI (1.20) that the stand-in implements; a test compares it with the real cufile.h where that is installed. */
#pragma once
#include "cuda_abi.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum CUfileOpError {
    CU_FILE_SUCCESS = 0,
    CU_FILE_DRIVER_NOT_INITIALIZED = 5001,
    CU_FILE_IO_NOT_SUPPORTED = 5008,
    CU_FILE_CUDA_DRIVER_ERROR = 5011,
    CU_FILE_CUDA_MEMORY_TYPE_INVALID = 5013,
    CU_FILE_CUDA_POINTER_RANGE_ERROR = 5014,
    CU_FILE_INVALID_VALUE = 5022,
    CU_FILE_MEMORY_ALREADY_REGISTERED = 5023,
    CU_FILE_MEMORY_NOT_REGISTERED = 5024,
    CU_FILE_HANDLE_NOT_REGISTERED = 5027,
    CU_FILE_HANDLE_ALREADY_REGISTERED = 5028,
    CU_FILE_INTERNAL_ERROR = 5030,
    CU_FILE_GPU_MEMORY_PINNING_FAILED = 5036,
    CU_FILE_BATCH_FULL = 5037,
};
enum { CU_FILE_NVME_SUPPORTED = 4, CU_FILE_NVMEOF_SUPPORTED = 5, CU_FILE_NVME_P2P_SUPPORTED = 11, CU_FILE_MAX_TARGET_TYPES = 15 };
enum { CU_FILE_ALLOW_COMPAT_MODE = 1 };
enum { CU_FILE_BATCH_IO_SUPPORTED = 1, CU_FILE_STREAMS_SUPPORTED = 2, CU_FILE_PARALLEL_IO_SUPPORTED = 3, CU_FILE_P2P_SUPPORTED = 4 };
enum { CUFILE_P2PDMA = 0, CUFILE_NVFS = 1 };
enum { CUFILE_READ = 0, CUFILE_WRITE = 1 };
enum { CUFILE_COMPLETE = 0x10, CUFILE_FAILED = 0x40 };
enum { CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE = 1, CUFILE_PARAM_FORCE_COMPAT_MODE = 2, CUFILE_PARAM_GDS_FALLBACK_IO = 13 };
enum { CU_FILE_HANDLE_TYPE_OPAQUE_FD = 1 };

typedef struct CUfileError {
    enum CUfileOpError err;
    CUresult cu_err;
} CUfileError_t;

typedef struct CUfileDrvProps {
    struct {
        unsigned int major_version, minor_version;
        size_t poll_thresh_size, max_direct_io_size;
        unsigned int dstatusflags, dcontrolflags;
    } nvfs;
    unsigned int fflags, max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size, max_batch_io_size, max_batch_io_timeout_msecs;
} CUfileDrvProps_t;

typedef void *CUfileHandle_t;
typedef void *CUfileBatchHandle_t;

typedef struct CUfileDescr_t {
    int type;
    union {
        int fd;
        void *handle;
    } handle;
    const void *fs_ops;
} CUfileDescr_t;

typedef struct CUfileIOParams {
    int mode;
    union {
        struct {
            void *devPtr_base;
            off_t file_offset, devPtr_offset;
            size_t size;
        } batch;
    } u;
    CUfileHandle_t fh;
    int opcode;
    void *cookie;
} CUfileIOParams_t;

typedef struct CUfileIOEvents {
    void *cookie;
    int status;
    size_t ret;
} CUfileIOEvents_t;

typedef struct CUfileOpCounter {
    uint64_t ok, err;
} CUfileOpCounter_t;

typedef struct CUfileStatsLevel1 {
    CUfileOpCounter_t read_ops, write_ops, hdl_register_ops, hdl_deregister_ops, buf_register_ops, buf_deregister_ops;
    uint64_t read_bytes, write_bytes, read_bw_bytes_per_sec, write_bw_bytes_per_sec, read_lat_avg_us, write_lat_avg_us, read_ops_per_sec, write_ops_per_sec;
    uint64_t read_lat_sum_us, write_lat_sum_us;
    CUfileOpCounter_t batch_submit_ops, batch_complete_ops, batch_setup_ops, batch_cancel_ops, batch_destroy_ops, batch_enqueued_ops, batch_posix_enqueued_ops;
    CUfileOpCounter_t batch_processed_ops, batch_posix_processed_ops, batch_nvfs_submit_ops, batch_p2p_submit_ops, batch_aio_submit_ops;
    CUfileOpCounter_t batch_iouring_submit_ops;
    CUfileOpCounter_t batch_mixed_io_submit_ops, batch_total_submit_ops;
    uint64_t batch_read_bytes, batch_write_bytes, batch_read_bw_bytes, batch_write_bw_bytes, batch_submit_lat_avg_us, batch_completion_lat_avg_us;
    uint64_t batch_submit_ops_per_sec, batch_complete_ops_per_sec, batch_submit_lat_sum_us, batch_completion_lat_sum_us, last_batch_read_bytes;
    uint64_t last_batch_write_bytes;
    CUfileOpCounter_t readv_ops, writev_ops;
    uint64_t readv_bytes, writev_bytes, readv_bw_bytes_per_sec, writev_bw_bytes_per_sec, readv_lat_avg_us, writev_lat_avg_us, readv_ops_per_sec;
    uint64_t writev_ops_per_sec, readv_lat_sum_us, writev_lat_sum_us;
} CUfileStatsLevel1_t;

typedef struct CUfileStatsLevel2 {
    CUfileStatsLevel1_t basic;
    uint64_t read_size_kb_hist[32], write_size_kb_hist[32];
} CUfileStatsLevel2_t;

typedef struct CUfilePerGpuStats {
    char uuid[16];
    uint64_t read_bytes, read_bw_bytes_per_sec, read_utilization, read_duration_us, n_total_reads, n_p2p_reads, n_nvfs_reads, n_posix_reads;
    uint64_t n_unaligned_reads, n_dr_reads, n_sparse_regions, n_inline_regions, n_reads_err;
    uint64_t writes_bytes, write_bw_bytes_per_sec, write_utilization, write_duration_us, n_total_writes, n_p2p_writes, n_nvfs_writes, n_posix_writes;
    uint64_t n_unaligned_writes, n_dr_writes, n_writes_err;
    uint64_t n_mmap, n_mmap_ok, n_mmap_err, n_mmap_free, reg_bytes;
} CUfilePerGpuStats_t;

typedef struct CUfileStatsLevel3 {
    CUfileStatsLevel2_t detailed;
    uint32_t num_gpus;
    CUfilePerGpuStats_t per_gpu_stats[16];
} CUfileStatsLevel3_t;

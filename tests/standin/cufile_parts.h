/* What the parts of libcufile.so.0 offer each other. */
#pragma once
#include "cufile_abi.h"
#include "standin.h"

#define DONE ((CUfileError_t){CU_FILE_SUCCESS, 0})

static inline CUfileError_t cufile_error(int code) { return (CUfileError_t){(enum CUfileOpError)code, 0}; }

/* First statement of every call that returns a CUfileError_t: counts it and applies faults. */
#define ENTER_CUFILE(function)                                                                                                                         \
    do {                                                                                                                                               \
        static struct standin_entry entry_ = {.name = #function};                                                                                      \
        int injected_ = standin_enter(&entry_).code;                                                                                                   \
        if (injected_) return cufile_error(injected_);                                                                                                 \
    } while (0)

bool cufile_is_open(void);
enum standin_cufile_mode cufile_mode(void);

/* One transfer as cuFileRead and cuFileWrite make it. Returns bytes, or -1 with errno, or minus a CUfileOpError. */
ssize_t cufile_transfer(bool write, CUfileHandle_t file, void *base, size_t bytes, off_t file_offset, off_t buffer_offset, struct standin_verdict verdict);

struct cufile_outcome { /* of one transfer, for the statistics */
    bool write, unaligned;
    int device; /* -1: host memory */
    enum standin_cufile_mode path;
    ssize_t result;
};
void cufile_note_transfer(struct cufile_outcome outcome);
void cufile_note_handle(bool registered, bool ok);
void cufile_note_buffer(bool registered, bool ok, int device, size_t bytes);

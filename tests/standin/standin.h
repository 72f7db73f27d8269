/* What the parts of the stand-ins offer each other. Everything here is exported by libcuda.so.1, so that libcufile.so.0 uses the same state. */
#pragma once
#include "control.h"
#include "cuda_abi.h"
#include <stdbool.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- control.c ---- */
struct standin_entry {
    const char *name;
    _Atomic(struct standin_function *) function;
};
struct standin_verdict {
    int code;            /* to return instead of working; 0: work */
    int64_t bytes_max;   /* to move at most; -1: all */
};
struct standin_block *standin_block(void);
struct standin_process *standin_process(void);
void standin_count(enum standin_counter counter, int64_t amount);
int64_t standin_counted(enum standin_counter counter);
struct standin_verdict standin_enter(struct standin_entry *entry);
void standin_pause(void); /* a poll interval of everything that waits for another process */

/* ---- device.c ---- */
struct standin_stream;
struct standin_context {
    int device, flags;
    bool primary;
    _Atomic int sticky; /* an error of queued work; every later call of this context returns it, as on a GPU */
    struct standin_stream *legacy;
};
enum standin_need { ANY_TIME, INITIALISED, CONTEXT };
CUresult standin_cuda_enter(struct standin_entry *entry, enum standin_need need);
struct standin_context *standin_current(void);
struct standin_context *standin_primary(int device);
void standin_uuid(int device, CUuuid *uuid);
void standin_uuid_text(int index, char text[48]); /* of a device of the machine, visible or not */
int standin_device_count(void);
bool standin_has_context(void);
void standin_with_context(struct standin_context *context, bool enter); /* makes it current in a stream's thread, and undoes that */
extern __thread bool standin_in_host_function;

/* First statement of every driver call: counts it, refuses it out of turn, applies faults. */
#define ENTER(function, need)                                                                                                                          \
    do {                                                                                                                                               \
        static struct standin_entry entry_ = {.name = #function};                                                                                      \
        CUresult refused_ = standin_cuda_enter(&entry_, need);                                                                                         \
        if (refused_) return refused_;                                                                                                                 \
    } while (0)

/* ---- memory.c ---- */
enum standin_kind { NOWHERE, DEVICE_ALLOCATION, IMPORTED, MAPPED_CHUNK, MANAGED, HOST_ALLOCATION, HOST_REGISTERED };
struct standin_place {
    enum standin_kind kind;
    char *host;     /* where the host can really reach it */
    int device;
    bool on_device; /* on a GPU; false: host memory, page-locked if kind is not NOWHERE */
    CUdeviceptr base;
    size_t bytes;   /* of the whole allocation or chunk */
};
/* Where `bytes` from `address` lie. Memory that no driver call gave out is host memory. False: they run over the end of an allocation, or no access was
 * granted to it. */
bool standin_find(CUdeviceptr address, size_t bytes, struct standin_place *place);
void standin_registered(CUdeviceptr base, int change); /* cuFile registered or deregistered this allocation */
/* A descriptor of another process's file; -1 if that process or that file is gone. */
int standin_open_of(int pid, int fd, uint64_t inode);

/* ---- stream.c ---- */
struct standin_work {
    struct standin_work *next;
    void (*run)(struct standin_work *);
    bool (*ready)(struct standin_work *);    /* null: at once */
    void (*release)(struct standin_work *);  /* null: free() */
    struct standin_context *context;
    struct { struct standin_stream *stream; uint64_t number; } *after;
    int after_count;
    uint64_t number;
};
/* Queues work, which the stream owns from now on, whatever is returned. */
CUresult standin_enqueue(CUstream stream, struct standin_work *work);
CUresult standin_stream_wait(CUstream stream);
void standin_wait_for_all(void); /* of the current context's work, as the calls do that synchronise without being asked: cuMemFree, cuMemHostUnregister, ... */
void standin_fail_context(struct standin_work *work, int code);

/* What of the system has to be otherwise on a node with GPUs, or to fail when a test says so. Works where libcufile.so.0 is preloaded, as environment() does. */
#define _GNU_SOURCE
#include "standin.h"
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>

/* Kernels without modules have no /proc/modules, and our code then refuses cuFile, whose real library would look for the file for ever. So it is there for those
 * who ask whether it is. */
static const char *instead(const char *path) {
    return path && !strcmp(path, "/proc/modules") ? "/proc/version" : path;
}

EXPORT int stat(const char *restrict path, struct stat *restrict found) {
    int (*next)(const char *, struct stat *) = dlsym(RTLD_NEXT, "stat");
    return next(instead(path), found);
}

EXPORT int stat64(const char *restrict path, struct stat64 *restrict found) {
    int (*next)(const char *, struct stat64 *) = dlsym(RTLD_NEXT, "stat64");
    return next(instead(path), found);
}

/* Counted, and with faults: `control.fail("fdatasync", errno.EIO)`. */
EXPORT int fdatasync(int fd) {
    static struct standin_entry entry = {.name = "fdatasync"};
    int code = standin_enter(&entry).code;
    if (code) {
        errno = code;
        return -1;
    }
    int (*next)(int) = dlsym(RTLD_NEXT, "fdatasync");
    return next(fd);
}

/* As Python reads and writes volumes. Entered under two names, of which the second tells files apart: `control.hang("pwritev")`, `control.hang(f"pwritev
 * {path.stat().st_ino}")`. */
static int enter_vectors(struct standin_entry *entry, int fd) {
    int code = standin_enter(entry).code;
    struct stat found;
    if (code || fstat(fd, &found)) return code;
    char name[STANDIN_NAME_BYTES];
    snprintf(name, sizeof name, "%s %llu", entry->name, (unsigned long long)found.st_ino);
    return standin_enter(&(struct standin_entry){.name = name}).code;
}

static ssize_t move_vectors(struct standin_entry *entry, const char *name, int fd, const struct iovec *vectors, int count, off64_t offset, int flags) {
    int code = enter_vectors(entry, fd);
    if (code) {
        errno = code;
        return -1;
    }
    ssize_t (*next)(int, const struct iovec *, int, off64_t, int) = dlsym(RTLD_NEXT, name);
    return next(fd, vectors, count, offset, flags);
}

static struct standin_entry reads = {.name = "preadv"}, writes = {.name = "pwritev"};

EXPORT ssize_t pwritev2(int fd, const struct iovec *vectors, int count, off_t offset, int flags) {
    return move_vectors(&writes, "pwritev2", fd, vectors, count, offset, flags);
}

EXPORT ssize_t pwritev64v2(int fd, const struct iovec *vectors, int count, off64_t offset, int flags) {
    return move_vectors(&writes, "pwritev64v2", fd, vectors, count, offset, flags);
}

EXPORT ssize_t preadv2(int fd, const struct iovec *vectors, int count, off_t offset, int flags) {
    return move_vectors(&reads, "preadv2", fd, vectors, count, offset, flags);
}

EXPORT ssize_t preadv64v2(int fd, const struct iovec *vectors, int count, off64_t offset, int flags) {
    return move_vectors(&reads, "preadv64v2", fd, vectors, count, offset, flags);
}

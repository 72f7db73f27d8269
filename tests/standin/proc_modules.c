// Kernels without modules have no /proc/modules, and our code then refuses cuFile, whose real library would look for the file for ever. Preloaded with the rest, this
// makes the file be there for those who ask whether it is: the stand-in's node could load nvidia-fs.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/stat.h>

static const char *instead(const char *path) {
    return path && !strcmp(path, "/proc/modules") ? "/proc/version" : path;
}

__attribute__((visibility("default"))) int stat(const char *restrict path, struct stat *restrict found) {
    int (*next)(const char *, struct stat *) = dlsym(RTLD_NEXT, "stat");
    return next(instead(path), found);
}

__attribute__((visibility("default"))) int stat64(const char *restrict path, struct stat64 *restrict found) {
    int (*next)(const char *, struct stat64 *) = dlsym(RTLD_NEXT, "stat64");
    return next(instead(path), found);
}

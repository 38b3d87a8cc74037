/* Built by faulty_calls.py: calls of libc that fail on purpose, and a clock that jumps. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char *under, *renames, *writes;
static long rename_at, write_at, renamed, written;
static int error_, seen = -1;
static volatile long *ahead; /* seconds that the clock is ahead */

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long number(const char *name) { const char *text = getenv(name); return text ? atol(text) : 0; }

__attribute__((constructor)) static void begin(void) {
  under = getenv("FAULTS_UNDER"), renames = getenv("FAULTS_RENAMES"), writes = getenv("FAULTS_WRITES");
  rename_at = number("FAULTS_RENAME_AT"), write_at = number("FAULTS_WRITE_AT"), error_ = number("FAULTS_ERRNO");
  const char *file = getenv("FAULTS_SEEN"), *clock_ = getenv("FAULTS_CLOCK");
  if (file) seen = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (clock_) {
    int descriptor = open(clock_, O_RDONLY | O_CLOEXEC);
    void *page = mmap(0, 8, PROT_READ, MAP_SHARED, descriptor, 0);
    if (descriptor >= 0 && page != MAP_FAILED) ahead = page;
    close(descriptor);
  }
}

static const char *below(const char *path) { /* the name below the folder, or NULL */
  size_t size = under ? strlen(under) : 0;
  return size && !strncmp(path, under, size) && path[size] == '/' ? path + size + 1 : NULL;
}

static void note(const char *what, const char *name) {
  char line[PATH_MAX + 16];
  int size = snprintf(line, sizeof line, "%s %s\n", what, name);
  if (seen >= 0 && REAL(write)(seen, line, size) < 0) abort();
}

/* ---- renames: the `rename_at`-th whose target matches fails */

static int rename_fails(const char *to) {
  const char *name = below(to);
  if (!name) return 0;
  note("rename", name);
  if (!renames || fnmatch(renames, name, 0) || __sync_add_and_fetch(&renamed, 1) != rename_at) return 0;
  note("failed", name);
  return errno = error_, 1;
}

int rename(const char *from, const char *to) { return rename_fails(to) ? -1 : REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) {
  return rename_fails(to) ? -1 : REAL(renameat)(a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  return rename_fails(to) ? -1 : REAL(renameat2)(a, from, b, to, flags);
}

/* ---- writes: from the `write_at`-th on there is no room in what matches; that one is still half written */

static int full(int descriptor, size_t *size) {
  char link[32], path[PATH_MAX];
  if (!under) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  path[length < 0 ? 0 : length] = 0;
  const char *name = below(path);
  if (!name) return 0;
  note("write", name);
  if (!writes || fnmatch(writes, name, 0)) return 0;
  long count = __sync_add_and_fetch(&written, 1);
  if (count < write_at) return 0;
  note("failed", name);
  if (count == write_at && size && *size > 1) return *size /= 2, 0;
  return errno = ENOSPC, 1;
}

ssize_t write(int to, const void *data, size_t size) { return full(to, &size) ? -1 : REAL(write)(to, data, size); }
ssize_t pwrite(int to, const void *data, size_t size, off_t at) {
  return full(to, &size) ? -1 : REAL(pwrite)(to, data, size, at);
}
ssize_t pwrite64(int to, const void *data, size_t size, off64_t at) {
  return full(to, &size) ? -1 : REAL(pwrite64)(to, data, size, at);
}
ssize_t writev(int to, const struct iovec *parts, int count) { return full(to, 0) ? -1 : REAL(writev)(to, parts, count); }
ssize_t pwritev(int to, const struct iovec *parts, int count, off_t at) {
  return full(to, 0) ? -1 : REAL(pwritev)(to, parts, count, at);
}
ssize_t sendfile(int to, int from, off_t *at, size_t size);
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
  return full(to, &size) ? -1 : REAL(sendfile)(to, from, at, size);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size);
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
  return full(to, &size) ? -1 : REAL(sendfile64)(to, from, at, size);
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
  return full(to, &size) ? -1 : REAL(copy_file_range)(from, a, to, b, size, flags);
}

/* ---- the clock */

int clock_gettime(clockid_t id, struct timespec *out) {
  int code = REAL(clock_gettime)(id, out);
  if (!code && ahead && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) out->tv_sec += *ahead;
  return code;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
  int code = REAL(gettimeofday)(out, zone);
  if (!code && ahead) out->tv_sec += *ahead;
  return code;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

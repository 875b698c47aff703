// SPDX-License-Identifier: Apache-2.0
// Limits what a process sends over TCP to SLOW_SOCKETS_GBIT_S Gbit/s, all its sockets together.
// Only send() is limited: NCCL's socket transport uses no other call. Messages of at most kSmall
// bytes pass uncounted, so control planes and NCCL's headers stay fast.
//
//   cc -shared -fPIC -O2 slow_sockets.c -o slow_sockets.so
//   SLOW_SOCKETS_GBIT_S=10 LD_PRELOAD=./slow_sockets.so PROGRAM
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const size_t kSmall = 1024;
static const size_t kLeast = 32 << 10;  // bytes that a larger message waits for
// What the bucket holds at most, in ps of sending: of an idle process, and of a busy one, whose
// threads the scheduler may keep off their processors.
static const int64_t kIdleBurst = 500 * 1000000LL;
static const int64_t kBusyBurst = 50 * 1000000000LL;
static int64_t ps_per_byte;         // 0: no limit
static _Atomic int64_t paid_until;  // the token bucket: bytes sent so far took until here, in ps

static _Atomic int is_short;      // the last attempt wanted more than the bucket held
static _Atomic int64_t last_end;  // when the last attempt ended, in ps
static int64_t start_s;

// System calls, because constructors of other libraries may send before dlsym could find anything.
static ssize_t real_send(int fd, const void* data, size_t size, int flags) {
  return syscall(SYS_sendto, fd, data, size, flags, NULL, 0);
}

__attribute__((constructor)) static void read_rate(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  start_s = now.tv_sec;
  const char* gbit_s = getenv("SLOW_SOCKETS_GBIT_S");
  const double rate = gbit_s ? atof(gbit_s) : 0;
  ps_per_byte = rate > 0 ? (int64_t)(8000 / rate + 0.5) : 0;
}

static int64_t now_ps(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (now.tv_sec - start_s) * 1000000000000LL + now.tv_nsec * 1000LL;
}

// Takes up to `wanted` bytes from the bucket. 0: too few are there yet.
static size_t take(size_t wanted) {
  const int64_t now = now_ps();
  const size_t least = wanted < kLeast ? wanted : kLeast;
  const int is_busy = atomic_load(&is_short) || now - atomic_load(&last_end) < kIdleBurst;
  const int64_t oldest = now - (is_busy ? kBusyBurst : kIdleBurst);
  int64_t paid = atomic_load(&paid_until);
  for (;;) {
    const int64_t from = paid > oldest ? paid : oldest;
    const size_t allowed = now > from ? (size_t)((now - from) / ps_per_byte) : 0;
    const size_t taken = allowed < least ? 0 : wanted < allowed ? wanted : allowed;
    atomic_store(&is_short, allowed < wanted);
    if (atomic_compare_exchange_weak(&paid_until, &paid, from + (int64_t)taken * ps_per_byte)) {
      return taken;
    }
  }
}

static int is_limited(int fd, size_t num_bytes) {
  int domain = 0;
  int type = 0;
  socklen_t size = sizeof(int);
  if (ps_per_byte == 0 || num_bytes <= kSmall) return 0;
  const int saved = errno;
  const int is_stream = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 &&
                        getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 &&
                        (domain == AF_INET || domain == AF_INET6) && type == SOCK_STREAM;
  errno = saved;
  return is_stream;
}

// A blocking call sends everything. Another one sends what the bucket allows, or fails with EAGAIN.
static ssize_t send_limited(int fd, const char* data, size_t num_bytes, int flags) {
  const int waits = !(flags & MSG_DONTWAIT) && !(fcntl(fd, F_GETFL) & O_NONBLOCK);
  const struct timespec pause = {0, 20000};
  size_t done = 0;
  while (done < num_bytes) {
    const size_t taken = take(num_bytes - done);
    if (taken == 0 && waits) {
      nanosleep(&pause, NULL);
      continue;
    }
    if (taken == 0) errno = EAGAIN;
    const ssize_t sent = taken > 0 ? real_send(fd, data + done, taken, flags) : -1;
    const size_t unsent = taken - (sent > 0 ? (size_t)sent : 0);
    atomic_fetch_sub(&paid_until, (int64_t)unsent * ps_per_byte);
    atomic_store(&last_end, now_ps());
    if (sent < 0) return done > 0 ? (ssize_t)done : -1;
    done += (size_t)sent;
    if (!waits) break;
  }
  return (ssize_t)done;
}

ssize_t send(int fd, const void* data, size_t size, int flags) {
  return is_limited(fd, size) ? send_limited(fd, data, size, flags)
                              : real_send(fd, data, size, flags);
}

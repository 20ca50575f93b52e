// Threads that share a job and spin while they wait for the next one (threads.py).
//
// `ticket` holds the job's number in its upper half and the parts not yet taken in its lower half.
// Taking a part is one compare-exchange of the whole word: a late thread sees another number and
// takes nothing of a finished job. Only a thread that took a part reads the job, and the caller
// overwrites it only after all parts are done.

#include "pool.h"

#include <atomic>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t kLeft = 0xffffffff;  // the lower half of a ticket
constexpr int kSpins = 4000;           // pauses before a thread sleeps: some tens of microseconds
constexpr int64_t kPartsPerThread = 4; // a thread delayed by other work leaves parts to the others
constexpr int kEveryone = 2147483647;

// One cache line each: the spinning threads read `ticket` only.
alignas(64) std::atomic<int64_t> ticket{0};
alignas(64) std::atomic<int32_t> sleeping{0};
alignas(64) std::atomic<int64_t> done{0};
alignas(64) std::atomic<int32_t> busy{0};

struct Job {
  dspark_work work;
  void *data;
  int64_t length, step;
};
alignas(64) Job job;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The futex is the upper half of the ticket (little-endian): it changes with each job and not with
// each part.
#ifdef __linux__
void *job_number() { return reinterpret_cast<char *>(&ticket) + 4; }

void wake_all() { syscall(SYS_futex, job_number(), FUTEX_WAKE_PRIVATE, kEveryone, nullptr); }

void sleep_while(int64_t seen) {
  syscall(SYS_futex, job_number(), FUTEX_WAIT_PRIVATE, static_cast<int32_t>(seen >> 32), nullptr);
}
#else
void wake_all() {}
void sleep_while(int64_t) {}
#endif

// Take a part of the current job and do it; false where none is left.
bool take() {
  int64_t seen = ticket.load(std::memory_order_acquire);
  do {
    if ((seen & kLeft) == 0) return false;
  } while (!ticket.compare_exchange_strong(seen, seen - 1, std::memory_order_acq_rel,
                                           std::memory_order_acquire));
  const int64_t first = ((seen & kLeft) - 1) * job.step, end = first + job.step;
  job.work(job.data, first, end < job.length ? end : job.length);
  done.fetch_add(1, std::memory_order_acq_rel);
  return true;
}

} // namespace

extern "C" void dspark_pool_run(dspark_work work, void *data, int64_t length, int64_t threads) {
  int32_t idle = 0;
  if (threads <= 1 || !busy.compare_exchange_strong(idle, 1, std::memory_order_acquire,
                                                    std::memory_order_relaxed)) {
    work(data, 0, length); // also a job within a job, and one of another caller
    return;
  }
  const int64_t wanted = threads * kPartsPerThread;
  const int64_t step = length > 0 ? (length + wanted - 1) / wanted : 1;
  const int64_t parts = (length + step - 1) / step;
  job = {work, data, length, step};
  done.store(0, std::memory_order_relaxed);
  const uint64_t number = static_cast<uint64_t>(ticket.load(std::memory_order_relaxed)) >> 32;
  // Sequentially consistent with `sleeping` below and in serve: either the sleeper sees the ticket
  // or this thread sees the sleeper.
  ticket.store(static_cast<int64_t>((number + 1) << 32) | parts, std::memory_order_seq_cst);
  if (sleeping.load(std::memory_order_seq_cst) != 0) wake_all();
  while (take()) {
  }
  while (done.load(std::memory_order_acquire) != parts) relax();
  busy.store(0, std::memory_order_release);
}

extern "C" void dspark_pool_serve(const int32_t *stop) {
  for (;;) {
    while (take()) {
    }
    int spins = 0;
    while (spins < kSpins && (ticket.load(std::memory_order_relaxed) & kLeft) == 0) {
      relax();
      ++spins;
    }
    if (spins < kSpins) continue;
    if (__atomic_load_n(stop, __ATOMIC_ACQUIRE) != 0) return;
    sleeping.fetch_add(1, std::memory_order_seq_cst);
    const int64_t last = ticket.load(std::memory_order_seq_cst);
    if ((last & kLeft) == 0) sleep_while(last);
    sleeping.fetch_sub(1, std::memory_order_seq_cst);
  }
}

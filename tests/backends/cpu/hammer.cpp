// Hammers the pool and the products for a sanitizer (test_sanitizers.py): jobs from two callers at
// once, pauses after which threads sleep, products shared out, every format this processor has.
// Exits with 1 where a place is not done exactly once or a product depends on the threads.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "../../../sglang_dspark/backends/cpu/csrc/matmul.h"
#include "../../../sglang_dspark/backends/cpu/csrc/pool.h"

extern "C" {
int32_t dspark_processor();
Matmul dspark_matmul(int32_t processor, int32_t format, int32_t level);
}

namespace {

void count(void *data, int64_t first, int64_t end) {
  int *done = static_cast<int *>(data);
  for (int64_t i = first; i < end; ++i) ++done[i]; // plain memory: an unordered access is a race
}

bool jobs(int rounds) {
  std::vector<int> done(1000);
  for (int round = 1; round <= rounds; ++round) {
    const int64_t length = 1 + round * 37 % done.size();
    std::fill(done.begin(), done.end(), 0);
    dspark_pool_run(count, done.data(), length, 2 + round % 4);
    for (size_t i = 0; i < done.size(); ++i) {
      if (done[i] != (static_cast<int64_t>(i) < length)) return false;
    }
    if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

bool products(int32_t processor) {
  const int64_t n = 48, k = 192, most = 14;
  std::vector<float> x(most * k);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7919 % 1013) - 500.0f;
  const std::vector<char> w(n * k * 4, 1); // of any format: small numbers
  for (int format = 0; format < kFormats; ++format) {
    for (int level = 1; level <= 2; ++level) {
      const Matmul matmul = dspark_matmul(processor, format, level);
      if (matmul == nullptr) continue;
      for (int64_t rows = 1; rows <= most; ++rows) {
        std::vector<float> one(rows * n), many(rows * n);
        const int64_t blocks = (rows + 5) / 6, block = (rows + blocks - 1) / blocks;
        matmul(x.data(), k, rows, block, w.data(), n, k, one.data(), 1);
        matmul(x.data(), k, rows, block, w.data(), n, k, many.data(), 3);
        if (memcmp(one.data(), many.data(), one.size() * sizeof(float)) != 0) return false;
      }
    }
  }
  return true;
}

} // namespace

int main() {
  std::atomic<bool> good{true};
  int32_t stop = 0;
  std::vector<std::thread> serving;
  for (int i = 0; i < 3; ++i) serving.emplace_back(dspark_pool_serve, &stop);
  {
    std::thread other([&] { good = jobs(400) && good; });
    const bool ours = jobs(400);
    other.join();
    good = ours && good;
  }
  for (int32_t processor : {dspark_processor(), dspark_processor() & 3, dspark_processor() & 1}) {
    good = products(processor) && good;
  }
  __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
  for (int i = 0; i < 50; ++i) { // wakes those that sleep, until all have seen it
    jobs(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::thread &each : serving) each.join();
  std::puts(good ? "good" : "bad");
  return good ? 0 : 1;
}

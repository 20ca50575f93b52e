// Hammers the library for a sanitizer (test_sanitizers.py): jobs from two callers at once, pauses
// after which threads sleep, products shared out in every format this processor has, and layers.
// Exits with 1 where a place is not done exactly once, or where a result depends on the threads or
// on the instruction set.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#ifdef __x86_64__
#define DSPARK_ISA avx2
#else
#define DSPARK_ISA generic
#endif
#include "../../../sglang_dspark/backends/cpu/csrc/layers.h"
#include "../../../sglang_dspark/backends/cpu/csrc/matmul.h"
#include "../../../sglang_dspark/backends/cpu/csrc/pool.h"

extern "C" {
#ifdef __x86_64__
decltype(dspark_layers_avx2) dspark_layers_avx512;
#endif
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
        matmul(x.data(), k, rows, w.data(), n, k, one.data(), 1);
        matmul(x.data(), k, rows, w.data(), n, k, many.data(), 3);
        if (memcmp(one.data(), many.data(), one.size() * sizeof(float)) != 0) return false;
      }
    }
  }
  return true;
}

std::vector<float> numbers(int64_t count, int seed) {
  std::vector<float> found(count);
  for (int64_t i = 0; i < count; ++i) found[i] = (i * 7919 + seed * 104729) % 1013 / 500.0f - 1.0f;
  return found;
}

// Run three layers over two requests; odd heads and windows. All memory is as large as needed
// and no larger.
std::vector<float> layers(decltype(&NAMED(layers)) all, Matmul matmul, int64_t threads) {
  const int64_t d = 48, heads = 4, kv_heads = 2, width = 24, f = 32, rotary = 10, slots = 700;
  const int64_t qkv = (heads + 2 * kv_heads) * width, lens[] = {5, 40}, n = 45, cached = 300;
  const std::vector<float> w = numbers(qkv * d + d * heads * width + 3 * f * d, 1);
  const std::vector<float> norms = numbers(d, 2), cos_sin = numbers(cached * rotary, 3);
  const float *out = w.data() + qkv * d, *up = out + d * heads * width, *down = up + 2 * f * d;
  const std::vector<float> bias = numbers(qkv, 6);
  std::vector<Layer> stack;
  std::vector<std::vector<float>> caches;
  for (int64_t window : {-1, 70, 0}) {
    caches.push_back(numbers(slots * kv_heads * width, 4));
    caches.push_back(numbers(slots * kv_heads * width, 5));
    const Norm norm = {norms.data(), 1e-5f}, head = {window < 0 ? nullptr : norms.data(), 1e-5f};
    const Attention attention = {heads, kv_heads, width, width, caches.end()[-2].data(),
                                 caches.back().data(), window, 0.2f, window != 0};
    stack.push_back({{w.data(), threads}, {out, threads}, {up, threads}, {down, threads},
                     window < 0 ? bias.data() : nullptr, norm, norm, head, head, cos_sin.data(),
                     rotary, attention});
  }
  std::vector<int32_t> table(2 * cached);
  for (size_t i = 0; i < table.size(); ++i) table[i] = i * 7 % slots;
  std::vector<int64_t> requests, positions, places;
  for (int64_t r = 0; r < 2; ++r) {
    requests.insert(requests.end(), {r, r * lens[0], lens[r], cached});
    for (int64_t i = cached - lens[r]; i < cached; ++i) {
      positions.push_back(i);
      places.push_back(table[r * cached + i]);
    }
  }
  const Plan plan = {table.data(), cached, requests.data(), 2};
  const std::vector<float> hidden = numbers(n * d, 6);
  std::vector<float> scratch(n * (4 * d + 2 * (heads + kv_heads) * width + 3 * f));
  std::vector<float> normed(n * d), capture(n * d);
  float *captures[] = {nullptr, capture.data(), nullptr};
  const Rows rows = {n, positions.data(), places.data(), hidden.data(), scratch.data(),
                     normed.data(), captures};
  const Stack whole = {stack.data(), 3, d, f, matmul, {norms.data(), 1e-5f}};
  if (all(&whole, &plan, &rows, threads) != 0) return {};
  normed.insert(normed.end(), capture.begin(), capture.end());
  return normed;
}

bool operators(int32_t processor) {
  const Matmul first = dspark_matmul(processor & 1, kFloat32, 1);
  if (first == nullptr) return true;
  const std::vector<float> one = layers(NAMED(layers), first, 1);
  if (one.empty() || layers(NAMED(layers), first, 3) != one) return false;
#ifdef __x86_64__
  if (!(processor & 2)) return true;
  const Matmul wide = dspark_matmul(processor & 3, kFloat32, 1);
  if (layers(dspark_layers_avx512, wide, 3) != one) return false;
#endif
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
  good = operators(dspark_processor()) && good;
  __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
  for (int i = 0; i < 50; ++i) { // wakes those that sleep, until all have seen it
    jobs(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::thread &each : serving) each.join();
  std::puts(good ? "good" : "bad");
  return good ? 0 : 1;
}

// Runs the operators of drafting for a sanitizer (test_sanitizers.py), in memory as large as needed
// and no larger. Exits with 1 where instruction sets differ, one of which is this file's: it
// compiles the sources once more, for any processor.

#include <cstdio>
#include <vector>

#define DSPARK_ISA any
#include "../../../sglang_dspark/backends/cpu/csrc/rows.cpp"

#include "../../../sglang_dspark/backends/cpu/csrc/context.cpp"
#include "../../../sglang_dspark/backends/cpu/csrc/experts.cpp"
#include "../../../sglang_dspark/backends/cpu/csrc/heads.cpp"

#define EACH(of, isa)                                                                            \
  of(isa, inject_context) of(isa, keep_context) of(isa, take_context) of(isa, accept_greedy)     \
  of(isa, draft_block) of(isa, confidence)                                                       \
  of(isa, swiglu) of(isa, experts) of(isa, read_streams) of(isa, write_streams)
#define MEMBER(isa, name) decltype(&dspark_##name##_any) name;
#define DECLARED(isa, name) decltype(dspark_##name##_any) dspark_##name##_##isa;
#define VALUE(isa, name) dspark_##name##_##isa,

struct Level {
  EACH(MEMBER, any)
};

extern "C" {
#ifdef __x86_64__
EACH(DECLARED, avx2)
EACH(DECLARED, avx512)
#else
EACH(DECLARED, generic)
#endif
int32_t dspark_processor();
Matmul dspark_matmul(int32_t processor, int32_t format, int32_t level);
}

namespace {

typedef std::vector<float> Numbers;
typedef std::vector<int64_t> Words64;

Numbers numbers(int64_t count, int seed) {
  Numbers found(count);
  for (int64_t i = 0; i < count; ++i) found[i] = (i * 7919 + seed * 104729) % 1013 / 500.0f - 1.0f;
  return found;
}

template <typename T> void append(Numbers &to, const std::vector<T> &values) {
  for (T value : values) to.push_back(static_cast<float>(value));
}

void context(const Level &level, Matmul matmul, Numbers &found) {
  const int64_t features = 32, d = 16, heads = 2, size = 24, rotary = 10, slots = 9, n = 7;
  const int64_t columns = 2 * 2 * heads * size;
  const Numbers w = numbers(columns * d, 1), norms = numbers(64, 2), cos_sin = numbers(5 * rotary, 3);
  std::vector<Numbers> kept(4, Numbers(slots * heads * size));
  float *const caches[] = {kept[0].data(), kept[1].data(), kept[2].data(), kept[3].data()};
  const Tables tables = {{matmul, matmul}, {w.data(), w.data()}, {1, 1},
                         norms.data(), norms.data(), cos_sin.data(), caches,
                         2, features, d, heads, size, rotary, 0.1f, 1e-6f};
  const Words64 positions = {4, 0, 1, 2, 3, 0, 4}, places = {8, 1, 2, 7, 4, 5, 6};
  Numbers room(n * (2 * d + columns));
  const Numbers given = numbers(n * features, 4);
  level.inject_context(&tables, given.data(), n, positions.data(), places.data(), room.data());
  for (const Numbers &cache : kept) append(found, cache);
  const Numbers x = numbers(n * 3, 5);
  Numbers rows(5 * 3);
  Words64 at(5), held(5);
  bool waits[5] = {};
  const Waiting waiting = {rows.data(), at.data(), held.data(), waits, 5, 3};
  const Words64 others = {8, 3, 8, 2, 1, 0, 4}; // slot 3 has the place of 8
  found.push_back(level.keep_context(&waiting, x.data(), positions.data(), others.data(), 0, n));
  found.push_back(level.keep_context(&waiting, x.data(), positions.data(), others.data(), 2, n));
  const int32_t table[] = {0, 2, 9, 8, 8, 7};
  const int64_t requests[] = {1, 0}, lens[] = {3, 2};
  Words64 taken(5);
  found.push_back(level.take_context(&waiting, table, 3, requests, lens, 2, taken.data()));
  append(found, taken);
  append(found, rows);
}

void heads(const Level &level, Matmul matmul, Numbers &found) {
  for (int64_t n : {1, 37, 2048, 2049}) {
    Numbers values = numbers(12 * n, 6);
    Words64 window(12), lens(12, 1), starts(12), bonus(12);
    for (int64_t i = 0; i < 12; ++i) starts[i] = i;
    std::vector<int32_t> accepted(12);
    level.accept_greedy(window.data(), 12, 1, lens.data(), starts.data(), values.data(), n,
                        accepted.data(), bonus.data());
    append(found, bonus);
    window = {0, bonus[0], bonus[1], 0, bonus[10], bonus[11]}, lens = {3, 2}, starts = {0, 10};
    level.accept_greedy(window.data(), 2, 3, lens.data(), starts.data(), values.data(), n,
                        accepted.data(), bonus.data());
    append(found, accepted), append(found, bonus);
  }
  const int64_t requests = 3, gamma = 4, n = 48, rank = 16, vocabulary = 50, width = 21;
  const Numbers w1 = numbers(vocabulary * rank, 7), w2 = numbers(n * rank, 8);
  const Numbers base = numbers(requests * gamma * n, 9);
  const Words64 anchor = {49, 0, 7};
  Words64 tokens(n), drafts(requests * gamma);
  for (int64_t i = 0; i < n; ++i) tokens[i] = i + 1;
  Numbers room(requests * (rank + n)), rest(requests * gamma);
  level.draft_block(matmul, w2.data(), 1, base.data(), requests, gamma, n, w1.data(), rank,
                    tokens.data(), anchor.data(), 0, gamma, drafts.data(), room.data(),
                    rest.data());
  append(found, drafts), append(found, rest);
  const Numbers features = numbers(requests * gamma * width, 10), weight = numbers(width + rank, 11);
  Numbers logits(requests * gamma);
  const float bias[] = {0.25f};
  level.confidence(features.data(), requests, gamma, width, anchor.data(), drafts.data(),
                   weight.data(), bias, w1.data(), rank, logits.data());
  append(found, logits);
}

void experts(const Level &level, Matmul matmul, Numbers &found) {
  const int64_t tokens = 5, d = 32, inner = 16, top = 2;
  const Numbers x = numbers(tokens * d, 12), gate_up = numbers(3 * 2 * inner * d, 13);
  const Numbers down = numbers(3 * d * inner, 14), weights = numbers(tokens * top, 15);
  const Words64 order = {0, 2, 4, 6, 8, 1, 3, 5, 7, 9}, back = {0, 5, 1, 6, 2, 7, 3, 8, 4, 9};
  const Words64 counts = {5, 0, 5};
  Numbers room(tokens * top * (2 * d + 3 * inner)), out(tokens * d);
  level.experts(matmul, x.data(), tokens, d, order.data(), back.data(), counts.data(), 3,
                weights.data(), top, gate_up.data(), down.data(), inner, room.data(), out.data());
  append(found, out);
  for (int64_t n : {2, 5}) {
    const int64_t width = 16, size = padded(n * (n + 2)), lines = padded(n);
    const Numbers streams = numbers(tokens * n * width, 16), phi = numbers(size * n * width, 17);
    const Numbers bias = numbers(n * n, 18), alphas = {0.5f, 2.0f}, block = numbers(tokens * width, 19);
    Numbers projected(tokens * size), read(tokens * width), written(tokens * n * width);
    Numbers scratch(2 * padded(n * n) + 3 * lines);
    level.read_streams(matmul, streams.data(), tokens, n, width, phi.data(), size, 1e-6f, 0.5f, bias.data(),
                       scratch.data(), projected.data(), read.data());
    level.write_streams(streams.data(), tokens, n, width, projected.data(), size, alphas.data(),
                        bias.data(), bias.data(), 20, block.data(), scratch.data(), written.data());
    append(found, projected), append(found, read), append(found, written);
  }
}

Numbers results(const Level &level, Matmul matmul) {
  Numbers found;
  context(level, matmul, found);
  heads(level, matmul, found);
  experts(level, matmul, found);
  return found;
}

} // namespace

int main() {
  const Matmul matmul = dspark_matmul(dspark_processor() & 1, kFloat32, 1);
  bool good = true;
  if (matmul != nullptr) {
    const Numbers expected = results({EACH(VALUE, any)}, matmul);
#ifdef __x86_64__
    good = results({EACH(VALUE, avx2)}, matmul) == expected;
    if (dspark_processor() & 2) good = results({EACH(VALUE, avx512)}, matmul) == expected && good;
#else
    good = results({EACH(VALUE, generic)}, matmul) == expected;
#endif
  }
  std::puts(good ? "good" : "bad");
  return good ? 0 : 1;
}

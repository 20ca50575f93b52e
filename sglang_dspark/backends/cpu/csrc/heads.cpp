// Draft a block, accept drafts greedily, and compute a block's confidence (reduced_head.py,
// greedy_ops.py, confidence.py).

#include "lanes.h"
#include "matmul.h"
#include "operators.h"

namespace {

constexpr int64_t kCompared = 2048; // entries compared before the largest one's place is updated

// Map a float32 to an integer of the same order; both zeros are equal.
inline int32_t order_key(float value) {
  int32_t bits = load<int32_t>(&value);
  if (bits == INT32_MIN) bits = 0;
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Return the first largest entry of a row of n > 0.
int64_t argmax(const float *row, int64_t n) {
  int32_t best = order_key(row[0]);
  int64_t found = 0;
  for (int64_t start = 0; start < n; start += kCompared) {
    const int64_t end = least(start + kCompared, n);
    int32_t top = order_key(row[start]);
    for (int64_t i = start; i < end; ++i) {
      const int32_t key = order_key(row[i]);
      top = key > top ? key : top;
    }
    if (top > best) {
      best = top;
      found = start;
    }
  }
  while (order_key(row[found]) != best) ++found;
  return found;
}

// Sum exp(row - top) less its largest term, which is 1: (1 - p) / p of the likeliest entry. NaN where
// the row has one.
float rest_of(const float *row, int64_t n, float top) {
  const auto numerators = [=](const float *from) {
    return [=](int64_t i, auto lanes) {
      const Floats gap = lanes.load(from + i) - spread(top);
      return gap < spread(-87.0f) ? Floats{} : exp32(gap);
    };
  };
  const int64_t whole = n / kRowLanes * kRowLanes;
  float last[kRowLanes]; // the rest of the row, then nothing: exp of 0 would count
  for (float &each : last) each = -__builtin_inff();
  memcpy(last, row + whole, (n - whole) * sizeof *row);
  return sum_of(whole, numerators(row)) + sum_of(kRowLanes, numerators(last)) - 1.0f;
}

} // namespace

extern "C" {

// `accept_greedy` of greedy_ops.py: window [R, width], logits [., n]. Later rows are not read.
DSPARK_EXPORT void NAMED(accept_greedy)(const int64_t *window, int64_t requests, int64_t width,
                                        const int64_t *lens, const int64_t *starts,
                                        const float *logits, int64_t n, int32_t *accepted,
                                        int64_t *bonus) {
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t *drafts = window + r * width + 1;
    const float *row = logits + starts[r] * n;
    int64_t k = 0, token = argmax(row, n);
    while (k < lens[r] - 1 && token == drafts[k]) token = argmax(row + ++k * n, n);
    accepted[r] = static_cast<int32_t>(k);
    bonus[r] = token;
  }
}

// Draft positions first .. last of blocks by the largest of base [R, gamma, n] + W1[previous] W2^T,
// as tokens [n], into out [R, gamma]. anchor [R]: the token before the first. multiply: of the
// format of w2 [n, rank]. room: R * (rank + n) floats. rest [R, gamma], or null: (1 - p) / p of each
// draft's probability p.
DSPARK_EXPORT void NAMED(draft_block)(Matmul multiply, const void *w2, int32_t threads,
                                      const float *base, int64_t requests, int64_t gamma,
                                      int64_t n, const float *w1, int64_t rank,
                                      const int64_t *tokens, const int64_t *anchor, int64_t first,
                                      int64_t last, int64_t *out, float *room, float *rest) {
  float *sums = room + requests * rank;
  for (int64_t k = first; k < last; ++k) {
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t previous = k == first ? anchor[r] : out[r * gamma + k - 1];
      memcpy(room + r * rank, w1 + previous * rank, rank * sizeof *w1);
    }
    multiply(room, rank, requests, w2, n, rank, sums, threads);
    for (int64_t r = 0; r < requests; ++r) {
      const float *own = base + (r * gamma + k) * n;
      float *sum = sums + r * n;
      for (int64_t i = 0; i < n; ++i) sum[i] = own[i] + sum[i];
      const int64_t best = argmax(sum, n);
      out[r * gamma + k] = tokens[best];
      if (rest != nullptr) rest[r * gamma + k] = rest_of(sum, n, sum[best]);
    }
  }
}

// `confidence` of confidence.py: weight [width + rank], w1 [., rank], logits [requests, depth].
DSPARK_EXPORT void NAMED(confidence)(const float *features, int64_t requests, int64_t depth,
                                     int64_t width, const int64_t *anchor, const int64_t *drafts,
                                     const float *weight, const float *bias, const float *w1,
                                     int64_t rank, float *logits) {
  for (int64_t i = 0; i < requests * depth; ++i) {
    const int64_t k = i % depth;
    float total = (bias == nullptr ? 0.0f : *bias) + dot(features + i * width, weight, width);
    if (rank > 0) {
      const int64_t previous = k == 0 ? anchor[i / depth] : drafts[i - 1];
      total += dot(w1 + previous * rank, weight + width, rank);
    }
    logits[i] = total;
  }
}
}

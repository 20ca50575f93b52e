// Compute experts and residual streams of a draft block (expert_ops.py).

#include "lanes.h"
#include "matmul.h"
#include "rows.h"

namespace {

constexpr float kRounding = 0x1p-23f;

inline float larger(float a, float b) { return b > a ? b : a; }

constexpr int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// x [padded(n)]: whole vectors, as parts of one are slow.
inline void exponentials(float *x, int64_t n) {
  for (int64_t i = 0; i < n; i += kNative) Whole{}.store(x + i, exp32(load<Floats>(x + i)));
}

// out [n] = scale * sigmoid(alpha x + bias).
void gates(const float *x, float alpha, const float *bias, int64_t n, float scale, float *out) {
  each_vector(n, [=](int64_t i, auto lanes) {
    const Floats v = spread(alpha) * lanes.load(x + i) + lanes.load(bias + i);
    lanes.store(out + i, spread(scale) / (spread(1.0f) + exp32(-v)));
  });
}

// out [n] = first x + sum_r weights[r] row(r), one row after the other; x null: 0.
template <typename Row>
inline void add_rows(float first, const float *x, const float *weights, int64_t rows, int64_t n,
                     Row row, float *out) {
  each_vector(n, [=](int64_t i, auto lanes) {
    Floats total = {};
    if (x != nullptr) total = spread(first) * lanes.load(x + i);
    for (int64_t r = 0; r < rows; ++r) {
      total = fma(spread(weights[r]), lanes.load(row(r) + i), total);
    }
    lanes.store(out + i, total);
  });
}

// Subtract log sum exp of each line from the logs [n, n]: of rows (across n, along 1) or of columns
// (1, n). room: padded(n * n) + 2 * padded(n) floats.
void normalise(float *logs, int64_t n, int64_t across, int64_t along, float *room) {
  float *sums = room + padded(n * n), *totals = sums + padded(n);
  for (int64_t i = 0; i < n; ++i) {
    const float *line = logs + i * across;
    float top = line[0];
    for (int64_t j = 1; j < n; ++j) top = larger(top, line[j * along]);
    for (int64_t j = 0; j < n; ++j) room[i * n + j] = line[j * along] - top;
    sums[i] = top;
  }
  exponentials(room, n * n);
  for (int64_t i = 0; i < n; ++i) {
    totals[i] = 0.0f;
    for (int64_t j = 0; j < n; ++j) totals[i] += room[i * n + j];
  }
  for (int64_t i = 0; i < n; i += kNative) {
    Whole{}.store(sums + i, load<Floats>(sums + i) + log32(load<Floats>(totals + i)));
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) logs[i * across + j * along] -= sums[i];
  }
}

// Divide lines of x [n, n] that sum to more than 1 by their sum.
void limit(float *x, int64_t n, int64_t across, int64_t along) {
  for (int64_t i = 0; i < n; ++i) {
    float total = 0.0f;
    for (int64_t j = 0; j < n; ++j) total += x[i * across + j * along];
    for (int64_t j = 0; j < n; ++j) x[i * across + j * along] /= larger(total, 1.0f);
  }
}

// `doubly_stochastic` of drafter/hyper_connections.py: x [n, n], padded, in place.
void balance(float *x, int64_t n, int64_t rounds, float *room) {
  for (int64_t round = 0; round < rounds; ++round) {
    normalise(x, n, n, 1, room);
    normalise(x, n, 1, n, room);
  }
  exponentials(x, n * n);
  limit(x, n, n, 1);
  limit(x, n, 1, n);
  float *rows = room, *columns = room + n, left = 0.0f;
  for (int64_t i = 0; i < 2 * n; ++i) room[i] = 1.0f;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      rows[i] -= x[i * n + j];
      columns[j] -= x[i * n + j];
    }
  }
  for (int64_t i = 0; i < n; ++i) left += larger(rows[i], 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const float share = larger(columns[j], 0.0f) / larger(left, kRounding);
      x[i * n + j] += larger(rows[i], 0.0f) * share;
    }
  }
}

} // namespace

extern "C" {

// out [rows, d] = down(silu(gate x) * (up x)): gate_up [2 * inner, d], down [d, inner]. room:
// rows * 3 * inner floats.
DSPARK_EXPORT void NAMED(swiglu)(Matmul multiply, const float *x, int64_t rows, int64_t d,
                                 const float *gate_up, const float *down, int64_t inner,
                                 float *room, float *out) {
  if (rows == 0) return;
  float *activated = room + rows * 2 * inner;
  multiply(x, d, rows, gate_up, 2 * inner, d, room, 1);
  NAMED(silu_and_mul_rows)(room, 2 * inner, rows, inner, activated);
  multiply(activated, inner, rows, down, d, inner, out, 1);
}

// out [tokens, d]: the weighted experts of each token; x [tokens, d]. order, back
// [tokens * top], counts [experts]: of `permute_tokens`; weights [tokens, top]; gate_up
// [experts, 2 * inner, d], down [experts, d, inner]. room: tokens * top * (2 * d + 3 * inner).
DSPARK_EXPORT void NAMED(experts)(Matmul multiply, const float *x, int64_t tokens, int64_t d,
                                  const int64_t *order, const int64_t *back,
                                  const int64_t *counts, int64_t experts, const float *weights,
                                  int64_t top, const float *gate_up, const float *down,
                                  int64_t inner, float *room, float *out) {
  const int64_t copies = tokens * top;
  float *made = room + copies * d, *gated = made + copies * d;
  for (int64_t i = 0; i < copies; ++i) memcpy(room + i * d, x + order[i] / top * d, d * sizeof *x);
  for (int64_t e = 0, first = 0; e < experts; first += counts[e++]) {
    NAMED(swiglu)(multiply, room + first * d, counts[e], d, gate_up + e * 2 * inner * d,
                  down + e * d * inner, inner, gated, made + first * d);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const auto row = [=](int64_t rank) { return made + back[t * top + rank] * d; };
    add_rows(0.0f, nullptr, weights + t * top, top, d, row, out + t * d);
  }
}

// projected [rows, size] = rmsnorm(streams [rows, n * d]) phi^T, of which the first n with alpha and
// bias [n] weight the streams in out [rows, d].
DSPARK_EXPORT void NAMED(read_streams)(Matmul multiply, const float *streams, int64_t rows,
                                       int64_t n, int64_t d, const float *phi, int64_t size,
                                       float epsilon, float alpha, const float *bias, float *room,
                                       float *projected, float *out) {
  const int64_t width = n * d;
  multiply(streams, width, rows, phi, size, width, projected, 1);
  for (int64_t t = 0; t < rows; ++t) {
    const float *own = streams + t * width;
    float *seen = projected + t * size;
    const float mean = dot(own, own, width) / static_cast<float>(width);
    const float scale = 1.0f / __builtin_sqrtf(mean + epsilon);
    for (int64_t s = 0; s < size; ++s) seen[s] *= scale;
    gates(seen, alpha, bias, n, 1.0f, room);
    const auto stream = [=](int64_t s) { return own + s * d; };
    add_rows(0.0f, nullptr, room, n, d, stream, out + t * d);
  }
}

// out [rows, n, d] = mixing streams + share block [rows, d]: both of projected [rows, size], from
// column n on, by alphas [2] and biases. room: 2 * padded(n * n) + 3 * padded(n) floats.
DSPARK_EXPORT void NAMED(write_streams)(const float *streams, int64_t rows, int64_t n, int64_t d,
                                        const float *projected, int64_t size,
                                        const float *alphas, const float *write_bias,
                                        const float *mix_bias, int64_t rounds,
                                        const float *block, float *room, float *out) {
  float *mixing = room + padded(n), *free = mixing + padded(n * n);
  for (int64_t t = 0; t < rows; ++t) {
    const float *own = streams + t * n * d, *seen = projected + t * size;
    gates(seen + n, alphas[0], write_bias, n, 2.0f, room);
    for (int64_t i = 0; i < n * n; ++i) mixing[i] = alphas[1] * seen[2 * n + i] + mix_bias[i];
    balance(mixing, n, rounds, free);
    const auto stream = [=](int64_t s) { return own + s * d; };
    for (int64_t i = 0; i < n; ++i) {
      add_rows(room[i], block + t * d, mixing + i * n, n, d, stream, out + (t * n + i) * d);
    }
  }
}
}

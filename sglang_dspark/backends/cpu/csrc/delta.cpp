// Gated delta rule layers: short convolution, gates, and recurrence (delta_rule.py).
//
// A token's result does not depend on the other tokens of a call: windows are batch-invariant.

#include "lanes.h"
#include "operators.h"

namespace {

struct Rule { // of delta_rule: R sequences, value heads, key heads, V and K numbers of a head
  const float *query, *key, *value; // [N, ..], rows of `strides` floats
  const float *decay, *rate;        // [N, heads]
  float *states, *kept, *out;       // [.., heads, V, K], [.., T, heads, V, K] or null, [N, heads, V]
  const int32_t *starts, *slots, *rows; // [R + 1], [R], [R] of kept
  int64_t heads, key_heads, v, k, steps, query_stride, key_stride, value_stride;
};

// target = row / norm(row) * scale
void unit(const float *row, int64_t n, float scale, float *target) {
  const float squares = sum_of(n, [=](int64_t i, auto lanes) {
    const Floats x = lanes.load(row + i);
    return x * x;
  });
  const Floats factor = spread(scale / __builtin_sqrtf(squares + 1e-6f));
  each_vector(n, [=](int64_t i, auto lanes) {
    lanes.store(target + i, lanes.load(row + i) * factor);
  });
}

// Decay a state [V, K], correct what it says of `key`, and read it by `query`: from -> to, out [V].
void step(const Rule &rule, const float *from, float *to, const float *query, const float *key,
          const float *value, float decay, float rate, float *out) {
  const Floats kept = spread(decay);
  for (int64_t i = 0; i < rule.v; ++i) {
    const float *row = from + i * rule.k;
    float *target = to + i * rule.k;
    const float found = sum_of(rule.k, [=](int64_t j, auto lanes) {
      return lanes.load(row + j) * kept * lanes.load(key + j);
    });
    const Floats change = spread((value[i] - found) * rate);
    out[i] = sum_of(rule.k, [=](int64_t j, auto lanes) {
      const Floats state = fma(change, lanes.load(key + j), lanes.load(row + j) * kept);
      lanes.store(target + j, state);
      return state * lanes.load(query + j);
    });
  }
}

// The tokens of sequences and heads first .. end, numbered r * heads + h.
void run(void *data, int64_t first, int64_t end) {
  const Rule &rule = *static_cast<const Rule *>(data);
  float query[512], key[512]; // Python checks K
  const int64_t size = rule.v * rule.k, whole = rule.heads * size;
  for (int64_t item = first; item < end; ++item) {
    const int64_t r = item / rule.heads, h = item % rule.heads;
    const int64_t shared = h / (rule.heads / rule.key_heads) * rule.k;
    float *from = rule.states + rule.slots[r] * whole + h * size;
    for (int64_t t = rule.starts[r]; t < rule.starts[r + 1]; ++t) {
      const int64_t place = rule.kept == nullptr ? 0 : rule.rows[r] * rule.steps + t - rule.starts[r];
      float *to = rule.kept == nullptr ? from : rule.kept + place * whole + h * size;
      unit(rule.query + t * rule.query_stride + shared, rule.k,
           1.0f / __builtin_sqrtf(static_cast<float>(rule.k)), query);
      unit(rule.key + t * rule.key_stride + shared, rule.k, 1.0f, key);
      const int64_t number = t * rule.heads + h;
      step(rule, from, to, query, key, rule.value + t * rule.value_stride + h * rule.v,
           rule.decay[number], rule.rate[number], rule.out + number * rule.v);
      from = to;
    }
  }
}

} // namespace

extern "C" {

// out[t] = silu(sum_w weight[w] * seen[t + w] + bias): seen [n + width - 1, dim], weight
// [width, dim], bias [dim] or null, out [n, dim].
DSPARK_EXPORT void NAMED(convolve_rows)(const float *seen, int64_t n, int64_t dim, int64_t width,
                                        const float *weight, const float *bias, float *out) {
  for (int64_t t = 0; t < n; ++t) {
    each_vector(dim, [=](int64_t i, auto lanes) {
      Floats total = bias == nullptr ? Floats{} : lanes.load(bias + i);
      for (int64_t w = 0; w < width; ++w) {
        total = fma(lanes.load(weight + w * dim + i), lanes.load(seen + (t + w) * dim + i), total);
      }
      lanes.store(out + t * dim + i, total / (spread(1.0f) + exp32(-total)));
    });
  }
}

// decay = exp(-exp(a_log) * softplus(a + dt_bias)), rate = sigmoid(b): [n, heads].
DSPARK_EXPORT void NAMED(delta_gates)(const float *a, const float *b, const float *a_log,
                                      const float *dt_bias, int64_t n, int64_t heads, float *decay,
                                      float *rate) {
  for (int64_t t = 0; t < n; ++t, a += heads, b += heads, decay += heads, rate += heads) {
    each_vector(heads, [=](int64_t i, auto lanes) {
      const Floats x = lanes.load(a + i) + lanes.load(dt_bias + i), one = spread(1.0f);
      const Floats soft = x > spread(20.0f) ? x : log32(one + exp32(x));
      lanes.store(decay + i, exp32(-exp32(lanes.load(a_log + i)) * soft));
      lanes.store(rate + i, one / (one + exp32(-lanes.load(b + i))));
    });
  }
}

// Run the recurrence over windows; with `kept` the state behind each token goes there, and the
// states stay. Pointers and sizes as in Rule.
DSPARK_EXPORT void NAMED(delta_rule)(const float *query, int64_t query_stride, const float *key,
                                     int64_t key_stride, const float *value, int64_t value_stride,
                                     const float *decay, const float *rate, float *states,
                                     const int32_t *slots, const int32_t *starts, int64_t sequences,
                                     float *kept, const int32_t *rows, int64_t steps, int64_t heads,
                                     int64_t key_heads, int64_t v, int64_t k, float *out,
                                     int64_t threads) {
  Rule rule = {query, key, value, decay, rate, states, kept, out, starts, slots, rows,
               heads, key_heads, v, k, steps, query_stride, key_stride, value_stride};
  dspark_pool_run(run, &rule, sequences * heads, threads);
}
}

// All decoder layers of a pass in one call (layers/layer_stack.py).
//
// The arithmetic of LlamaDecoderLayer.forward (sglang/srt/models/llama.py) and
// DFlashDecoderLayer.forward (models/dflash.py), which differ in the norms of query and key heads,
// and Qwen2's, whose queries, keys and values have a bias: products by the address of a kernel of
// matmul.cpp between the operators of rows.cpp and attention.cpp. Thirty layers times nine calls
// from Python cost as much as the arithmetic between the products.

#include "layers.h"

#include <string.h>

#include "rows.h"

namespace {

// A pass through the layers, and its buffers of n rows; `mixed` is what a layer adds to `carried`.
struct Run {
  const Stack &stack;
  const Plan &plan;
  const Rows &rows;
  int64_t threads;
  int64_t n, d, f, heads_width, kv_width, qkv_width;
  float *normed, *entered, *mixed, *carried; // [n, d]
  float *qkv, *attended, *gate_up, *activated;

  Run(const Stack &stack, const Plan &plan, const Rows &rows, int64_t threads)
      : stack(stack), plan(plan), rows(rows), threads(threads), n(rows.n), d(stack.hidden),
        f(stack.mlp) {
    const Attention &a = stack.layers[0].attention;
    heads_width = a.heads * a.width, kv_width = a.kv_heads * a.width;
    qkv_width = heads_width + 2 * kv_width;
    float *free = rows.scratch;
    const auto taken = [&](int64_t width) {
      float *from = free;
      free += n * width;
      return from;
    };
    normed = taken(d), entered = taken(d), mixed = taken(d), carried = taken(d);
    qkv = taken(qkv_width), attended = taken(heads_width);
    gate_up = taken(2 * f), activated = taken(f);
  }

  void multiply(const Product &by, const float *x, int64_t k, int64_t width, float *out) const {
    stack.matmul(x, k, n, by.weight, width, k, out, static_cast<int32_t>(by.threads));
  }

  void add_bias(const float *bias) const {
    for (int64_t r = 0; r < n; ++r) {
      float *row = qkv + r * qkv_width;
      for (int64_t i = 0; i < qkv_width; ++i) row[i] += bias[i];
    }
  }

  // total = mixed + residual, and its norm.
  void add_norm(const Norm &norm, const float *residual, float *total, float *out) const {
    NAMED(add_rms_norm_rows)(mixed, d, residual, d, n, d, norm.weight, norm.epsilon, total, out);
  }

  // The first layer's input is the embedding, which has no residual yet.
  void enter(const Layer &layer, bool first) const {
    if (!first) return add_norm(layer.input, carried, entered, normed);
    memcpy(entered, rows.hidden, n * d * sizeof(float));
    if (layer.input.weight == nullptr) {
      memcpy(normed, rows.hidden, n * d * sizeof(float));
    } else {
      NAMED(rms_norm_rows)(entered, d, n, d, layer.input.weight, layer.input.epsilon, normed);
    }
  }

  int32_t attend(const Layer &layer) const {
    const Attention &a = layer.attention;
    const int64_t width = a.width;
    float *keys = qkv + heads_width;
    if (layer.query.weight != nullptr) {
      const Norm &query = layer.query, &key = layer.key;
      NAMED(rms_norm_heads)(qkv, qkv_width, n, a.heads, width, query.weight, query.epsilon);
      NAMED(rms_norm_heads)(keys, qkv_width, n, a.kv_heads, width, key.weight, key.epsilon);
    }
    NAMED(rotate_rows)(rows.positions, layer.cos_sin, layer.rotary, qkv, qkv_width, n,
                       a.heads + a.kv_heads, width);
    const Heads queries = {qkv, qkv_width, width}, new_keys = {keys, qkv_width, width};
    const Heads new_values = {keys + kv_width, qkv_width, width};
    return NAMED(attend)(&plan, &a, queries, new_keys, new_values, rows.slots, n, attended,
                         threads);
  }

  int32_t run(const Layer &layer, bool first, float *capture) const {
    enter(layer, first);
    if (capture != nullptr) memcpy(capture, entered, n * d * sizeof(float));
    multiply(layer.qkv, normed, d, qkv_width, qkv);
    if (layer.qkv_bias != nullptr) add_bias(layer.qkv_bias);
    const int32_t failed = attend(layer);
    multiply(layer.out, attended, heads_width, d, mixed);
    add_norm(layer.mlp, entered, carried, normed);
    multiply(layer.gate_up, normed, d, 2 * f, gate_up);
    NAMED(silu_and_mul_rows)(gate_up, 2 * f, n, f, activated);
    multiply(layer.down, activated, f, d, mixed);
    return failed;
  }
};

} // namespace

int32_t NAMED(layers)(const Stack *stack, const Plan *plan, const Rows *rows, int64_t threads) {
  const Run run(*stack, *plan, *rows, threads);
  for (int64_t l = 0; l < stack->count; ++l) {
    if (run.run(stack->layers[l], l == 0, rows->captures[l])) return 1;
  }
  if (stack->last.weight != nullptr) {
    run.add_norm(stack->last, run.carried, run.entered, rows->normed);
  } else {
    for (int64_t i = 0; i < run.n * run.d; ++i) rows->normed[i] = run.mixed[i] + run.carried[i];
  }
  return 0;
}

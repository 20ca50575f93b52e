// All decoder layers of a pass (layers.cpp); layer_stack.py mirrors the structs.
#pragma once
#include "attention.h"
#include "matmul.h"

struct Product {
  const void *weight; // [n, k]
  int64_t threads;
};

struct Norm {
  const float *weight; // null: no norm
  float epsilon;
};

struct Layer {
  Product qkv, out, gate_up, down;
  const float *qkv_bias;       // [(H + 2 Hkv) D], or null
  Norm input, mlp, query, key; // only layer 0 may lack `input`; models without head norms lack two
  const float *cos_sin;          // [positions, rotary]
  int64_t rotary;
  Attention attention;
};

// L layers of one shape: d, H, Hkv and D (of the first layer's attention), f.
struct Stack {
  const Layer *layers;
  int64_t count, hidden, mlp;
  Matmul matmul;
  Norm last; // behind the last layer, or null
};

// A pass of n rows. scratch: n * `scratch_width` of
// layer_spec.py floats. captures [L]: where a layer's input, with all additions, is copied, or null.
struct Rows {
  int64_t n;
  const int64_t *positions, *slots; // [n]
  const float *hidden;              // [n, d]
  float *scratch, *normed;          // normed [n, d]: the result
  float *const *captures;           // [L] of [n, d]
};

extern "C" {
// Run all layers and the last norm. Returns 0, or 1 where attention had no memory.
DSPARK_EXPORT int32_t NAMED(layers)(const Stack *stack, const Plan *plan, const Rows *rows,
                                    int64_t threads);
}

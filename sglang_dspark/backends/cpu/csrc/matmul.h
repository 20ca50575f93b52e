// Kernels of out = x W^T with few rows of x: what matmul.cpp exports for each instruction set.
#pragma once
#include <cstdint>

// Formats of W, and of x where it is rounded; numbered as in linear.py.
enum Format { kFloat32, kBfloat16, kBfloat16Dot, kInt8, kBytes, kFormats };

// x [rows, K] float32 with row_stride floats from row to row, W [N, K] in the format, out
// [rows, N].
typedef void (*Matmul)(const float *x, int64_t row_stride, int64_t rows, const void *w, int64_t n,
                       int64_t k, float *out, int32_t threads);

// By format and by the cache (1 or 2) that W is prefetched into; null where the instruction set
// lacks the multiplication.
typedef Matmul Kernels[kFormats][2];
extern const Kernels kernels_generic, kernels_avx2, kernels_avx512, kernels_avx512_dot;

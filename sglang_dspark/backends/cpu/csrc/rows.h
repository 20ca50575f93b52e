// RMSNorm, SiLU gate and rotary embedding over rows (rows.cpp), for Python and other operators.
//
// Strides are in floats from row to row; the numbers of a row are contiguous.
#pragma once
#include "operators.h"

extern "C" {
// out = x / rms(x) * weight: x [n, d], weight [d], out [n, d] contiguous, no alias of x.
DSPARK_EXPORT void NAMED(rms_norm_rows)(const float *x, int64_t stride, int64_t n, int64_t d,
                                        const float *weight, float epsilon, float *out);

// total = x + residual and out = its norm; total and out [n, d] contiguous, no alias of others.
DSPARK_EXPORT void NAMED(add_rms_norm_rows)(const float *x, int64_t stride, const float *residual,
                                            int64_t residual_stride, int64_t n, int64_t d,
                                            const float *weight, float epsilon, float *total,
                                            float *out);

// Norm heads of d in place: the first `heads` of each row of x; weight [d].
DSPARK_EXPORT void NAMED(rms_norm_heads)(float *x, int64_t stride, int64_t n, int64_t heads,
                                         int64_t d, const float *weight, float epsilon);

// out = silu(x[:, :d]) * x[:, d:]; out [n, d] contiguous.
DSPARK_EXPORT void NAMED(silu_and_mul_rows)(const float *x, int64_t stride, int64_t n, int64_t d,
                                            float *out);

// Rotate the first `rotary` dimensions of every head of d in place, halves paired: x [n, heads d],
// cos_sin [positions, rotary] (cosines, then sines), positions [n].
DSPARK_EXPORT void NAMED(rotate_rows)(const int64_t *positions, const float *cos_sin,
                                      int64_t rotary, float *x, int64_t stride, int64_t n,
                                      int64_t heads, int64_t d);
}

// RMSNorm, SiLU gate and rotary embedding: one pass each over few rows (fused_ops.py).
//
// Each row is computed by itself, in the order of lanes.h: results are batch-invariant.

#include "rows.h"

#include "lanes.h"

namespace {

inline float one_over_rms(float squares, int64_t d, float epsilon) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(d) + epsilon);
}

inline float sum_of_squares(const float *row, int64_t d) {
  return sum_of(d, [=](int64_t i, auto lanes) {
    const Floats v = lanes.load(row + i);
    return v * v;
  });
}

// target = row * scale * weight; target may be row.
inline void scale_row(const float *row, int64_t d, float scale, const float *weight,
                      float *target) {
  const Floats factor = spread(scale);
  each_vector(d, [=](int64_t i, auto lanes) {
    lanes.store(target + i, lanes.load(row + i) * factor * lanes.load(weight + i));
  });
}

} // namespace

void NAMED(rms_norm_rows)(const float *x, int64_t stride, int64_t n, int64_t d,
                          const float *weight, float epsilon, float *out) {
  for (int64_t r = 0; r < n; ++r) {
    const float *row = x + r * stride;
    scale_row(row, d, one_over_rms(sum_of_squares(row, d), d, epsilon), weight, out + r * d);
  }
}

void NAMED(add_rms_norm_rows)(const float *x, int64_t stride, const float *residual,
                              int64_t residual_stride, int64_t n, int64_t d, const float *weight,
                              float epsilon, float *total, float *out) {
  for (int64_t r = 0; r < n; ++r) {
    const float *row = x + r * stride, *carried = residual + r * residual_stride;
    float *sum = total + r * d;
    const float squares = sum_of(d, [=](int64_t i, auto lanes) {
      const Floats v = lanes.load(row + i) + lanes.load(carried + i);
      lanes.store(sum + i, v);
      return v * v;
    });
    scale_row(sum, d, one_over_rms(squares, d, epsilon), weight, out + r * d);
  }
}

void NAMED(rms_norm_heads)(float *x, int64_t stride, int64_t n, int64_t heads, int64_t d,
                           const float *weight, float epsilon) {
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      float *row = x + r * stride + h * d;
      scale_row(row, d, one_over_rms(sum_of_squares(row, d), d, epsilon), weight, row);
    }
  }
}

void NAMED(silu_and_mul_rows)(const float *x, int64_t stride, int64_t n, int64_t d, float *out) {
  for (int64_t r = 0; r < n; ++r) {
    const float *gate = x + r * stride, *up = gate + d;
    float *target = out + r * d;
    each_vector(d, [=](int64_t i, auto lanes) {
      const Floats v = lanes.load(gate + i);
      lanes.store(target + i, v / (spread(1.0f) + exp32(-v)) * lanes.load(up + i));
    });
  }
}

void NAMED(rotate_rows)(const int64_t *positions, const float *cos_sin, int64_t rotary, float *x,
                        int64_t stride, int64_t n, int64_t heads, int64_t d) {
  const int64_t half = rotary / 2;
  for (int64_t r = 0; r < n; ++r) {
    const float *cosine = cos_sin + positions[r] * rotary, *sine = cosine + half;
    for (int64_t h = 0; h < heads; ++h) {
      float *first = x + r * stride + h * d, *second = first + half;
      each_vector(half, [=](int64_t i, auto lanes) {
        const Floats a = lanes.load(first + i), b = lanes.load(second + i);
        const Floats c = lanes.load(cosine + i), s = lanes.load(sine + i);
        lanes.store(first + i, fma(a, c, -(b * s)));
        lanes.store(second + i, fma(b, c, a * s));
      });
    }
  }
}

// Rows of float32 in vectors: element by element, sums, maxima, dot products and exp.
//
// Every sum has one order on every processor, so that two servers, or one row in different batches,
// agree bitwise. Included once by an operator's source.
#pragma once
#include "vectors.h"

namespace {

constexpr int kRowLanes = 64; // of a row's sum: several vectors, so that none waits for the last add

// The vector that starts at a place of a row: all of it, or the numbers that are left.
struct Whole {
  Floats load(const float *p) const { return ::load<Floats>(p); }
  void store(float *p, Floats v) const { memcpy(p, &v, sizeof v); }
};
struct Rest {
  int64_t count;
  Floats load(const float *p) const { // 0 behind the last number
    Floats v = {};
    memcpy(&v, p, count * sizeof *p);
    return v;
  }
  void store(float *p, Floats v) const { memcpy(p, &v, count * sizeof *p); }
};

// Call body(i, lanes) for the vectors of a row of n; `lanes` loads and stores from place i on.
template <typename Body> inline void each_vector(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kNative <= n; i += kNative) body(i, Whole{});
  if (i < n) body(i, Rest{n - i});
}

// Sum vector(i, lanes) over a row of n: lane l adds places l, l + 64, ..., then lane l and lane
// l + 32, + 16, ... + 1.
template <typename Vector> inline float sum_of(int64_t n, Vector vector) {
  constexpr int parts = kRowLanes / kNative;
  Floats sums[parts] = {};
  int64_t i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes) {
    UNROLL for (int p = 0; p < parts; ++p) sums[p] += vector(i + p * kNative, Whole{});
  }
  UNROLL for (int p = 0; p < parts; ++p, i += kNative) {
    if (i >= n) break;
    sums[p] += i + kNative <= n ? vector(i, Whole{}) : vector(i, Rest{n - i});
  }
  UNROLL for (int half = parts / 2; half > 0; half /= 2) {
    UNROLL for (int p = 0; p < half; ++p) sums[p] += sums[p + half];
  }
  float found[1 + kNative];
  sum_lanes<kNative, 1>(sums, found);
  return found[0];
}

template <int K, int Q, typename Lanes>
inline void add_products(Floats (&sums)[Q][K][kParts], const float *const *keys,
                         const float *const (&queries)[Q], int64_t i, int part, Lanes lanes) {
  Floats query[Q];
  UNROLL for (int q = 0; q < Q; ++q) query[q] = lanes.load(queries[q] + i);
  UNROLL for (int k = 0; k < K; ++k) {
    const Floats key = lanes.load(keys[k] + i);
    UNROLL for (int q = 0; q < Q; ++q) sums[q][k][part] = fma(key, query[q], sums[q][k][part]);
  }
}

// Multiply K keys with Q queries, rows of n: found[q * K + k], of K Q + kNative floats. A product
// does not depend on the others: 16 lanes, each a chain of fused multiply-adds, then lane i + lane
// i + 8, + 4, + 2, + 1, as in matmul.cpp.
template <int K, int Q>
inline void dots(const float *const (&keys)[K], const float *const (&queries)[Q], int64_t n,
                 float *found) {
  constexpr int together = kWide ? K : 1; // as many as keep their sums in registers
  Floats joined[Q * K];
  UNROLL for (int first = 0; first < K; first += together) {
    Floats sums[Q][together][kParts] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      UNROLL for (int p = 0; p < kParts; ++p) {
        add_products<together, Q>(sums, keys + first, queries, i + p * kNative, p, Whole{});
      }
    }
    UNROLL for (int p = 0; p < kParts; ++p, i += kNative) {
      if (i >= n) break;
      const Rest rest = {least(n - i, kNative)};
      add_products<together, Q>(sums, keys + first, queries, i, p, rest);
    }
    UNROLL for (int q = 0; q < Q; ++q) {
      UNROLL for (int k = 0; k < together; ++k) joined[q * K + first + k] = in_one(sums[q][k]);
    }
  }
  sum_lanes<kNative, Q * K>(joined, found);
}

inline float dot(const float *a, const float *b, int64_t n) {
  float found[1 + kNative];
  dots<1, 1>({a}, {b}, n, found);
  return found[0];
}

inline Floats floor_of(Floats v) {
#if defined(__AVX512F__)
  return _mm512_floor_ps(v);
#elif defined(__AVX2__)
  return _mm256_floor_ps(v);
#else
  UNROLL for (int i = 0; i < kNative; ++i) v[i] = __builtin_floorf(v[i]);
  return v;
#endif
}

// exp to within 2e-7 relative, as exp32 of float_ops.py: below -87 (-inf too) about 1.6e-38, not 0.
inline Floats exp32(Floats x) {
  const Floats lowest = spread(-87.0f), highest = spread(88.0f);
  x = lowest > x ? lowest : x;
  x = highest < x ? highest : x;
  const Floats n = floor_of(fma(x, spread(1.4426950408889634f), spread(0.5f)));
  const Floats r = fma(-n, spread(-2.12194440e-4f), fma(-n, spread(0.693359375f), x));
  Floats p = spread(1.9875691500e-4f);
  p = fma(p, r, spread(1.3981999507e-3f));
  p = fma(p, r, spread(8.3334519073e-3f));
  p = fma(p, r, spread(4.1665795894e-2f));
  p = fma(p, r, spread(1.6666665459e-1f));
  p = fma(p, r, spread(5.0000001201e-1f));
  p = fma(p, r * r, r) + spread(1.0f);
  const Words exponent = (Words)__builtin_convertvector(n, Ints) + 127u;
  return p * (Floats)(exponent << 23);
}

// log of numbers in [1, 2^127) to within 2e-7 (Cephes' logf).
inline Floats log32(Floats x) {
  // The fraction becomes that of a number >= sqrt(1/2).
  const Ints raised = (Ints)((Words)x - 0x3f3504f3u);
  const Floats e = __builtin_convertvector(raised >> 23, Floats);
  const Floats z = (Floats)((raised & 0x7fffff) + 0x3f3504f3) - spread(1.0f);
  Floats p = spread(7.0376836292e-2f);
  p = fma(p, z, spread(-1.1514610310e-1f));
  p = fma(p, z, spread(1.1676998740e-1f));
  p = fma(p, z, spread(-1.2420140846e-1f));
  p = fma(p, z, spread(1.4249322787e-1f));
  p = fma(p, z, spread(-1.6668057665e-1f));
  p = fma(p, z, spread(2.0000714765e-1f));
  p = fma(p, z, spread(-2.4999993993e-1f));
  p = fma(p, z, spread(3.3333331174e-1f));
  p = fma(p * z, z * z, fma(e, spread(-2.12194440e-4f), spread(-0.5f) * z * z));
  return fma(e, spread(0.693359375f), z + p);
}

} // namespace

// int8 weights times rows of x that are rounded to integers. Included once, by matmul.cpp.
#pragma once
#include "matmul.h"
#include "vectors.h"

namespace {

// How rows of x are rounded for the weights of a format, and multiplied with panels of them.
template <Format F> struct Way;

// Whether the instruction set multiplies weights of a format.
template <Format F> constexpr bool kSupported = F == kFloat32 || F == kBfloat16;

// Sixteen rows of W are a panel: for each group of 64 columns the rows' float32 scales, then, two
// (int8) or four (bytes) neighbouring columns at a time, the weights of each row.
constexpr int kGroup = 64, kPanel = 16, kLine = 64;
constexpr int kStep = 4; // columns
constexpr int kScaleBytes = 4 * kPanel, kGroupBytes = kScaleBytes + kPanel * kGroup;
constexpr int kPanelAhead = 32768;  // bytes prefetched ahead into the second-level cache
constexpr float kSmallest = 0x1p-112f; // a row with no larger number is 0: see SMALLEST_ROW

inline Ints spread(int32_t number) { return number - Ints{}; }

struct Scaling {
  Floats factors; // rounded = nearest(x * factors)
  float scale;    // x = rounded * scale; NaN where a number of x is not finite
};

// Scale `count` numbers so that the largest becomes `steps`.
inline Scaling scaling(const float *x, int64_t count, float steps) {
  Floats most = {}, lost = {};
  for (int64_t c = 0; c < count; c += kNative) {
    const Floats v = load<Floats>(x + c);
    const Floats size = (Floats)((Words)v & 0x7fffffffu);
    most = size > most ? size : most; // passes NaN over
    lost += v * 0.0f;                 // 0 where all is finite, else NaN
  }
  float top = 0.0f, bad = 0.0f;
  for (int i = 0; i < kNative; ++i) {
    top = most[i] > top ? most[i] : top;
    bad += lost[i];
  }
  const bool seen = top > kSmallest;
  return {spread(seen ? steps / top : 0.0f), (seen ? top / steps : 0.0f) + bad};
}

#ifdef __AVX2__
#ifdef __AVX512F__
inline Ints nearest(Floats v) { return (Ints)_mm512_cvtps_epi32(v); } // ties to even
#else
inline Ints nearest(Floats v) { return (Ints)_mm256_cvtps_epi32(v); }
#endif

// int8 weights meet 16-bit integers of x: both products of two neighbouring columns are added.
template <> struct Way<kInt8> {
  static constexpr int kColumns = 2;
#ifdef __AVX512BW__
  typedef __m512i Weights;
  static Weights weights(const char *p) { return _mm512_cvtepi8_epi16(load<__m256i>(p)); }
  static Ints add(Ints sum, Weights w, Ints x) {
#ifdef __AVX512VNNI__
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, w, (__m512i)x);
#else
    return sum + (Ints)_mm512_madd_epi16(w, (__m512i)x);
#endif
  }
#else
  typedef __m256i Weights;
  static Weights weights(const char *p) { return _mm256_cvtepi8_epi16(load<__m128i>(p)); }
  static Ints add(Ints sum, Weights w, Ints x) {
    return sum + (Ints)_mm256_madd_epi16(w, (__m256i)x);
  }
#endif
  // The row's scale comes behind its numbers; sums of a group begin with 0.
  static Ints first(const char *, int64_t, int64_t) { return Ints{}; }
  static Floats scaled(Floats sums, Floats scale, const char *, int64_t, int64_t, Floats total) {
    return fma(sums, scale, total);
  }
  static Floats result(Floats total, const char *x, int64_t k) {
    return total * spread(load<float>(x + 2 * k));
  }
  static void round(const float *x, int64_t k, char *out) {
    const Scaling found = scaling(x, k, 32767.0f);
    for (int64_t c = 0; c < k; c += kNative) {
      const Ints whole = nearest(load<Floats>(x + c) * found.factors);
#ifdef __AVX512F__
      const __m256i shorts = _mm512_cvtepi32_epi16((__m512i)whole);
#else
      const __m256i both = _mm256_packs_epi32((__m256i)whole, (__m256i)whole);
      const __m128i shorts = _mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 0x08));
#endif
      memcpy(out + 2 * c, &shorts, sizeof shorts);
    }
    memcpy(out + 2 * k, &found.scale, sizeof found.scale);
  }
};
template <> constexpr bool kSupported<kInt8> = true;
#endif

#ifdef __AVX512VNNI__
// Weights 128 above their numbers meet bytes of x: four products are added at once. A row of x is
// its bytes, a scale for each group, and what the sums of each group begin with: -128 times the
// group's sum.
template <> struct Way<kBytes> {
  static constexpr int kColumns = 4;
  typedef __m512i Weights;
  static Weights weights(const char *p) { return load<__m512i>(p); }
  static Ints add(Ints sum, Weights w, Ints x) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, w, (__m512i)x);
  }
  static Ints first(const char *x, int64_t k, int64_t g) {
    return spread(load<int32_t>(x + k + k / kGroup * 4 + 4 * g));
  }
  static Floats scaled(Floats sums, Floats scale, const char *x, int64_t k, int64_t g, Floats total) {
    return fma(sums, scale * spread(load<float>(x + k + 4 * g)), total);
  }
  static Floats result(Floats total, const char *, int64_t) { return total; }
  static void round(const float *x, int64_t k, char *out) {
    char *scales = out + k, *firsts = scales + k / kGroup * 4;
    for (int64_t g = 0; g < k / kGroup; ++g) {
      const Scaling found = scaling(x + g * kGroup, kGroup, 127.0f);
      Ints sum = {};
      for (int64_t c = g * kGroup; c < (g + 1) * kGroup; c += kNative) {
        const Ints whole = nearest(load<Floats>(x + c) * found.factors);
        const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)whole);
        memcpy(out + c, &bytes, sizeof bytes);
        sum += whole;
      }
      const uint32_t first = -128u * static_cast<uint32_t>(_mm512_reduce_add_epi32((__m512i)sum));
      memcpy(scales + 4 * g, &found.scale, 4);
      memcpy(firsts + 4 * g, &first, 4);
    }
  }
};
template <> constexpr bool kSupported<kBytes> = true;
#endif

// M rows of x against n rows of W, PANELS vectors of kNative rows at a time.
template <typename W, int M, int PANELS>
void some_panels(const char *const (&x)[M], const char *w, int64_t k, float *out, int64_t ldo,
                 int64_t first_row, int64_t end) {
  const int64_t groups = k / kGroup, panel_bytes = groups * kGroupBytes;
  for (int64_t i = first_row; i < end; i += kNative * PANELS) {
    const char *panel = w + i / kPanel * panel_bytes;
    const int64_t lane = i % kPanel; // not 0 where a vector is half a panel
    Floats total[M][PANELS] = {};
    for (int64_t g = 0; g < groups; ++g) {
      const char *group[PANELS];
      UNROLL for (int p = 0; p < PANELS; ++p) group[p] = panel + p * panel_bytes + g * kGroupBytes;
      Ints sum[M][PANELS];
      UNROLL for (int q = 0; q < M; ++q) {
        UNROLL for (int p = 0; p < PANELS; ++p) sum[q][p] = W::first(x[q], k, g);
      }
      const auto add_step = [&](int at) __attribute__((always_inline)) {
        // A step takes one cache line of the group. The line that comes in a while is fetched with
        // it, and the group's last one, which the scales make odd, with the first. One row against
        // whole panels is as fast as bytes come by themselves.
        if constexpr (kNative * PANELS != kPanel) {
          UNROLL for (int p = 0; p < PANELS; ++p) {
            const char *ahead = group[p] + kPanelAhead;
            __builtin_prefetch(ahead + kPanel * at, 0, 2);
            if (at == 0) __builtin_prefetch(ahead + kPanel * kGroup, 0, 2);
          }
        }
        UNROLL for (int c = at; c < at + kStep; c += W::kColumns) {
          typename W::Weights weight[PANELS];
          UNROLL for (int p = 0; p < PANELS; ++p) {
            weight[p] = W::weights(group[p] + kScaleBytes + kPanel * c + W::kColumns * lane);
          }
          UNROLL for (int q = 0; q < M; ++q) {
            const Ints row = spread(load<int32_t>(x[q] + (kGroup * g + c) * 4 / W::kColumns));
            UNROLL for (int p = 0; p < PANELS; ++p) sum[q][p] = W::add(sum[q][p], weight[p], row);
          }
        }
      };
      // Unrolled for few rows, which leave registers enough. For more GCC would load all
      // weights of the group first and spill them.
      if constexpr (kWide && M <= 2) {
        UNROLL for (int at = 0; at < kGroup; at += kStep) add_step(at);
      } else {
        ROLLED for (int at = 0; at < kGroup; at += kStep) add_step(at);
      }
      UNROLL for (int p = 0; p < PANELS; ++p) {
        const Floats scale = load<Floats>(group[p] + 4 * lane);
        UNROLL for (int q = 0; q < M; ++q) {
          const Floats exact = __builtin_convertvector(sum[q][p], Floats);
          total[q][p] = W::scaled(exact, scale, x[q], k, g, total[q][p]);
        }
      }
    }
    UNROLL for (int q = 0; q < M; ++q) {
      UNROLL for (int p = 0; p < PANELS; ++p) {
        const Floats found = W::result(total[q][p], x[q], k);
        memcpy(out + q * ldo + i + p * kNative, &found, sizeof found);
      }
    }
  }
}

template <typename W, int M>
void panels(const char *xs, int64_t ldx, const char *w, int64_t k, float *out, int64_t ldo,
            int64_t n) {
  const char *x[M];
  UNROLL for (int q = 0; q < M; ++q) x[q] = xs + q * ldx;
  // From three rows on two panels together: each number of x is loaded once for both.
  constexpr int together = kWide && M >= 3 ? 2 : 1;
  const int64_t end = n - n % (kNative * together);
  some_panels<W, M, together>(x, w, k, out, ldo, 0, end);
  if constexpr (together > 1) some_panels<W, M, 1>(x, w, k, out, ldo, end, n);
}

} // namespace

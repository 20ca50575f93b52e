// out = x W^T with few rows of float32 x, W read once in its own layout (narrow_matmul.py).
//
// Compiled once for each instruction set (build flags in csrc.py), named by DSPARK_ISA. Everything
// is in an unnamed namespace and nothing is taken from the C++ library: the linker would merge an
// inline function of two objects and could keep the copy that an old processor cannot run.
//
// Order of every sum: 16 lanes, each a chain of fused multiply-adds over ascending k (32 lanes of
// products for bfloat16 dot products), then lane i + lane i + 8, + 4, + 2, + 1. For int8: exact
// integer sums over the 64 columns of a group, then one chain over ascending groups. Blocking and
// threads change which outputs are computed together and never that order, so a row of x has the
// same bits whatever rows share the product. Compiled with -ffp-contract=off for the same reason.

#include "matmul.h"

#include <stdlib.h>
#include <string.h>

#include "pool.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#ifdef __clang__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("nounroll")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL _Pragma("GCC unroll 64")
#define ROLLED _Pragma("GCC unroll 1")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kMaxBlock = 6;     // rows of x in a block
constexpr int64_t kStrip = 64;   // rows of W that stay in the second-level cache between blocks of x
constexpr int64_t kAhead = 8192; // bytes prefetched ahead into the second-level cache

#if defined(__AVX512F__)
constexpr int kNative = 16; // floats in a register
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kParts = kLanes / kNative;
constexpr bool kWide = kNative == 16;

typedef float Floats __attribute__((vector_size(4 * kNative)));
typedef int32_t Ints __attribute__((vector_size(4 * kNative)));
typedef uint16_t Halves __attribute__((vector_size(2 * kNative)));
typedef uint32_t Words __attribute__((vector_size(4 * kNative)));

template <typename V> inline V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  UNROLL for (int i = 0; i < kNative; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// What a format needs of the product: the type of a number of x in the kernels, columns per step.
template <Format F> struct Traits {
  typedef float X;
  static constexpr int kColumns = 16, kBytesPerWeight = 4;
};
template <> struct Traits<kBfloat16> {
  typedef float X;
  static constexpr int kColumns = 32, kBytesPerWeight = 2;
};
template <> struct Traits<kBfloat16Dot> {
  typedef uint16_t X;
  static constexpr int kColumns = 32, kBytesPerWeight = 2;
};

// ---- sums over lanes ---------------------------------------------------------------------------

template <int... I> struct Sequence {};
template <int N, int... I> struct Upto : Upto<N - 1, N - 1, I...> {};
template <int... I> struct Upto<0, I...> {
  typedef Sequence<I...> type;
};

// Lane i of the lower halves of all segments of `size` lanes, of two vectors side by side.
constexpr int lower(int size, int i) { return i / (size / 2) * size + i % (size / 2); }

template <int SIZE, int... I> inline Floats halves_added(Floats a, Floats b, Sequence<I...>) {
  return SHUFFLE(a, b, lower(SIZE, I)...) + SHUFFLE(a, b, lower(SIZE, I) + SIZE / 2 ...);
}

// Sum the lanes of each vector, two vectors at a time: after each level one holds twice as many sums
// with half as many lanes each. sums[i]: that of v[i].
template <int SIZE, int COUNT> inline void sum_lanes(const Floats *v, float *sums) {
  if constexpr (SIZE == 1) {
    memcpy(sums, v, COUNT * sizeof *v);
  } else {
    constexpr int half = (COUNT + 1) / 2;
    Floats joined[half];
    UNROLL for (int i = 0; i < half; ++i) {
      const Floats second = 2 * i + 1 < COUNT ? v[2 * i + 1] : Floats{};
      joined[i] = halves_added<SIZE>(v[2 * i], second, typename Upto<kNative>::type());
    }
    sum_lanes<SIZE / 2, half>(joined, sums);
  }
}

// ---- float32 and bfloat16 ----------------------------------------------------------------------

// Weights c .. c + kNative of a row as float32.
template <Format F> inline Floats weights(const char *row, int64_t c) {
  if constexpr (F == kFloat32) {
    return load<Floats>(row + 4 * c);
  } else {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(row + 2 * c)), 16);
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(row + 2 * c)), 16);
#else
    return (Floats)(__builtin_convertvector(load<Halves>(row + 2 * c), Words) << 16);
#endif
  }
}

// Add one step over k, Traits<F>::kColumns columns from c on, to sum[q][p] for R rows of W and M
// of x.
template <Format F, int M, int R>
inline void step(Floats (&sum)[M][R][kParts], const char *const (&w)[R],
                 const typename Traits<F>::X *const (&x)[M], int64_t c) {
  if constexpr (F == kBfloat16Dot) {
#ifdef __AVX512BF16__
    __m512bh weight[R];
    UNROLL for (int p = 0; p < R; ++p) weight[p] = (__m512bh)load<__m512i>(w[p] + 2 * c);
    UNROLL for (int q = 0; q < M; ++q) {
      const __m512bh row = (__m512bh)load<__m512i>(x[q] + c);
      UNROLL for (int p = 0; p < R; ++p) {
        sum[q][p][0] = _mm512_dpbf16_ps(sum[q][p][0], weight[p], row);
      }
    }
#endif
  } else {
    UNROLL for (int at = 0; at < Traits<F>::kColumns; at += kNative) {
      const int part = at / kNative % kParts;
      Floats weight[R];
      UNROLL for (int p = 0; p < R; ++p) weight[p] = weights<F>(w[p], c + at);
      UNROLL for (int q = 0; q < M; ++q) {
        const Floats row = load<Floats>(x[q] + c + at);
        UNROLL for (int p = 0; p < R; ++p) {
          sum[q][p][part] = fma(weight[p], row, sum[q][p][part]);
        }
      }
    }
  }
}

// M rows of x against n rows of W, R at a time (R divides n), out[q * ldo + i].
template <Format F, int M, int R, int LEVEL>
void block(const void *xs, int64_t ldx, const char *w, int64_t k, float *out, int64_t ldo,
           int64_t n) {
  typedef typename Traits<F>::X X;
  constexpr int size = Traits<F>::kBytesPerWeight;
  const int64_t bytes = k * size;
  // Into the second level W can come from further ahead; the first has room for the next rows.
  const int64_t ahead = LEVEL == 2 ? kAhead : bytes * (R > 2 ? R : 2);
  const X *x[M];
  UNROLL for (int q = 0; q < M; ++q) x[q] = static_cast<const X *>(xs) + q * ldx;
  for (int64_t i = 0; i < n; i += R) {
    const char *row[R];
    UNROLL for (int p = 0; p < R; ++p) row[p] = w + (i + p) * bytes;
    Floats sum[M][R][kParts] = {};
    for (int64_t c = 0; c < k; c += Traits<F>::kColumns) {
      // A step takes 64 bytes of a row, one cache line.
      UNROLL for (int p = 0; p < R; ++p) {
        __builtin_prefetch(row[p] + c * size + ahead, 0, LEVEL == 2 ? 2 : 3);
      }
      step<F, M, R>(sum, row, x, c);
    }
    Floats folded[M * R];
    UNROLL for (int q = 0; q < M; ++q) {
      UNROLL for (int p = 0; p < R; ++p) {
        if constexpr (kParts == 1) {
          folded[q * R + p] = sum[q][p][0];
        } else if constexpr (kParts == 2) {
          folded[q * R + p] = sum[q][p][0] + sum[q][p][1];
        } else {
          folded[q * R + p] = (sum[q][p][0] + sum[q][p][2]) + (sum[q][p][1] + sum[q][p][3]);
        }
      }
    }
    float sums[M * R + kNative];
    sum_lanes<kNative, M * R>(folded, sums);
    UNROLL for (int q = 0; q < M; ++q) memcpy(out + q * ldo + i, sums + q * R, R * sizeof(float));
  }
}

// ---- int8 --------------------------------------------------------------------------------------

#ifdef __AVX2__

// Sixteen rows of W are a panel: for each group of 64 columns the rows' float32 scales, then, two
// (int8) or four (bytes) neighbouring columns at a time, the weights of each row.
constexpr int kGroup = 64, kPanel = 16, kLine = 64;
constexpr int kStep = 4; // columns
constexpr int kScaleBytes = 4 * kPanel, kGroupBytes = kScaleBytes + kPanel * kGroup;
constexpr int kPanelAhead = 32768;  // bytes prefetched ahead into the second-level cache
constexpr float kSmallest = 0x1p-112f; // a row with no larger number is 0: see SMALLEST_ROW
constexpr int kPadding = 32; // numbers after a rounded row: its scale, and whole cache lines

#ifdef __AVX512F__
inline Ints spread(int32_t number) { return (Ints)_mm512_set1_epi32(number); }
inline Floats spread(float number) { return _mm512_set1_ps(number); }
inline Ints nearest(Floats v) { return (Ints)_mm512_cvtps_epi32(v); } // ties to even
#else
inline Ints spread(int32_t number) { return (Ints)_mm256_set1_epi32(number); }
inline Floats spread(float number) { return _mm256_set1_ps(number); }
inline Ints nearest(Floats v) { return (Ints)_mm256_cvtps_epi32(v); }
#endif

// int8 weights meet 16-bit integers of x: both products of two neighbouring columns are added.
struct Pairs {
  typedef int16_t X;
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
#elif defined(__AVX2__)
  typedef __m256i Weights;
  static Weights weights(const char *p) { return _mm256_cvtepi8_epi16(load<__m128i>(p)); }
  static Ints add(Ints sum, Weights w, Ints x) {
    return sum + (Ints)_mm256_madd_epi16(w, (__m256i)x);
  }
#endif
  // The row's scale comes behind its numbers; sums of a group begin with 0.
  static Ints first(const X *, int64_t, int64_t) { return Ints{}; }
  static Floats scaled(Floats sums, Floats scale, const X *, int64_t, int64_t, Floats total) {
    return fma(sums, scale, total);
  }
  static Floats result(Floats total, const X *x, int64_t k) {
    return total * spread(load<float>(x + k));
  }
};

#ifdef __AVX512VNNI__
// Weights 128 above their numbers meet bytes of x: four products are added at once. A row of x is
// its bytes, a scale for each group, and what the sums of each group begin with: -128 times the
// group's sum.
struct Fours {
  typedef int8_t X;
  static constexpr int kColumns = 4;
  typedef __m512i Weights;
  static Weights weights(const char *p) { return load<__m512i>(p); }
  static Ints add(Ints sum, Weights w, Ints x) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, w, (__m512i)x);
  }
  static Ints first(const X *x, int64_t k, int64_t g) {
    return spread(load<int32_t>(x + k + k / kGroup * 4 + 4 * g));
  }
  static Floats scaled(Floats sums, Floats scale, const X *x, int64_t k, int64_t g, Floats total) {
    return fma(sums, scale * spread(load<float>(x + k + 4 * g)), total);
  }
  static Floats result(Floats total, const X *, int64_t) { return total; }
};
#endif

// M rows of x against n rows of W, PANELS vectors of kNative rows at a time.
template <typename Way, int M, int PANELS>
void some_panels(const typename Way::X *const (&x)[M], const char *w, int64_t k, float *out,
                 int64_t ldo, int64_t first_row, int64_t end) {
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
        UNROLL for (int p = 0; p < PANELS; ++p) sum[q][p] = Way::first(x[q], k, g);
      }
      // Not unrolled: GCC would load all weights of the group first and spill them.
      ROLLED for (int at = 0; at < kGroup; at += kStep) {
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
        UNROLL for (int c = at; c < at + kStep; c += Way::kColumns) {
          typename Way::Weights weight[PANELS];
          UNROLL for (int p = 0; p < PANELS; ++p) {
            weight[p] = Way::weights(group[p] + kScaleBytes + kPanel * c + Way::kColumns * lane);
          }
          UNROLL for (int q = 0; q < M; ++q) {
            const Ints row = spread(load<int32_t>(x[q] + kGroup * g + c));
            UNROLL for (int p = 0; p < PANELS; ++p) sum[q][p] = Way::add(sum[q][p], weight[p], row);
          }
        }
      }
      UNROLL for (int p = 0; p < PANELS; ++p) {
        const Floats scale = load<Floats>(group[p] + 4 * lane);
        UNROLL for (int q = 0; q < M; ++q) {
          const Floats exact = __builtin_convertvector(sum[q][p], Floats);
          total[q][p] = Way::scaled(exact, scale, x[q], k, g, total[q][p]);
        }
      }
    }
    UNROLL for (int q = 0; q < M; ++q) {
      UNROLL for (int p = 0; p < PANELS; ++p) {
        const Floats found = Way::result(total[q][p], x[q], k);
        memcpy(out + q * ldo + i + p * kNative, &found, sizeof found);
      }
    }
  }
}

template <typename Way, int M>
void panels(const void *xs, int64_t ldx, const char *w, int64_t k, float *out, int64_t ldo,
            int64_t n) {
  const typename Way::X *x[M];
  UNROLL for (int q = 0; q < M; ++q) x[q] = static_cast<const typename Way::X *>(xs) + q * ldx;
  // From three rows on two panels together: each number of x is loaded once for both.
  constexpr int together = kWide && M >= 3 ? 2 : 1;
  const int64_t end = n - n % (kNative * together);
  some_panels<Way, M, together>(x, w, k, out, ldo, 0, end);
  if constexpr (together > 1) some_panels<Way, M, 1>(x, w, k, out, ldo, end, n);
}


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

void round_to_pairs(const float *x, int64_t k, char *out) {
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
#endif

#ifdef __AVX512VNNI__
void round_to_fours(const float *x, int64_t k, char *out) {
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
#endif

#ifdef __AVX512BF16__
void round_to_bfloat16(const float *x, int64_t k, char *out) {
  for (int64_t c = 0; c < k; c += kNative) {
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh(load<Floats>(x + c));
    memcpy(out + 2 * c, &halves, sizeof halves);
  }
}

// Rows of x multiplied while W comes from memory: as many as the first-level cache holds next to
// it, but six in any case; all rows in even blocks.
int64_t rounded_block(int64_t rows, int64_t k) {
  const int64_t held = 12288 / k, most = held < 6 ? 6 : least(held, 12);
  const int64_t blocks = (rows + most - 1) / most;
  return (rows + blocks - 1) / blocks;
}
#endif

// ---- the whole product -------------------------------------------------------------------------

typedef void (*Block)(const void *x, int64_t ldx, const char *w, int64_t k, float *out, int64_t ldo,
                      int64_t n);

// Rows of W taken with M rows of x. 16 registers of 8 floats hold 6 sums of 16 lanes next to the
// operands, 32 registers of 16 floats hold 24.
constexpr int w_rows(int m) {
  if (kWide) return m <= 6 ? 4 : 2;
  return m == 1 ? 4 : m <= 3 ? 2 : 1;
}

template <Format F, int LEVEL, int M> constexpr Block block_of() {
#ifdef __AVX2__
  if constexpr (F == kInt8) return panels<Pairs, M>;
#endif
#ifdef __AVX512VNNI__
  if constexpr (F == kBytes) return panels<Fours, M>;
#endif
  if constexpr (F == kFloat32 || F == kBfloat16 || F == kBfloat16Dot) {
    return block<F, M, w_rows(M), LEVEL>;
  }
  return nullptr;
}

template <Format F, int LEVEL, int... M>
inline Block chosen(int64_t rows, Sequence<M...>) {
  static constexpr Block table[] = {block_of<F, LEVEL, M + 1>()...};
  return table[rows - 1];
}

struct Product {
  const char *x;  // float32, or rounded
  int64_t ldx;    // numbers from row to row
  int64_t x_size; // bytes of a number
  int64_t rows, block;
  const char *w;
  int64_t n, k;
  float *out;
};

template <Format F> constexpr int64_t row_bytes(int64_t k) {
  if (F == kInt8 || F == kBytes) return k + k / 16; // with its scales, averaged over a panel
  return k * (F == kFloat32 ? 4 : 2);
}

// Rows 16 first .. 16 end of W: whole groups, so no thread writes in another one's.
template <Format F, int LEVEL> void strips(void *data, int64_t first, int64_t end) {
  const Product &job = *static_cast<const Product *>(data);
  constexpr int most = F == kBfloat16Dot ? 12 : kMaxBlock;
  for (int64_t i = first * kLanes; i < end * kLanes; i += kStrip) {
    const int64_t n = least(end * kLanes - i, kStrip);
    for (int64_t j = 0; j < job.rows; j += job.block) {
      const int64_t rows = least(job.rows - j, job.block);
      chosen<F, LEVEL>(rows, typename Upto<most>::type())(
          job.x + j * job.ldx * job.x_size, job.ldx, job.w + i * row_bytes<F>(job.k), job.k,
          job.out + j * job.n + i, job.n, n);
    }
  }
}

template <Format F, int LEVEL>
void matmul(const float *x, int64_t row_stride, int64_t rows, int64_t block, const void *w,
            int64_t n, int64_t k, float *out, int32_t threads) {
  Product job = {reinterpret_cast<const char *>(x), row_stride, 4, rows, block,
                 static_cast<const char *>(w), n, k, out};
  char *rounded = nullptr;
#ifdef __AVX2__
  if constexpr (F == kInt8 || F == kBfloat16Dot || F == kBytes) {
    // Whole cache lines, and one between two rows: rows of 4 KiB would share cache sets.
    job.x_size = F == kBytes ? 1 : 2;
    job.ldx = F == kBytes ? (k + k / kGroup * 8 + 2 * kLine - 1) / kLine * kLine : k + kPadding;
    const int64_t stride = job.ldx * job.x_size;
    rounded = static_cast<char *>(aligned_alloc(kLine, rows * stride));
    for (int64_t j = 0; j < rows; ++j) {
      const float *row = x + j * row_stride;
      char *to = rounded + j * stride;
      if constexpr (F == kInt8) round_to_pairs(row, k, to);
#ifdef __AVX512VNNI__
      if constexpr (F == kBytes) round_to_fours(row, k, to);
#endif
#ifdef __AVX512BF16__
      if constexpr (F == kBfloat16Dot) round_to_bfloat16(row, k, to);
#endif
    }
    job.x = rounded;
  }
#ifdef __AVX512BF16__
  if constexpr (F == kBfloat16Dot) job.block = rounded_block(rows, k);
#endif
#endif
  dspark_pool_run(strips<F, LEVEL>, &job, n / kLanes, threads);
  free(rounded);
}

#define JOINED(a, b) a##b
#define NAMED(isa) JOINED(kernels_, isa)

} // namespace

extern const Kernels NAMED(DSPARK_ISA) = {
    {matmul<kFloat32, 1>, matmul<kFloat32, 2>},
    {matmul<kBfloat16, 1>, matmul<kBfloat16, 2>},
#ifdef __AVX512BF16__
    {matmul<kBfloat16Dot, 1>, matmul<kBfloat16Dot, 2>},
#else
    {nullptr, nullptr},
#endif
#ifdef __AVX2__
    {matmul<kInt8, 1>, matmul<kInt8, 1>},
#else
    {nullptr, nullptr},
#endif
#ifdef __AVX512VNNI__
    {matmul<kBytes, 1>, matmul<kBytes, 1>},
#else
    {nullptr, nullptr},
#endif
};

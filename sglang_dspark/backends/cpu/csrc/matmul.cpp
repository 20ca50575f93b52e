// out = x W^T with few rows of float32 x, W read once in its own layout (linear.py).
//
// Compiled once for each instruction set (build flags in csrc.py), named by DSPARK_ISA. Everything
// is in an unnamed namespace and nothing is taken from the C++ library: the linker would merge an
// inline function of two objects and could keep the copy that an old processor cannot run.
//
// Order of every sum: 16 lanes, each a chain of fused multiply-adds over ascending k (32 lanes of
// products for bfloat16 dot products), then lane i + lane i + 8, + 4, + 2, + 1. For int8: exact
// integer sums over the 64 columns of a group, then one chain over ascending groups. Blocking and
// threads change which outputs are computed together and never that order, so the product is
// batch-invariant. Compiled with -ffp-contract=off for the same reason.

#include "matmul.h"

#include <stdlib.h>

#include "panels.h"
#include "pool.h"
#include "vectors.h"

namespace {

constexpr int kMaxBlock = 6;     // rows of x in a block
constexpr int64_t kStrip = 64;   // rows of W in the second-level cache while blocks of x pass
constexpr int64_t kAhead = 8192; // bytes prefetched ahead into the second-level cache

// Traits of a format in the product: the type of a number of x in the kernels, columns per step.
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
    UNROLL for (int p = 0; p < R; ++p) {
      __m512i loaded = load<__m512i>(w[p] + 2 * c);
      hold(loaded);
      weight[p] = (__m512bh)loaded;
    }
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
        folded[q * R + p] = in_one(sum[q][p]);
      }
    }
    float sums[M * R + kNative];
    sum_lanes<kNative, M * R>(folded, sums);
    UNROLL for (int q = 0; q < M; ++q) {
      if constexpr (R == 4) {
        memcpy(out + q * ldo + i, sums + q * R, R * sizeof(float));
      } else { // GCC would take a memcpy of fewer through integer registers
        UNROLL for (int p = 0; p < R; ++p) out[q * ldo + i + p] = sums[q * R + p];
      }
    }
  }
}

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

struct ProductJob {
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
  const ProductJob &job = *static_cast<const ProductJob *>(data);
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
  ProductJob job = {reinterpret_cast<const char *>(x), row_stride, 4, rows, block,
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
#define KERNELS_OF(isa) JOINED(kernels_, isa)

} // namespace

extern const Kernels KERNELS_OF(DSPARK_ISA) = {
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

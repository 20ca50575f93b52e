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

constexpr int weight_bytes(Format f) { return f == kFloat32 ? 4 : 2; } // of float formats

// ---- float32 and bfloat16 ----------------------------------------------------------------------

// Weights of a row from column c on: kNative as float32, or 2 kNative for a dot product.
template <Format F> inline Floats weights(const char *row, int64_t c) {
  if constexpr (F == kFloat32) {
    return load<Floats>(row + 4 * c);
  } else if constexpr (F == kBfloat16Dot) {
    Floats loaded = load<Floats>(row + 2 * c);
    hold(loaded);
    return loaded;
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

template <Format F> inline Floats add_product(Floats weight, Floats row, Floats sum) {
#ifdef __AVX512BF16__
  if constexpr (F == kBfloat16Dot) return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)row);
#endif
  return fma(weight, row, sum);
}

// Add one step over k, a cache line of columns from c on, to sum[q][p] for R rows of W and M of x.
template <Format F, int M, int R>
inline void step(Floats (&sum)[M][R][kParts], const char *const (&w)[R], const char *const (&x)[M],
                 int64_t c) {
  constexpr int columns = kLine / weight_bytes(F), size = F == kBfloat16Dot ? 2 : 4; // of x
  constexpr int together = sizeof(Floats) / size;
  UNROLL for (int at = 0; at < columns; at += together) {
    const int part = at / together % kParts;
    Floats weight[R];
    UNROLL for (int p = 0; p < R; ++p) weight[p] = weights<F>(w[p], c + at);
    UNROLL for (int q = 0; q < M; ++q) {
      const Floats row = load<Floats>(x[q] + size * (c + at));
      UNROLL for (int p = 0; p < R; ++p) {
        sum[q][p][part] = add_product<F>(weight[p], row, sum[q][p][part]);
      }
    }
  }
}

// M rows of x against n rows of W, R at a time (R divides n), out[q * ldo + i].
template <Format F, int M, int R, int LEVEL>
void block(const char *xs, int64_t ldx, const char *w, int64_t k, float *out, int64_t ldo,
           int64_t n) {
  constexpr int64_t size = weight_bytes(F);
  const int64_t bytes = k * size;
  // Into the second level W can come from further ahead; the first has room for the next rows.
  const int64_t ahead = LEVEL == 2 ? kAhead : bytes * (R > 2 ? R : 2);
  const char *x[M];
  UNROLL for (int q = 0; q < M; ++q) x[q] = xs + q * ldx;
  for (int64_t i = 0; i < n; i += R) {
    const char *row[R];
    UNROLL for (int p = 0; p < R; ++p) row[p] = w + (i + p) * bytes;
    Floats sum[M][R][kParts] = {};
    for (int64_t c = 0; c < k; c += kLine / size) {
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
template <> struct Way<kBfloat16Dot> {
  static void round(const float *x, int64_t k, char *out) {
    for (int64_t c = 0; c < k; c += kNative) {
      const __m256i halves = (__m256i)_mm512_cvtneps_pbh(load<Floats>(x + c));
      memcpy(out + 2 * c, &halves, sizeof halves);
    }
  }
};
template <> constexpr bool kSupported<kBfloat16Dot> = true;
#endif

// ---- the whole product -------------------------------------------------------------------------

typedef void (*Block)(const char *x, int64_t ldx, const char *w, int64_t k, float *out, int64_t ldo,
                      int64_t n);

// Rows of W taken with M rows of x. 16 registers of 8 floats hold 6 sums of 16 lanes next to the
// operands, 32 registers of 16 floats hold 24.
constexpr int w_rows(int m) {
  if (kWide) return m <= 6 ? 4 : 2;
  return m == 1 ? 4 : m <= 3 ? 2 : 1;
}

template <Format F, int LEVEL, int M> constexpr Block block_of() {
  if constexpr (F == kInt8 || F == kBytes) return panels<Way<F>, M>;
  else return block<F, M, w_rows(M), LEVEL>;
}

template <Format F, int LEVEL, int... M>
inline Block chosen(int64_t rows, Sequence<M...>) {
  static constexpr Block table[] = {block_of<F, LEVEL, M + 1>()...};
  return table[rows - 1];
}

// Rows of x multiplied while W comes from memory, in even blocks of at most six; of rounded ones
// as many as the first-level cache holds next to W, but six in any case.
template <Format F> inline int64_t block_rows(int64_t rows, int64_t k) {
  int64_t most = kMaxBlock;
  if (F == kBfloat16Dot && 12288 / k > most) most = least(12288 / k, 2 * kMaxBlock);
  const int64_t blocks = (rows + most - 1) / most;
  return (rows + blocks - 1) / blocks;
}

struct ProductJob {
  const char *x;           // float32, or rounded
  int64_t ldx, rows, block; // ldx: bytes from row to row
  const char *w;
  int64_t n, k;
  float *out;
};

template <Format F> constexpr int64_t row_bytes(int64_t k) {
  if (F == kInt8 || F == kBytes) return k + k / 16; // with its scales, averaged over a panel
  return k * weight_bytes(F);
}

// Rows 16 first .. 16 end of W: whole groups, so no thread writes in another one's.
template <Format F, int LEVEL> void strips(void *data, int64_t first, int64_t end) {
  const ProductJob &job = *static_cast<const ProductJob *>(data);
  constexpr int most = F == kBfloat16Dot ? 2 * kMaxBlock : kMaxBlock;
  for (int64_t i = first * kLanes; i < end * kLanes; i += kStrip) {
    const int64_t n = least(end * kLanes - i, kStrip);
    for (int64_t j = 0; j < job.rows; j += job.block) {
      const int64_t rows = least(job.rows - j, job.block);
      chosen<F, LEVEL>(rows, typename Upto<most>::type())(
          job.x + j * job.ldx, job.ldx, job.w + i * row_bytes<F>(job.k), job.k,
          job.out + j * job.n + i, job.n, n);
    }
  }
}

template <Format F, int LEVEL>
void matmul(const float *x, int64_t row_stride, int64_t rows, const void *w, int64_t n, int64_t k,
            float *out, int32_t threads) {
  ProductJob job = {reinterpret_cast<const char *>(x), 4 * row_stride, rows,
                    block_rows<F>(rows, k), static_cast<const char *>(w), n, k, out};
  char *rounded = nullptr;
  if constexpr (F == kInt8 || F == kBfloat16Dot || F == kBytes) {
    // Whole cache lines, and one between two rows: rows of 4 KiB would share cache sets.
    const int64_t bytes = F == kBytes ? k + k / kGroup * 8 + kLine - 1 : 2 * k;
    job.ldx = bytes / kLine * kLine + kLine;
    rounded = static_cast<char *>(aligned_alloc(kLine, rows * job.ldx));
    for (int64_t j = 0; j < rows; ++j) Way<F>::round(x + j * row_stride, k, rounded + j * job.ldx);
    job.x = rounded;
  }
  dspark_pool_run(strips<F, LEVEL>, &job, n / kLanes, threads);
  free(rounded);
}

template <Format F, int LEVEL> constexpr Matmul kernel() {
  if constexpr (kSupported<F>) return matmul<F, LEVEL>;
  else return nullptr;
}

#define JOINED(a, b) a##b
#define KERNELS_OF(isa) JOINED(kernels_, isa)

} // namespace

extern const Kernels KERNELS_OF(DSPARK_ISA) = {
    {kernel<kFloat32, 1>(), kernel<kFloat32, 2>()},
    {kernel<kBfloat16, 1>(), kernel<kBfloat16, 2>()},
    {kernel<kBfloat16Dot, 1>(), kernel<kBfloat16Dot, 2>()},
    {kernel<kInt8, 1>(), kernel<kInt8, 1>()},
    {kernel<kBytes, 1>(), kernel<kBytes, 1>()},
};

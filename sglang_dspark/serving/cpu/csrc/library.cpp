// Choose kernels by the processor: the library's interface to Python (csrc.py).

#include "matmul.h"
#include "pool.h"

extern "C" {

// What the processor has, as bits: 1 AVX2 and FMA, 2 AVX-512 (F, BW, CD, DQ, VL), 4 AVX512-VNNI,
// 8 AVX512-BF16, 16 an AMD processor. Others than x86-64 have bit 0 alone: fused multiply-add.
DSPARK_EXPORT int32_t dspark_processor() {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  const bool vnni = v4 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  return v3 | v4 << 1 | vnni << 2 | bf16 << 3 | (__builtin_cpu_is("amd") ? 1 : 0) << 4;
#else
  return 1;
#endif
}

// The kernel for a processor with such bits, a format and the cache that W is prefetched into (1 or
// 2); null where the processor lacks the multiplication.
DSPARK_EXPORT Matmul dspark_matmul(int32_t processor, int32_t format, int32_t level) {
  const Kernels *kernels = nullptr;
#ifdef __x86_64__
  if (processor & 1) kernels = &kernels_avx2;
  if (processor & 2) kernels = &kernels_avx512;
  if (processor & 4) kernels = &kernels_avx512_dot;
  if (format == kBfloat16Dot && !(processor & 8)) kernels = nullptr;
#else
  if (processor & 1) kernels = &kernels_generic;
#endif
  return kernels == nullptr ? nullptr : (*kernels)[format][level - 1];
}
}

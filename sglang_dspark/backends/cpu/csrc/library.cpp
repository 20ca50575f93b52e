// Choose kernels by the processor: the library's interface to Python (csrc.py).

#include "matmul.h"
#include "pool.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace {

bool all(uint32_t found, uint32_t wanted) { return (found & wanted) == wanted; }

#ifdef __x86_64__
// __builtin_cpu_supports is not used: Zig's C++ compiler links no run-time part for it.
int32_t features() {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0, level = 0, extended = 0, vendor = 0;
  if (!__get_cpuid(0, &level, &vendor, &ecx, &edx) || level < 7) return 0;
  const bool amd = vendor == signature_AMD_ebx;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  if (!all(ecx, bit_OSXSAVE | bit_AVX | bit_FMA)) return 0;
  uint32_t saved, high;
  asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0)); // registers the operating system saves
  __get_cpuid_count(7, 0, &eax, &extended, &ecx, &edx);
  __get_cpuid_count(7, 1, &eax, &ebx, &level, &edx);
  const bool v3 = all(saved, 0x6) && all(extended, bit_AVX2 | bit_BMI | bit_BMI2);
  const bool v4 = v3 && all(saved, 0xe6) &&
                  all(extended, bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ |
                                    bit_AVX512VL);
  const bool vnni = v4 && all(ecx, bit_AVX512VNNI), bf16 = vnni && all(eax, 1 << 5);
  return v3 | v4 << 1 | vnni << 2 | bf16 << 3 | amd << 4;
}
#endif

} // namespace

extern "C" {

// What the processor has, as bits: 1 AVX2 and FMA, 2 AVX-512 (F, BW, CD, DQ, VL), 4 AVX512-VNNI,
// 8 AVX512-BF16, 16 an AMD processor. Others than x86-64 have bit 0 alone: fused multiply-add.
DSPARK_EXPORT int32_t dspark_processor() {
#ifdef __x86_64__
  return features();
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

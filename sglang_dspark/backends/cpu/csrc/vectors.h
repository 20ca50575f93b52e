// Vectors of one register, and sums over their lanes. Included once by a source that is compiled
// for several instruction sets: the comment of matmul.cpp says why all of this is in an unnamed
// namespace and nothing is taken from the C++ library.
#pragma once
#include <stdint.h>
#include <string.h>

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

constexpr int kLanes = 16; // of a sum, in as many registers as it takes

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
typedef float Quarter __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(4 * kNative)));
typedef uint16_t Halves __attribute__((vector_size(2 * kNative)));
typedef uint32_t Words __attribute__((vector_size(4 * kNative)));

template <typename V> inline V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Keep a vector in a register: GCC would load it again for each use.
template <typename V> inline void hold(V &v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#else
  (void)v;
#endif
}

// Without zero, which is not added: -0 would become 0.
inline Floats spread(float number) { return number - Floats{}; }

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

template <int... I> struct Sequence {};
template <int N, int... I> struct Upto : Upto<N - 1, N - 1, I...> {};
template <int... I> struct Upto<0, I...> {
  typedef Sequence<I...> type;
};

// Add the registers of 16 lanes: lane i + lane i + 8, then + 4, as far as they are in several.
inline Floats in_one(const Floats (&parts)[kParts]) {
  if constexpr (kParts == 1) {
    return parts[0];
  } else if constexpr (kParts == 2) {
    return parts[0] + parts[1];
  } else {
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
  }
}

// Lane i of the lower halves of all segments of `size` lanes, of two vectors side by side.
constexpr int lower(int size, int i) { return i / (size / 2) * size + i % (size / 2); }

template <int SIZE, int... I> inline Floats halves_added(Floats a, Floats b, Sequence<I...>) {
  return SHUFFLE(a, b, lower(SIZE, I)...) + SHUFFLE(a, b, lower(SIZE, I) + SIZE / 2 ...);
}

// Sum the lanes of each vector, two vectors at a time: after each level one holds twice as many
// sums with half as many lanes each. sums[i]: that of v[i].
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

} // namespace

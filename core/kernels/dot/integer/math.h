// Class int8, the arithmetic of a span: 256 inputs whose 8 groups of 32 lie in 8 lanes (Spans in
// layouts.h). Codes times codes are exact integers; a lane meets fp32 once a span. Included by
// ISA files only.
#pragma once
#include <immintrin.h>

#include "base/types.h"
#include "kernels/dot/layouts.h"

namespace cpumoe::CPUMOE_NS {

// What a product takes: 32 codes, or with VNNI 64, two vectors of the layout side by side.
#ifdef __AVX512VNNI__
constexpr bool kVnni = true;
using Codes = __m512i;
CPUMOE_INLINE Codes load_register(const char* p) { return _mm512_loadu_si512(p); }
CPUMOE_INLINE void store_register(char* p, Codes v) { _mm512_store_si512(p, v); }
// One number a lane, in both halves.
CPUMOE_INLINE Codes load_lanes(const char* p) {
  return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}
CPUMOE_INLINE void store_lanes(char* p, Codes v) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(v));
}
#else
constexpr bool kVnni = false;
using Codes = __m256i;
CPUMOE_INLINE Codes load_register(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
CPUMOE_INLINE void store_register(char* p, Codes v) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), v);
}
CPUMOE_INLINE Codes load_lanes(const char* p) { return load_register(p); }
CPUMOE_INLINE void store_lanes(char* p, Codes v) { store_register(p, v); }
#endif
constexpr int kRegisters = int(256 / sizeof(Codes));  // of a span

// How a code enters a product.
struct Math {
  // Signed bytes: maddubs(|w|, sign(a, w)), at most 128 * 127 * 2, widened at once. Else unsigned
  // codes whose sums over a lane (16 products each half of it, 8 with `parts`) fit in 16 bits after
  // `middle` has been subtracted; before that they may wrap. Neither with VNNI.
  bool bytes = false;
  int middle = 0;
  // A group's halves of 16 inputs are apart: whole (no), ints (factors s16, or plain 1 without
  // `scaled`), floats (one fp32 scale each).
  enum Parts { whole, ints, floats } parts = whole;
  bool scaled = false;
  // Signed bytes whose negative ones have been summed up beforehand (c0; of parts c1, too): -a is
  // the complement of a plus 1, and a complement costs less than a sign.
  bool counted = false;
  // + offset * sum of the activations, per group or per half.
  enum Offset { none, group, halves } offset = none;
};

// fp32 scales and offsets per lane; s16 factors per pair of codes (VNNI: s32 per lane) or s32 counts
// per lane; which are set depends on Math.
struct Factors {
  __m256 s0, s1, o0, o1;
  Codes c0, c1;
};

CPUMOE_INLINE __m256i load_codes(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
CPUMOE_INLINE __m256 load_floats(const char* p) {
  return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
}

// The sums of eight vectors' lanes, in order.
CPUMOE_INLINE __m256 sum_lanes(const __m256 v[8]) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

}  // namespace cpumoe::CPUMOE_NS

// Element codes to fp32, 8 or 16 at a time, from any alignment. Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "base/types.h"

namespace cpumoe::CPUMOE_NS {

// Every code offers
//   load8(p)       8 elements in order
//   lo(p), hi(p)   16 elements in two halves, in the cheapest order: the first and the last 8, or
//                  (kEvenOdd) the 8 even and the 8 odd ones
struct F32 {
  static constexpr Code kCode = Code::f32;
  static constexpr int64_t kBytes = 4;
  static constexpr bool kEvenOdd = false;
  CPUMOE_INLINE __m256 load8(const char* p) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  }
  CPUMOE_INLINE __m256 lo(const char* p) { return load8(p); }
  CPUMOE_INLINE __m256 hi(const char* p) { return load8(p + 32); }
};

struct F16 {
  static constexpr Code kCode = Code::f16;
  static constexpr int64_t kBytes = 2;
  static constexpr bool kEvenOdd = false;
  CPUMOE_INLINE __m256 load8(const char* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  CPUMOE_INLINE __m256 lo(const char* p) { return load8(p); }
  CPUMOE_INLINE __m256 hi(const char* p) { return load8(p + 16); }
};

struct BF16 {
  static constexpr Code kCode = Code::bf16;
  static constexpr int64_t kBytes = 2;
  static constexpr bool kEvenOdd = true;
  CPUMOE_INLINE __m256 load8(const char* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }
  CPUMOE_INLINE __m256i raw(const char* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  CPUMOE_INLINE __m256 lo(const char* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(raw(p), 16));
  }
  CPUMOE_INLINE __m256 hi(const char* p) {
    return _mm256_castsi256_ps(_mm256_and_si256(raw(p), _mm256_set1_epi32(int(0xffff0000u))));
  }
};

// 8 even and 8 odd elements back in order (a: the first 8), and the reverse.
CPUMOE_INLINE void from_even_odd(__m256& a, __m256& b) {
  const __m256 l = _mm256_unpacklo_ps(a, b), h = _mm256_unpackhi_ps(a, b);
  a = _mm256_permute2f128_ps(l, h, 0x20);
  b = _mm256_permute2f128_ps(l, h, 0x31);
}
CPUMOE_INLINE __m256 order_quarters(__m256 v) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
}
CPUMOE_INLINE void to_even_odd(__m256& a, __m256& b) {
  const __m256 even = order_quarters(_mm256_shuffle_ps(a, b, 0x88));
  b = order_quarters(_mm256_shuffle_ps(a, b, 0xdd));
  a = even;
}

// The first `count` (0..16) of 16 elements; zero for the others, whose bytes are not touched.
template <class W>
CPUMOE_INLINE void copy_tail16(const char* p, int64_t count, char* to64) {
  __m256i* z = reinterpret_cast<__m256i*>(to64);
  _mm256_store_si256(z, _mm256_setzero_si256());
  _mm256_store_si256(z + 1, _mm256_setzero_si256());
  for (int64_t i = 0; i < count; ++i) memcpy(to64 + i * W::kBytes, p + i * W::kBytes, W::kBytes);
}

// The sum of 8 lanes, as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
CPUMOE_INLINE float sum8(__m256 v) {
  const __m256 h = _mm256_hadd_ps(v, v), q = _mm256_hadd_ps(h, h);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(q), _mm256_extractf128_ps(q, 1)));
}

CPUMOE_INLINE void transpose8(__m256 v[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i + 0] = _mm256_shuffle_ps(t[4 * i + 0], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i + 0], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

}  // namespace cpumoe::CPUMOE_NS

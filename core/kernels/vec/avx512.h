// Registers of 16 floats. Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "base/types.h"

namespace cpumoe::CPUMOE_NS {

// The sums of the lanes of four registers.
CPUMOE_INLINE __m128 sum_fours(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const __m512 v = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

// The sums of the lanes of `count` registers, `step` apart.
CPUMOE_INLINE void store_sums(const __m512* v, int64_t step, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 4) {
    const auto at = [&](int64_t j) { return v[min64(i + j, count - 1) * step]; };
    const __m128 sums = sum_fours(at(0), at(1), at(2), at(3));
    _mm_mask_storeu_ps(to + i, __mmask8((1 << min64(4, count - i)) - 1), sums);
  }
}

}  // namespace cpumoe::CPUMOE_NS

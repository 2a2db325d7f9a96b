// Eight fp32 lanes of AVX2 + FMA, as vec/math.h and the templates of the rooms expect them (the
// meaning of each function is in vec/scalar.h). Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "base/types.h"

namespace cpumoe::CPUMOE_NS {

// Lanes 0..n-1 set; n in 0..8.
CPUMOE_INLINE __m256i lane_mask(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

struct Vec {
  using V = __m256;
  static constexpr int64_t kLanes = 8;

  CPUMOE_INLINE V load(const float* p, int64_t n) {
    return n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, lane_mask(n));
  }
  CPUMOE_INLINE void store(float* p, V v, int64_t n) {
    if (n >= 8) {
      _mm256_storeu_ps(p, v);
    } else {
      _mm256_maskstore_ps(p, lane_mask(n), v);
    }
  }
  CPUMOE_INLINE void load_pairs(const float* p, int64_t n, V* even, V* odd) {
    V a, b;
    if (n >= 8) {
      a = _mm256_loadu_ps(p);
      b = _mm256_loadu_ps(p + 8);
    } else {
      a = load(p, n >= 4 ? 8 : 2 * n);
      b = n > 4 ? load(p + 8, 2 * n - 8) : _mm256_setzero_ps();
    }
    const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    *even = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(a, b, 0x88), order);
    *odd = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(a, b, 0xdd), order);
  }
  CPUMOE_INLINE V set1(float f) { return _mm256_set1_ps(f); }
  CPUMOE_INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
  CPUMOE_INLINE V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  CPUMOE_INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  CPUMOE_INLINE V div(V a, V b) { return _mm256_div_ps(a, b); }
  CPUMOE_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  CPUMOE_INLINE V fnma(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }
  CPUMOE_INLINE V product_error(V a, V b, V p) { return _mm256_fmsub_ps(a, b, p); }
  CPUMOE_INLINE V min(V a, V b) { return _mm256_min_ps(a, b); }
  CPUMOE_INLINE V max(V a, V b) { return _mm256_max_ps(a, b); }
  CPUMOE_INLINE V abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  CPUMOE_INLINE V if_less(V a, V b, V yes, V no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  CPUMOE_INLINE V pow2(V n) {
    const __m256i bits = _mm256_castps_si256(_mm256_add_ps(n, _mm256_set1_ps(12583039.0f)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
  }
};

}  // namespace cpumoe::CPUMOE_NS

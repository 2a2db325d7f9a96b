// Rows: scales and offsets in the lanes of two spans, or of the two halves of one, at a time.
// Included by expand.h.
#pragma once
#include "kernels/dot/integer/grid_values.h"
#include "kernels/dot/integer/scales.h"
#include "kernels/dot/integer/scales16.h"

namespace cpumoe::CPUMOE_NS {
namespace {

CPUMOE_INLINE __m512i twice(__m256i v) { return _mm512_broadcast_i64x4(v); }
CPUMOE_INLINE __m512 beside(__m256 low, __m256 high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

template <Code C, bool kHalves, Zeros kZeros>
void expand(const Grid& g, int64_t n0, int64_t rows, int64_t first, int64_t last, float* to,
            int64_t step, int64_t row_step) {
  constexpr int64_t kSpans = kHalves ? 1 : 2;
  constexpr __mmask16 kUpper = 0xff00;
  const int64_t line = g.rows == 1 ? n0 : n0 / g.rows;
  const char* scales = g.scales.data + line * g.scales.step;
  const char* zeros = g.zeros.data + (kZeros == Zeros::stored ? line * g.zeros.step : 0);
  const __m512 factor = _mm512_set1_ps(g.factor), less = _mm512_set1_ps(-g.less);
  const __m512 minus_zero = _mm512_set1_ps(-g.zero);
  const __m512i groups = _mm512_slli_epi32(twice(g.groups), 5);
  const __m512i start =  // of a lane, in inputs
      _mm512_mask_add_epi32(groups, kUpper, groups, _mm512_set1_epi32(kHalves ? 16 : 256));
  const __m512i index = twice(g.index);
  const auto store = [&](float* out, bool both, __m512 v) __attribute__((always_inline)) {
    if (kHalves) return _mm512_storeu_ps(out, v);
    _mm256_storeu_ps(out, _mm512_castps512_ps256(v));
    if (both) _mm256_storeu_ps(out + step, _mm512_extractf32x8_ps(v, 1));
  };
  for (int64_t n = n0; n < n0 + rows; ++n, to += row_step) {
    float* out = to;
    for (int64_t span = first; span < last; span += kSpans, out += kSpans * step) {
      const int64_t i = span << 8 >> g.shift, left = min64(512, g.inputs - (span << 8));
      const int64_t upper = kHalves ? 1 : ((span + 1) << 8 >> g.shift) - i;
      const __m512i at =
          _mm512_mask_add_epi32(index, kUpper, index, _mm512_set1_epi32(int(upper)));
      const __mmask16 inside = _mm512_cmplt_epi32_mask(start, _mm512_set1_epi32(int(left)));
      const __m512 s = _mm512_maskz_mul_ps(
          inside, _mm512_permutexvar_ps(at, scales16<C>(scales + i * g.bytes, g.scales.end)),
          factor);
      const bool both = span + 1 < last;
      store(out, both, s);
      if (kZeros == Zeros::none) continue;
      __m512 minus = minus_zero;
      if (kZeros == Zeros::stored) {
        const __m512 z = beside(zeros_at(g.zero_code, zeros, g.zeros.end, i),
                                zeros_at(g.zero_code, zeros, g.zeros.end, i + 8));
        minus = _mm512_sub_ps(less, _mm512_permutexvar_ps(at, z));
      }
      store(out + (kHalves ? 16 : 8), both, _mm512_mul_ps(minus, s));
    }
    if (g.rows != 1 && (n + 1) % g.rows != 0) continue;
    scales += g.scales.step;
    zeros += g.zeros.step;
  }
}

}  // namespace
}  // namespace cpumoe::CPUMOE_NS

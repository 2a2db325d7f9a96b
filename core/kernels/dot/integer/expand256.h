// Rows: scales and offsets in the lanes of a span, one span at a time. Included by expand.h.
#pragma once
#include "kernels/dot/integer/grid_values.h"
#include "kernels/dot/integer/scales.h"

namespace cpumoe::CPUMOE_NS {
namespace {

template <Code C, bool kHalves, Zeros kZeros>
void expand(const Grid& g, int64_t n0, int64_t rows, int64_t first, int64_t last, float* to,
            int64_t step, int64_t row_step) {
  const int64_t line = g.rows == 1 ? n0 : n0 / g.rows;
  const char* scales = g.scales.data + line * g.scales.step;
  const char* zeros = g.zeros.data + (kZeros == Zeros::stored ? line * g.zeros.step : 0);
  const __m256 factor = _mm256_set1_ps(g.factor), minus_zero = _mm256_set1_ps(-g.zero);
  // Eight neighbours from `i` on into lanes; of halves, sixteen: those of input half h.
  const auto spread = [&](const auto& at, int64_t i, int h) __attribute__((always_inline)) {
    const __m256i lanes = _mm256_add_epi32(g.index, _mm256_set1_epi32(h));
    const __m256 low = _mm256_permutevar8x32_ps(at(i), lanes);
    if (!kHalves) return low;
    const __m256 high = _mm256_permutevar8x32_ps(at(i + 8), lanes);
    const __m256i upper = _mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(7));
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(upper));
  };
  const auto scale = [&](int64_t i) __attribute__((always_inline)) {
    return scales_at<C>(scales, g.scales.end, i);
  };
  const auto zero = [&](int64_t i) __attribute__((always_inline)) {
    return zeros_at(g.zero_code, zeros, g.zeros.end, i);
  };
  constexpr int kParts = kHalves ? 2 : 1;
  for (int64_t n = n0; n < n0 + rows; ++n, to += row_step) {
    float* out = to;
    for (int64_t span = first; span < last; ++span, out += step) {
      const int64_t i = span << 8 >> g.shift, left = g.inputs - (span << 8);
#pragma GCC unroll 2
      for (int h = 0; h < kParts; ++h) {
        __m256 s = _mm256_mul_ps(spread(scale, i, h), factor);
        if (left < Spans::kInputs) {
          const __m256i start =
              _mm256_add_epi32(_mm256_slli_epi32(g.groups, 5), _mm256_set1_epi32(16 * h));
          const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(left)), start);
          s = _mm256_and_ps(s, _mm256_castsi256_ps(inside));
        }
        _mm256_storeu_ps(out + 8 * h, s);
        if (kZeros == Zeros::none) continue;
        __m256 minus = minus_zero;
        if (kZeros == Zeros::stored)
          minus = _mm256_sub_ps(_mm256_set1_ps(-g.less), spread(zero, i, h));
        _mm256_storeu_ps(out + 8 * (kParts + h), _mm256_mul_ps(minus, s));
      }
    }
    if (g.rows != 1 && (n + 1) % g.rows != 0) continue;
    scales += g.scales.step;
    zeros += g.zeros.step;
  }
}

}  // namespace
}  // namespace cpumoe::CPUMOE_NS

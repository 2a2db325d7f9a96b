// Scales and offsets of words (words.h), 16 at a time. Included by ISA files only.
#pragma once
#include "kernels/dot/integer/scales16.h"
#include "kernels/dot/integer/words.h"

namespace cpumoe::CPUMOE_NS {

// Lanes 0 .. count - 1 of 16.
CPUMOE_INLINE __mmask16 first_of_16(int64_t count) {
  return count >= 16 ? __mmask16(~0) : __mmask16((1u << count) - 1);
}

// Scales and zero points of a weight, and how to get at them.
struct Grid512 {
  const WeightView* w;
  int64_t scale_bytes, zero_bytes;  // of a line
  const char *scales_end, *zeros_end;
  int bits;                   // of a zero point
  __m512i dword, shift, one;  // where each of 16 begins, and its bits
  __m512 global, plain;       // the zero point, or what is added to it

  explicit Grid512(const WeightView& view) : w(&view) {
    const Format& f = *view.format;
    const Code c = view.zeros.code;
    scale_bytes = line_bytes(view.scales.code, view.scales.stride);
    zero_bytes = f.stored_zeros() ? line_bytes(c, view.zeros.stride) : 0;
    scales_end = end_of(view.scales);
    zeros_end = f.stored_zeros() ? end_of(view.zeros) : nullptr;
    bits = c == Code::u8 ? 8 : c == Code::u2 ? 2 : 4;
    const __m512i rising = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i awq =
        _mm512_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28, 32, 48, 36, 52, 40, 56, 44, 60);
    const __m512i at =
        c == Code::u4_awq ? awq : _mm512_mullo_epi32(rising, _mm512_set1_epi32(bits));
    dword = _mm512_srli_epi32(at, 5), shift = _mm512_and_si512(at, _mm512_set1_epi32(31));
    one = _mm512_set1_epi32((1 << bits) - 1);
    global = _mm512_set1_ps(view.global_scale);
    plain = _mm512_set1_ps(f.zeros == ZeroRule::middle            ? 8.0f
                           : f.zeros == ZeroRule::stored_less_one ? 1.0f
                                                                  : 0.0f);
  }
};

// The factors of kMostLanes features from i on, stored in the order of S.
template <class S, Code C>
static void load_factors_of(const Block& b, const Grid512& grid, int64_t i) {
  const MatrixView &s = grid.w->scales, &z = grid.w->zeros;
  const int64_t left = b.features - i;
  for (int64_t g = 0; g < b.groups; ++g) {
    const char* scales = static_cast<const char*>(s.data) + (b.group + g) * grid.scale_bytes;
    const char* zeros = static_cast<const char*>(z.data) + (b.group + g) * grid.zero_bytes;
    __m512 scale[8], offset[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      scale[j] = offset[j] = _mm512_setzero_ps();
      if (16 * j >= left) continue;
      const int64_t n = b.n + i + 16 * j;
      const char* at = scales + line_bytes(C, n);
      _mm_prefetch(at + grid.scale_bytes, _MM_HINT_T1);  // that of the next group
      scale[j] = _mm512_mul_ps(scales16<C>(at, grid.scales_end), grid.global);
      __m512 zero = grid.plain;
      if (grid.zeros_end != nullptr) {
        const char* p = zeros + n * grid.bits / 8;
        if (j == 0) _mm_prefetch(p + grid.zero_bytes, _MM_HINT_T1);
        const int64_t bytes = max64(0, min64(grid.zeros_end - p, 2 * grid.bits));
        const __m512i v = _mm512_permutexvar_epi32(
            grid.dword, _mm512_castsi128_si512(_mm_maskz_loadu_epi8(first_of_16(bytes), p)));
        const __m512i code = _mm512_and_si512(_mm512_srlv_epi32(v, grid.shift), grid.one);
        zero = _mm512_add_ps(_mm512_cvtepi32_ps(code), zero);
      }
      offset[j] = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), zero), scale[j]);
    }
    S::arrange(scale, b.scales + g * b.pitch + i);
    S::arrange(offset, b.offsets + g * b.pitch + i);
  }
}
template <class S>
CPUMOE_INLINE void load_factors(const Block& b, const Grid512& grid, int64_t i) {
  switch (grid.w->scales.code) {
    case Code::f16:
      return load_factors_of<S, Code::f16>(b, grid, i);
    case Code::bf16:
      return load_factors_of<S, Code::bf16>(b, grid, i);
    case Code::e8m0:
      return load_factors_of<S, Code::e8m0>(b, grid, i);
    case Code::e4m3:
      return load_factors_of<S, Code::e4m3>(b, grid, i);
    default:
      return load_factors_of<S, Code::f32>(b, grid, i);
  }
}

}  // namespace cpumoe::CPUMOE_NS

// The sums of a span with VNNI: 512-bit registers hold two of its vectors, every code is unsigned,
// and four products go to 32 bits at once. Included by ISA files only.
#pragma once
#include "kernels/dot/integer/math.h"

namespace cpumoe::CPUMOE_NS {

CPUMOE_INLINE __m256i fold(__m512i v) {
  return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
}

// Sums of registers [kBegin, kEnd) on top of p, R rows x T tokens.
template <int R, int T, int kBegin, int kEnd, class RowCodes>
CPUMOE_INLINE void sum_codes(__m512i p[R][T], const RowCodes& codes, const char* x, int64_t xs) {
  // One sum is two chains: a product waits four cycles for the one before it.
  constexpr int kChains = R * T == 1 ? 2 : 1;
  __m512i more[kChains];
#pragma GCC unroll 4
  for (int i = kBegin; i < kEnd; ++i) {
    __m512i w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) w[r] = codes(r, i);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      __m512i a = load_register(x + t * xs + i * 64);
      if constexpr (R > 1) __asm__("" : "+v"(a));  // else GCC reads it once per row
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if (kChains == 2 && i % 2 != 0) {
          more[1] = _mm512_dpbusd_epi32(
              i == 1 || i == kBegin + 1 ? _mm512_setzero_si512() : more[1], w[r], a);
          continue;
        }
        p[r][t] = _mm512_dpbusd_epi32(p[r][t], w[r], a);
        __asm__("" : "+v"(p[r][t]));  // opaque: GCC would pair the terms of a sum
      }
    }
  }
  if (kChains == 2) p[0][0] = _mm512_add_epi32(p[0][0], more[kChains - 1]);
}

// Adds the span to acc[r][t] (8 lanes of fp32 each).
template <Math M, int R, int T, class RowCodes, class RowFactors>
CPUMOE_INLINE void add_span(__m256 acc[R][T], const RowCodes& codes, const RowFactors& factors,
                            const char* x, int64_t xs) {
  constexpr bool kParts = M.parts != Math::whole;
  __m512i p[2][R][T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    __m512i minus[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    if constexpr (M.middle != 0) {
      const __m256i by = _mm256_set1_epi16(M.middle);
      __m256i sums[2] = {load_codes(x + t * xs + (kParts ? Spans::kMinusFirst : Spans::kMinusAll))};
      if (kParts) sums[1] = _mm256_sub_epi16(load_codes(x + t * xs + Spans::kMinusAll), sums[0]);
      minus[0] = _mm512_zextsi256_si512(_mm256_madd_epi16(sums[0], by));
      if (kParts) minus[1] = _mm512_zextsi256_si512(_mm256_madd_epi16(sums[1], by));
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      p[0][r][t] = minus[0];
      if (kParts) p[1][r][t] = minus[1];
    }
  }
  sum_codes<R, T, 0, kParts ? 2 : 4>(p[0], codes, x, xs);
  if constexpr (kParts) sum_codes<R, T, 2, 4>(p[1], codes, x, xs);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const Factors f = factors(r);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const char* at = x + t * xs;
      const __m256 scale = load_floats(at + Spans::kScale);
      if constexpr (M.parts == Math::ints) {
        static_assert(M.scaled);
        p[0][r][t] = _mm512_add_epi32(_mm512_mullo_epi32(p[0][r][t], f.c0),
                                      _mm512_mullo_epi32(p[1][r][t], f.c1));
      }
      acc[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(fold(p[0][r][t])), _mm256_mul_ps(f.s0, scale),
                                  acc[r][t]);
      if constexpr (M.parts == Math::floats) {
        acc[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(fold(p[1][r][t])),
                                    _mm256_mul_ps(f.s1, scale), acc[r][t]);
      }
      if constexpr (M.offset == Math::group) {
        acc[r][t] = _mm256_fmadd_ps(f.o0, load_floats(at + Spans::kSum), acc[r][t]);
      } else if constexpr (M.offset == Math::halves) {
        acc[r][t] = _mm256_fmadd_ps(f.o0, load_floats(at + Spans::kFirstSum), acc[r][t]);
        acc[r][t] = _mm256_fmadd_ps(f.o1, load_floats(at + Spans::kLastSum), acc[r][t]);
      }
    }
  }
}

}  // namespace cpumoe::CPUMOE_NS

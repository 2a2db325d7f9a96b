// The sums of a span on AVX2: unsigned codes in sums of 16 bits, signed bytes widened at once.
// Included by ISA files only.
#pragma once
#include "kernels/dot/integer/math.h"

namespace cpumoe::CPUMOE_NS {

template <int kBy>
CPUMOE_INLINE __m256i times(__m256i v) {
  if constexpr ((kBy & (kBy - 1)) == 0) return _mm256_slli_epi16(v, __builtin_ctz(unsigned(kBy)));
  return _mm256_mullo_epi16(v, _mm256_set1_epi16(short(kBy)));
}

// Integer sums of vectors [kBegin, kEnd), R rows x T tokens: int32 per lane, or (not bytes) s16.
// codes(r, v): vector v of row r. x + t * xs: the span of token t.
template <Math M, int R, int T, int kBegin, int kEnd, class RowCodes>
CPUMOE_INLINE void sum_codes(__m256i p[R][T], const RowCodes& codes, const char* x, int64_t xs) {
#pragma GCC unroll 8
  for (int v = kBegin; v < kEnd; ++v) {
    __m256i w[R], sign[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      w[r] = codes(r, v);
      if (M.bytes) {
        sign[r] = M.counted ? _mm256_cmpgt_epi8(_mm256_setzero_si256(), w[r]) : w[r];
        w[r] = _mm256_abs_epi8(w[r]);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256i a = load_codes(x + t * xs + v * 32);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if constexpr (M.bytes) {
          const __m256i signed_a =
              M.counted ? _mm256_xor_si256(a, sign[r]) : _mm256_sign_epi8(a, sign[r]);
          const __m256i wide =
              _mm256_madd_epi16(_mm256_maddubs_epi16(w[r], signed_a), _mm256_set1_epi16(1));
          p[r][t] = v == kBegin && !M.counted ? wide : _mm256_add_epi32(p[r][t], wide);
        } else {
          const __m256i product = _mm256_maddubs_epi16(w[r], a);
          p[r][t] = v == kBegin && M.middle == 0 ? product : _mm256_add_epi16(p[r][t], product);
        }
        // Opaque: GCC would pair the terms of a sum, and run out of registers over it.
        __asm__("" : "+x"(p[r][t]));
      }
    }
  }
}

// c0 (of parts c1, too): the sum of the negative codes' magnitudes.
template <Math M>
CPUMOE_INLINE void count_negatives(const __m256i w[8], Factors& f) {
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) {
    const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), w[v]);
    const __m256i size = _mm256_and_si256(_mm256_abs_epi8(w[v]), negative);
    __m256i& sum = sums[M.parts == Math::whole ? 0 : v / 4];
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(size, _mm256_set1_epi8(1)));
  }
  f.c0 = _mm256_madd_epi16(sums[0], _mm256_set1_epi16(1));
  f.c1 = _mm256_madd_epi16(sums[1], _mm256_set1_epi16(1));
}

// Adds the span to acc[r][t] (8 lanes of fp32 each).
template <Math M, int R, int T, class RowCodes, class RowFactors>
CPUMOE_INLINE void add_span(__m256 acc[R][T], const RowCodes& codes, const RowFactors& factors,
                            const char* x, int64_t xs) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i p[R][T];
  const auto start = [&](bool last) __attribute__((always_inline)) {
    if constexpr (M.counted) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i count = last ? factors(r).c1 : factors(r).c0;
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) p[r][t] = count;
      }
    } else if constexpr (M.middle != 0) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i all = load_codes(x + t * xs + Spans::kMinusAll);
        const __m256i first = load_codes(x + t * xs + Spans::kMinusFirst);
        const __m256i sums = M.parts == Math::whole ? all
                             : last                 ? _mm256_sub_epi16(all, first)
                                                    : first;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) p[r][t] = times<M.middle == 0 ? 1 : M.middle>(sums);
      }
    }
  };
  const auto widen = [&](__m256i v, __m256i by) __attribute__((always_inline)) {
    return M.bytes ? v : _mm256_madd_epi16(v, by);
  };
  const auto finish = [&](int r, int t, __m256i sums, __m256 s) __attribute__((always_inline)) {
    const __m256 scale = _mm256_mul_ps(s, load_floats(x + t * xs + Spans::kScale));
    acc[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scale, acc[r][t]);
  };
  if constexpr (M.parts == Math::whole) {
    start(false);
    sum_codes<M, R, T, 0, 8>(p, codes, x, xs);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256 s = factors(r).s0;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) finish(r, t, widen(p[r][t], ones), s);
    }
  } else {
    __m256i head[R][T];
    start(false);
    sum_codes<M, R, T, 0, 4>(p, codes, x, xs);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        if constexpr (M.parts == Math::floats) {
          finish(r, t, widen(p[r][t], ones), factors(r).s0);
        } else {
          head[r][t] = widen(p[r][t], M.scaled ? factors(r).c0 : ones);
        }
      }
    }
    start(true);
    sum_codes<M, R, T, 4, 8>(p, codes, x, xs);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        if constexpr (M.parts == Math::floats) {
          finish(r, t, widen(p[r][t], ones), factors(r).s1);
        } else {
          const __m256i tail = widen(p[r][t], M.scaled ? factors(r).c1 : ones);
          finish(r, t, _mm256_add_epi32(head[r][t], tail), factors(r).s0);
        }
      }
    }
  }
  if constexpr (M.offset != Math::none) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Factors f = factors(r);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const char* at = x + t * xs;
        if constexpr (M.offset == Math::group) {
          acc[r][t] = _mm256_fmadd_ps(f.o0, load_floats(at + Spans::kSum), acc[r][t]);
        } else {
          acc[r][t] = _mm256_fmadd_ps(f.o0, load_floats(at + Spans::kFirstSum), acc[r][t]);
          acc[r][t] = _mm256_fmadd_ps(f.o1, load_floats(at + Spans::kLastSum), acc[r][t]);
        }
      }
    }
  }
}

}  // namespace cpumoe::CPUMOE_NS

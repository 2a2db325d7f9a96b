// Class int8, the arithmetic of a span: 256 inputs whose 8 groups of 32 lie in 8 lanes (Spans in
// layouts.h). Codes times codes are exact integers; a lane meets fp32 once a span. Included by
// ISA files only.
#pragma once
#include <immintrin.h>

#include "base/types.h"
#include "kernels/dot/layouts.h"

namespace cpumoe::CPUMOE_NS {

// VNNI adds four products to 32 bits at once: every code is unsigned there, signed bytes counted from
// -128.
#ifdef __AVX512VNNI__
constexpr bool kVnni = true;
#else
constexpr bool kVnni = false;
#endif

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

// fp32 scales and offsets per lane; s16 factors per pair of codes or s32 counts per lane; which are
// set depends on Math.
struct Factors {
  __m256 s0, s1, o0, o1;
  __m256i c0, c1;
};

CPUMOE_INLINE __m256i load_codes(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
CPUMOE_INLINE __m256 load_floats(const char* p) {
  return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
}

template <int kBy>
CPUMOE_INLINE __m256i times(__m256i v) {
  if constexpr ((kBy & (kBy - 1)) == 0) return _mm256_slli_epi16(v, __builtin_ctz(unsigned(kBy)));
  return _mm256_mullo_epi16(v, _mm256_set1_epi16(short(kBy)));
}

// sums + unsigned codes times signed ones, four to a lane. VNNI only.
CPUMOE_INLINE __m256i dot_fours([[maybe_unused]] __m256i sums, [[maybe_unused]] __m256i codes,
                                [[maybe_unused]] __m256i a) {
#ifdef __AVX512VNNI__
  return _mm256_dpbusd_epi32(sums, codes, a);
#else
  return sums;
#endif
}

// sum_codes with VNNI. Few sums are several chains each: one product waits four cycles for the one
// before it, and what waits fills the scheduler (q4_0 from L2, one token: a fifth faster on Zen 4).
template <Math M, int R, int T, int kBegin, int kEnd, class Codes>
CPUMOE_INLINE void sum_fours(__m256i p[R][T], const Codes& codes, const char* x, int64_t xs) {
  constexpr int kChains = R * T == 1 ? 4 : 2;
  __m256i sums[R][T][kChains];
#pragma GCC unroll 8
  for (int v = kBegin; v < kEnd; ++v) {
    const int chain = (v - kBegin) % kChains;
    __m256i w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) w[r] = codes(r, v);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      __m256i a = load_codes(x + t * xs + v * 32);
      if constexpr (R > 1) __asm__("" : "+v"(a));  // else GCC reads it once per row
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i start = v == kBegin && M.middle != 0 ? p[r][t] : _mm256_setzero_si256();
        __m256i& sum = sums[r][t][chain];
        sum = dot_fours(v < kBegin + kChains ? start : sum, w[r], a);
        __asm__("" : "+v"(sum));
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      __m256i* s = sums[r][t];
      if constexpr (kChains == 4)
        s[0] = _mm256_add_epi32(s[0], s[1]), s[1] = _mm256_add_epi32(s[2], s[3]);
      p[r][t] = kChains > 1 ? _mm256_add_epi32(s[0], s[kChains > 1]) : s[0];
    }
  }
}

// Integer sums of vectors [kBegin, kEnd), R rows x T tokens: int32 per lane, or (neither bytes nor
// VNNI) s16.
// codes(r, v): vector v of row r. x + t * xs: the span of token t.
template <Math M, int R, int T, int kBegin, int kEnd, class Codes>
CPUMOE_INLINE void sum_codes(__m256i p[R][T], const Codes& codes, const char* x, int64_t xs) {
  if constexpr (kVnni) return sum_fours<M, R, T, kBegin, kEnd>(p, codes, x, xs);
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
        __asm__("" : "+v"(p[r][t]));
      }
    }
  }
}

// Adds the span to acc[r][t] (8 lanes of fp32 each).
template <Math M, int R, int T, class Codes, class RowFactors>
CPUMOE_INLINE void add_span(__m256 acc[R][T], const Codes& codes, const RowFactors& factors,
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
        const __m256i minus = kVnni ? _mm256_madd_epi16(sums, _mm256_set1_epi16(M.middle))
                                    : times<M.middle == 0 ? 1 : M.middle>(sums);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) p[r][t] = minus;
      }
    }
  };
  const auto widen = [&](__m256i v, __m256i by) __attribute__((always_inline)) {
    if constexpr (kVnni) return M.scaled ? _mm256_mullo_epi32(v, _mm256_srai_epi32(by, 16)) : v;
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

// The sums of eight vectors' lanes, in order.
CPUMOE_INLINE __m256 sum_lanes(const __m256 v[8]) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

}  // namespace cpumoe::CPUMOE_NS

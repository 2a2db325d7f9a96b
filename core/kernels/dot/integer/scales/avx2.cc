#include "kernels/dot/integer/scales.h"

namespace cpumoe::avx2 {
namespace {

template <Code C>
CPUMOE_INLINE __m256 scales8(const char* p) {
  if constexpr (C == Code::f32) return load_floats(p);
  if constexpr (C == Code::f16)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if constexpr (C == Code::bf16) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  if constexpr (C == Code::e8m0) {
    const __m256i e = _mm256_cvtepu8_epi32(bytes);
    // 0: 2^-127, below the normal range. 255: NaN, the bit below infinity's exponent set.
    const __m256i least = _mm256_max_epu32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_cmpeq_epi32(e, _mm256_set1_epi32(255));
    return _mm256_castsi256_ps(
        _mm256_or_si256(least, _mm256_and_si256(nan, _mm256_set1_epi32(0x400000))));
  }
  if constexpr (C == Code::e4m3) {  // fp16 holds every value times 2^-8
    const __m128i u = _mm_cvtepi8_epi16(bytes), low = _mm_set1_epi16(0x7f);
    const __m128i number = _mm_and_si128(u, low);
    const __m128i half = _mm_or_si128(_mm_slli_epi16(number, 7),
                                      _mm_and_si128(u, _mm_set1_epi16(short(0x8000))));
    const __m128i nan = _mm_cmpeq_epi16(number, low);
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(
                                                                                 0x7e00)))),
                         _mm256_set1_ps(256));
  }
}

// Elements i .. i + 7 of a line; those whose bytes lie past `end` read as 0.
template <Code C>
CPUMOE_INLINE __m256 scales_at(const char* line, const char* end, int64_t i) {
  constexpr int64_t kSize = C == Code::f32 ? 4 : C == Code::f16 || C == Code::bf16 ? 2 : 1;
  const char* p = line + i * kSize;
  if (end - p >= 8 * kSize) return scales8<C>(p);
  alignas(32) char part[32] = {};
  for (int64_t b = 0; b < end - p; ++b) part[b] = p[b];
  return scales8<C>(part);
}
CPUMOE_INLINE __m256 zeros_at(Code c, const char* line, const char* end, int64_t i) {
  const int bits = c == Code::u8 ? 8 : c == Code::u2 ? 2 : 4;
  // AWQ keeps its order inside a word of eight; elsewhere a line is a stream of bits.
  const bool awq = c == Code::u4_awq;
  const int64_t first = awq ? i / 8 * 32 : i * bits;
  const char* p = line + first / 8;
  uint64_t u = 0;
  if (end - p >= 8) {
    memcpy(&u, p, 8);
  } else {
    for (int64_t b = 0; b < end - p; ++b) u |= uint64_t(uint8_t(p[b])) << (8 * b);
  }
  if (awq) {
    const int down = int(i % 8);  // eight from here on, the last of them in the next word
    uint64_t ordered = 0;
    for (int j = 0; j < 8; ++j) {
      const int e = down + j, nibble = e / 8 * 8 + (e % 8 / 2 + e % 2 * 4);
      ordered |= (u >> (4 * nibble) & 15) << (4 * j);
    }
    u = ordered;
  } else {
    u >>= first % 8;
  }
  __m256i v;
  if (bits == 8) {
    v = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(u)));
  } else {
    const __m256i at = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                          _mm256_set1_epi32(bits));
    v = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(int(uint32_t(u))), at),
                         _mm256_set1_epi32((1 << bits) - 1));
  }
  return _mm256_cvtepi32_ps(v);
}

template <Code C, bool kHalves, bool kOffset>
void expand(const ExpandArgs& a) {
  const GridRow& g = a.grid;
  const __m256i groups = a.groups;
  const __m256i index = kHalves ? _mm256_slli_epi32(groups, 1)
                                : _mm256_srl_epi32(groups, _mm_cvtsi32_si128(
                                                               g.shift > 8 ? 3 : g.shift - 5));
  const __m256 global = _mm256_set1_ps(g.global * a.factor);
  // Eight neighbours from `i` on into lanes; of halves, sixteen: those of input half h.
  const auto spread = [&](const auto& at, int64_t i, int h) __attribute__((always_inline)) {
    const __m256i lanes = _mm256_add_epi32(index, _mm256_set1_epi32(h));
    const __m256 low = _mm256_permutevar8x32_ps(at(i), lanes);
    if (!kHalves) return low;
    const __m256 high = _mm256_permutevar8x32_ps(at(i + 8), lanes);
    const __m256i upper = _mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(7));
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(upper));
  };
  const auto scale = [&](int64_t i) __attribute__((always_inline)) {
    return scales_at<C>(g.scales, g.scales_end, i);
  };
  const auto zero = [&](int64_t i) __attribute__((always_inline)) {
    return zeros_at(g.zero_code, g.zeros, g.zeros_end, i);
  };
  constexpr int kParts = kHalves ? 2 : 1;
  float* out = a.out;
  for (int64_t span = a.first; span < a.last; ++span, out += a.step) {
    const int64_t i = span << 8 >> g.shift, left = a.inputs - (span << 8);
#pragma GCC unroll 2
    for (int h = 0; h < kParts; ++h) {
      __m256 s = _mm256_mul_ps(spread(scale, i, h), global);
      if (left < Spans::kInputs) {
        const __m256i start =
            _mm256_add_epi32(_mm256_slli_epi32(groups, 5), _mm256_set1_epi32(16 * h));
        const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(left)), start);
        s = _mm256_and_ps(s, _mm256_castsi256_ps(inside));
      }
      _mm256_storeu_ps(out + 8 * h, s);
      if (!kOffset) continue;
      __m256 z = _mm256_set1_ps(g.zero);
      if (g.zeros != nullptr) z = _mm256_add_ps(spread(zero, i, h), _mm256_set1_ps(g.less));
      _mm256_storeu_ps(out + 8 * (kParts + h),
                       _mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), z), s));
    }
  }
}

template <Code C>
CPUMOE_INLINE void expand_any(const ExpandArgs& a) {
  if (a.halves) return a.offset ? expand<C, true, true>(a) : expand<C, true, false>(a);
  a.offset ? expand<C, false, true>(a) : expand<C, false, false>(a);
}

}  // namespace

void expand_factors(const ExpandArgs& a) {
  switch (a.grid.scale_code) {
    case Code::f16:
      return expand_any<Code::f16>(a);
    case Code::bf16:
      return expand_any<Code::bf16>(a);
    case Code::e8m0:
      return expand_any<Code::e8m0>(a);
    case Code::e4m3:
      return expand_any<Code::e4m3>(a);
    default:
      return expand_any<Code::f32>(a);
  }
}

}  // namespace cpumoe::avx2

// Sources of words (words.h): GPTQ and AWQ. Included by one file per ISA.
#pragma once
#include "kernels/dot/integer/words.h"

namespace cpumoe::CPUMOE_NS {

// sums + unsigned codes times signed ones, four to a lane. VNNI only.
CPUMOE_INLINE __m256i dot_fours([[maybe_unused]] __m256i sums, [[maybe_unused]] __m256i codes,
                                [[maybe_unused]] __m256i a) {
#ifdef __AVX512VNNI__
  return _mm256_dpbusd_epi32(sums, codes, a);
#else
  return sums;
#endif
}

CPUMOE_INLINE __m256i high_halves(__m256i v) { return codes::low_nibbles(_mm256_srli_epi16(v, 4)); }

// GPTQ: a word holds neighbouring inputs of one feature. S: how its codes are split and added.
template <class S>
struct Gptq : S {
  static constexpr float kCountedFrom = S::kZero;
  static constexpr int kVectors = 2, kTokens = 4;
  CPUMOE_INLINE void arrange(float*) {}
  CPUMOE_INLINE void restore(float*) {}

  template <int T>
  CPUMOE_INLINE void add_group(__m256 sums[T][2], const char* w, int64_t stride, int64_t first,
                               int64_t count, const char* a, int64_t xs, Ahead& ahead) {
    __m256i p[T][2];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) p[t][0] = p[t][1] = _mm256_setzero_si256();
    const int begin = int(first / S::kInputs), lines = int(count / S::kInputs);
    const auto line = [&](int i) __attribute__((always_inline)) {
      Ahead::step(ahead);
      __m256i codes[2][S::kParts];
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        S::split(load_codes(w + (i - begin) * stride + 32 * h), codes[h]);
      }
#pragma GCC unroll 2
      for (int part = 0; part < S::kParts; ++part) {
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          int32_t four;
          memcpy(&four, a + t * xs + S::vector(i, part) * 32, 4);
          const __m256i x = _mm256_set1_epi32(four);
          p[t][0] = S::add(p[t][0], codes[0][part], x);
          p[t][1] = S::add(p[t][1], codes[1][part], x);
        }
      }
    };
    constexpr int kWholeGroup = int(kActGroup / S::kInputs);
    if (begin == 0 && lines == kWholeGroup) {
#pragma GCC unroll 8
      for (int i = 0; i < kWholeGroup; ++i) line(i);
    } else {
      for (int i = begin; i < begin + lines; ++i) line(i);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256 scale =
          _mm256_broadcast_ss(reinterpret_cast<const float*>(a + t * xs + Spans::kScale));
      sums[t][0] = _mm256_fmadd_ps(S::total(p[t][0]), scale, sums[t][0]);
      sums[t][1] = _mm256_fmadd_ps(S::total(p[t][1]), scale, sums[t][1]);
    }
  }
};

struct Nibbles {
  using Order = Pairs;
  static constexpr Code kCode = Code::u4_gptq;
  static constexpr int64_t kInputs = 8;
  static constexpr float kZero = 0;
  static constexpr int kParts = 2;  // even inputs, odd inputs
  CPUMOE_INLINE void split(__m256i word, __m256i codes[2]) {
    codes[0] = codes::low_nibbles(word);
    codes[1] = high_halves(word);
  }
  // The vector of a span that holds the activations of line i of a group.
  static constexpr int vector(int i, int part) { return i / 2 * 4 + part * 2 + i % 2; }
  CPUMOE_INLINE __m256i add(__m256i sum, __m256i codes, __m256i a) {
    if constexpr (kVnni) return dot_fours(sum, codes, a);
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, a));
  }
  CPUMOE_INLINE __m256 total(__m256i sum) {
    if constexpr (kVnni) return _mm256_cvtepi32_ps(sum);
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  }
};
struct Bytes {
  using Order = Quads;
  static constexpr Code kCode = Code::u8_gptq;
  static constexpr int64_t kInputs = 4;
  static constexpr float kZero = kVnni ? 0 : 128;
  static constexpr int kParts = 1;
  CPUMOE_INLINE void split(__m256i word, __m256i codes[1]) {
    codes[0] = kVnni ? word : _mm256_xor_si256(word, _mm256_set1_epi8(char(0x80)));
  }
  static constexpr int vector(int i, int) { return i; }
  CPUMOE_INLINE __m256i add(__m256i sum, __m256i codes, __m256i a) {
    if constexpr (kVnni) return dot_fours(sum, codes, a);
    const __m256i product =
        _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(a, codes));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(product, _mm256_set1_epi16(1)));
  }
  CPUMOE_INLINE __m256 total(__m256i sum) { return _mm256_cvtepi32_ps(sum); }
};

// AWQ: a word holds eight features of one input. Bytes of two lines side by side are pairs of
// inputs: 16 features to a register, in 16-bit sums of sum((q - 8) a), at most 8 * 127 * 32.
struct Awq {
  using Order = Quads;
  static constexpr Code kCode = Code::u4_awq;
  static constexpr int64_t kInputs = 1;
  static constexpr float kCountedFrom = 8;
  static constexpr int kVectors = 8, kTokens = 2;
  // Sums of 16 features: those of low nibbles, 0 4 1 5 of two words, then 2 6 3 7.
  CPUMOE_INLINE void arrange(float* p) {
    const __m256 a = _mm256_load_ps(p), b = _mm256_load_ps(p + 8);
    const __m256 x = _mm256_permute2f128_ps(a, b, 0x20), y = _mm256_permute2f128_ps(a, b, 0x31);
    _mm256_store_ps(p, _mm256_unpacklo_ps(x, y));
    _mm256_store_ps(p + 8, _mm256_unpackhi_ps(x, y));
  }
  CPUMOE_INLINE void restore(float* p) {
    const __m256 a = _mm256_load_ps(p), b = _mm256_load_ps(p + 8);
    const __m256 x = _mm256_shuffle_ps(a, b, 0x88), y = _mm256_shuffle_ps(a, b, 0xdd);
    _mm256_store_ps(p, _mm256_permute2f128_ps(x, y, 0x20));
    _mm256_store_ps(p + 8, _mm256_permute2f128_ps(x, y, 0x31));
  }

  template <int T>
  CPUMOE_INLINE void add_group(__m256 sums[T][8], const char* w, int64_t stride, int64_t first,
                               int64_t count, const char* a, int64_t xs, Ahead& ahead) {
    __m256i p[T][4];
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {  // minus eight times the sum of the codes
      int16_t all[2], head[2];
      memcpy(all, a + t * xs + Spans::kMinusAll, 4);
      memcpy(head, a + t * xs + Spans::kMinusFirst, 4);
      const int whole = all[0] + all[1], half = head[0] + head[1];
      const int minus = first != 0 ? whole - half : count == kActGroup / 2 ? half : whole;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) p[t][i] = _mm256_set1_epi16(short(8 * minus));
    }
    const auto add_pair = [&](int64_t e, __m256i one, __m256i two) __attribute__((always_inline)) {
      Ahead::step(ahead);
      const __m256i low[2] = {codes::low_nibbles(one), codes::low_nibbles(two)},
                    high[2] = {high_halves(one), high_halves(two)};
      const __m256i pairs[4] = {
          _mm256_unpacklo_epi8(low[0], low[1]), _mm256_unpacklo_epi8(high[0], high[1]),
          _mm256_unpackhi_epi8(low[0], low[1]), _mm256_unpackhi_epi8(high[0], high[1])};
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) {
        const __m256i x = _mm256_broadcastw_epi16(_mm_loadu_si16(a + t * xs + e / 4 * 32 + e % 4));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          p[t][i] = _mm256_add_epi16(p[t][i], _mm256_maddubs_epi16(pairs[i], x));
      }
    };
    int64_t e = first;
    for (; e + 4 <= first + count; e += 4, w += 4 * stride) {
      add_pair(e, load_codes(w), load_codes(w + stride));
      add_pair(e + 2, load_codes(w + 2 * stride), load_codes(w + 3 * stride));
    }
    for (; e < first + count; e += 2, w += 2 * stride) {
      const bool both = e + 1 < first + count;
      add_pair(e, load_codes(w), both ? load_codes(w + stride) : _mm256_setzero_si256());
    }
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
      const __m256 scale =
          _mm256_broadcast_ss(reinterpret_cast<const float*>(a + t * xs + Spans::kScale));
      // p[t][2 u + h]: words 2u, 2u + 1 in the lower half and 2u + 4, 2u + 5 in the upper one.
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int lower = i / 2 * 2 + i % 2, upper = lower + 4;
        const __m256i l = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(p[t][i]));
        const __m256i u = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(p[t][i], 1));
        sums[t][lower] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(l), scale, sums[t][lower]);
        sums[t][upper] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(u), scale, sums[t][upper]);
      }
    }
  }
};

#define CPUMOE_WORDS(code, source, act_layout, n_block) \
  void dot_int_words_columns_##code(const DotArgs& a) { words<source>(a); }
#include "kernels/dot/integer/words.inc"
#undef CPUMOE_WORDS

size_t scratch_int_words(int64_t, int64_t, int64_t) {
  return size_t(2 * kMostGroups * kFeatures) * 4;
}

}  // namespace cpumoe::CPUMOE_NS

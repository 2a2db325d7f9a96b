// GGUF blocks of 256, a span each. Byte positions: formats/gguf.cc. Included by ISA files only.
#pragma once
#include "kernels/dot/integer/gguf32.h"

namespace cpumoe::CPUMOE_NS {

struct Q4K {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 144, kSpanBytes = kBlock;
  static constexpr Math math(bool) { return {.offset = Math::group}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) { nibbles_in_place(p + 16, w); }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { scales_and_minima<true>(p, f); }
};

struct Q5K {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 176, kSpanBytes = kBlock;
  static constexpr Math math(bool) { return {.parts = Math::ints, .offset = Math::group}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) {
    nibbles_of_pairs(p + 48, w);
    or_bits_of_groups<16>(p + 16, w);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { scales_and_minima<false>(p, f); }
};

struct Q2K {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 84, kSpanBytes = kBlock;
  static constexpr Math math(bool) {
    return {.parts = Math::ints, .scaled = true, .offset = Math::halves};
  }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) { two_bits_of_halves(p + 16, w); }
  CPUMOE_INLINE void factors(const char* p, Factors& f) {
    const __m128i u = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i low = _mm_set1_epi8(15);
    factors_of_halves<Quads>(_mm_and_si128(u, low), f.c0, f.c1);
    // Even bytes: first halves.
    const __m128i m =
        _mm_shuffle_epi8(_mm_and_si128(_mm_srli_epi16(u, 4), low),
                         _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15));
    const __m256 minus = _mm256_xor_ps(half_everywhere(p + 82), _mm256_set1_ps(-0.0f));
    f.s0 = half_everywhere(p + 80);
    f.o0 = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(m)), minus);
    f.o1 = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(m, m))), minus);
  }
};

struct Q3K {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 110, kSpanBytes = kBlock;
  static constexpr Math math(bool) { return {.middle = 4, .parts = Math::ints, .scaled = true}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) {
    two_bits_of_halves(p + 32, w);
    or_bits_of_groups<4>(p, w);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) {
    const uint32_t a = word(p + 96), b = word(p + 100), c = word(p + 104);
    const uint32_t low = 0x0f0f0f0f, high = 0x30303030;
    const __m128i scales =
        _mm_setr_epi32(int((a & low) | (c << 4 & high)), int((b & low) | (c << 2 & high)),
                       int((a >> 4 & low) | (c & high)), int((b >> 4 & low) | (c >> 2 & high)));
    factors_of_halves<Quads>(_mm_sub_epi8(scales, _mm_set1_epi8(32)), f.c0, f.c1);
    f.s0 = half_everywhere(p + 108);
  }
};

struct Q6K {
  using Order = QuadsHigh;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 210, kSpanBytes = kBlock;
  static constexpr Math math(bool) { return {.middle = 32, .parts = Math::ints, .scaled = true}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) { six_bits(p, w); }
  CPUMOE_INLINE void factors(const char* p, Factors& f) {
    factors_of_halves<QuadsHigh>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 192)), f.c0,
                                 f.c1);
    f.s0 = half_everywhere(p + 208);
  }
};

struct Iq4Xs {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 136, kSpanBytes = kBlock;
  static constexpr Math math(bool) { return {.bytes = true}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) {
    nibbles_of_groups<16, 0>(p + 8, w);
    look_up_all(kIq4, w);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) {
    const __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(int(word(p) >> 16)),
                                           by_lane(0, 4, 8, 12, 2, 6, 10, 14));
    const __m256i low =
        _mm256_srlv_epi32(dword_everywhere(p + 4), by_lane(0, 8, 16, 24, 4, 12, 20, 28));
    const __m256i scale =
        _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)),
                        _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4));
    f.s0 = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(scale, _mm256_set1_epi32(32))),
                         half_everywhere(p));
  }
};

}  // namespace cpumoe::CPUMOE_NS

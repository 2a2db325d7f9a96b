// Plain codes: 256 inputs of one line without gaps; scales and zero points in arrays of their own.
// Included by ISA files only.
#pragma once
#include "kernels/dot/integer/scales.h"
#include "kernels/dot/integer/unpack.h"

namespace cpumoe::CPUMOE_NS {

struct U4 {
  using Order = Pairs;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 128;
  static constexpr float kCountedFrom = 0, kMiddle = 8, kFactor = 1;
  static constexpr Math math(bool halves) {
    return {.parts = halves ? Math::floats : Math::whole,
            .offset = halves ? Math::halves : Math::group};
  }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    __m256i v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = load_codes(p + 32 * i);
    transpose_fours(v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      w[i / 2 * 4 + i % 2] = low_nibbles(v[i]);
      w[i / 2 * 4 + i % 2 + 2] = high_nibbles(v[i]);
    }
  }
};

struct E2m1 {
  using Order = Pairs;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 128;
  static constexpr float kCountedFrom = 0, kMiddle = 0, kFactor = 0.5f;
  static constexpr Math math(bool halves) {
    return {.middle = 12, .parts = halves ? Math::floats : Math::whole};
  }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    U4::decode(p, w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) w[i] = look_up(kE2m1Plus12, w[i]);
  }
};

struct S8 {
  using Order = Quads;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 256;
  static constexpr float kCountedFrom = 0, kMiddle = 0, kFactor = 1;
  static constexpr Math math(bool halves) {
    return {.bytes = true, .parts = halves ? Math::floats : Math::whole};
  }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) { bytes_of_groups(p, 32, w); }
};

struct U8 {
  using Order = Quads;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 256;
  static constexpr float kCountedFrom = 128, kMiddle = 128, kFactor = 1;
  static constexpr Math math(bool halves) {
    return {.bytes = true,
            .parts = halves ? Math::floats : Math::whole,
            .offset = halves ? Math::halves : Math::group};
  }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    bytes_of_groups(p, 32, w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) w[i] = _mm256_xor_si256(w[i], _mm256_set1_epi8(char(0x80)));
  }
};

struct U3 {
  using Order = Pairs;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 96;
  static constexpr float kCountedFrom = 0, kMiddle = 4, kFactor = 1;
  static constexpr Math math(bool halves) { return U4::math(halves); }
  // Eight inputs, 24 bits of every lane: two vectors, the even and the odd ones.
  CPUMOE_INLINE void split(__m256i v, __m256i& even, __m256i& odd) {
    const auto bits = [](int mask) { return _mm256_set1_epi32(mask); };
    const __m256i halves =
        _mm256_or_si256(_mm256_and_si256(v, bits(0xfff)),
                        _mm256_slli_epi32(_mm256_and_si256(v, bits(0xfff000)), 4));
    const __m256i bytes =
        _mm256_or_si256(_mm256_and_si256(halves, bits(0x003f003f)),
                        _mm256_slli_epi32(_mm256_and_si256(halves, bits(0x0fc00fc0)), 2));
    even = _mm256_and_si256(bytes, bits(0x07070707));
    odd = _mm256_and_si256(_mm256_srli_epi32(bytes, 3), bits(0x07070707));
  }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    __m256i v[4];
#pragma GCC unroll 3
    for (int j = 0; j < 3; ++j) v[j] = load_two(p + 24 * j, p + 24 * j + 12);
    // Groups 6 and 7 end with the span: 16 bytes are read from before its last group.
    v[3] = load_two(p + 72, p + 80);
    const __m256i last = _mm256_shuffle_epi32(v[3], 0xf9);  // dwords 1 2 3 3
    v[3] = _mm256_blend_epi32(v[3], last, 0xf0);
    transpose_fours(v);
    split(v[0], w[0], w[2]);
    split(_mm256_or_si256(_mm256_srli_epi32(v[0], 24), _mm256_slli_epi32(v[1], 8)), w[1], w[3]);
    split(_mm256_or_si256(_mm256_srli_epi32(v[1], 16), _mm256_slli_epi32(v[2], 16)), w[4], w[6]);
    split(_mm256_srli_epi32(v[2], 8), w[5], w[7]);
  }
};

struct U2 {
  using Order = Fours;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 64;
  static constexpr float kCountedFrom = 0, kMiddle = 2, kFactor = 1;
  static constexpr Math math(bool halves) { return U4::math(halves); }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    const __m256 a = load_floats(p), b = load_floats(p + 32);
    const __m256i v[2] = {_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                          _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd))};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        w[4 * i + j] = _mm256_and_si256(_mm256_srli_epi16(v[i], 2 * j), _mm256_set1_epi8(3));
      }
    }
  }
};

}  // namespace cpumoe::CPUMOE_NS

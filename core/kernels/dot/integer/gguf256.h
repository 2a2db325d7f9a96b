// GGUF blocks of 256, a span each. Byte positions: formats/gguf.cc. Included by ISA files only.
#pragma once
#include "kernels/dot/integer/gguf32.h"

namespace cpumoe::CPUMOE_NS {

CPUMOE_INLINE uint32_t word(const char* p) { return codes::load_bits<uint32_t>(p); }
CPUMOE_INLINE __m256 half_everywhere(const char* p) { return _mm256_set1_ps(codes::half_at(p)); }
CPUMOE_INLINE __m256i dword_everywhere(const char* p) { return _mm256_set1_epi32(int(word(p))); }
// One dword a lane.
CPUMOE_INLINE __m256i by_lane(int a, int b, int c, int d, int e, int f, int g, int h) {
  return _mm256_setr_epi32(a, b, c, d, e, f, g, h);
}
// Bytes 0..7, and bytes 8..15, into Quads' lanes.
CPUMOE_INLINE __m128i to_quads(__m128i bytes) {
  return _mm_shuffle_epi8(bytes,
                          _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
}

// 128 bytes of nibbles: groups 2p and 2p + 1 in the low and high halves of bytes 32p .. 32p + 31.
CPUMOE_INLINE void nibbles_of_pairs(const char* p, __m256i w[8]) {
  __m256i v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[i] = load_codes(p + 32 * i);
  transpose_fours(v);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i high = _mm256_srli_epi16(v[i], 4);
    w[i] = low_nibbles(_mm256_permute2x128_si256(v[i], high, 0x20));
    w[4 + i] = low_nibbles(_mm256_permute2x128_si256(v[i], high, 0x31));
  }
}

// d, dmin and the 12 bytes of six-bit scales and minima of q4_k and q5_k.
CPUMOE_INLINE void scales_and_minima(const char* p, Factors& f) {
  const codes::KScales k = codes::k_scales(p + 4);
  const __m128i both = to_quads(_mm_set_epi64x(int64_t(k.minima), int64_t(k.scales)));
  const __m256 s = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(both));
  const __m256 m = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(both, both)));
  const __m256 minus = _mm256_set1_ps(-0.0f);
  f.s0 = _mm256_mul_ps(s, half_everywhere(p));
  f.o0 = _mm256_mul_ps(m, _mm256_xor_ps(half_everywhere(p + 2), minus));
}

struct Q4K {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 144, kSpanBytes = kBlock;
  static constexpr Math math(bool) { return {.offset = Math::group}; }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) { nibbles_of_pairs(p + 16, w); }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { scales_and_minima(p, f); }
};

struct Q5K {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 176, kSpanBytes = kBlock;
  static constexpr Math math(bool) { return {.parts = Math::ints, .offset = Math::group}; }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    nibbles_of_pairs(p + 48, w);
    // Bit g of byte e is bit 4 of input e of group g.
    const __m256i bit = by_lane(0x01010101, 0x04040404, 0x10101010, 0x40404040, 0x02020202,
                                0x08080808, 0x20202020, int(0x80808080));
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const __m256i bits = _mm256_and_si256(dword_everywhere(p + 16 + 4 * v), bit);
      const __m256i set = _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit), _mm256_set1_epi8(16));
      w[v] = _mm256_or_si256(w[v], set);
    }
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { scales_and_minima(p, f); }
};

// 64 bytes of two-bit codes, four groups in each half.
CPUMOE_INLINE __m256i two_bits(const char* p, int v) {
  const __m256i first = dword_everywhere(p + 4 * v), last = dword_everywhere(p + 32 + 4 * v);
  // Lanes hold groups 0 2 4 6 1 3 5 7, of which 4 and more lie in the second half.
  const __m256i both = _mm256_blend_epi32(first, last, 0xcc);
  return _mm256_and_si256(_mm256_srlv_epi32(both, by_lane(0, 4, 0, 4, 2, 6, 2, 6)),
                          _mm256_set1_epi8(3));
}

// 16 signed factors, two of each group in order, into s16 pairs of Quads' or QuadsHigh's lanes.
template <class Order>
CPUMOE_INLINE void factors_of_halves(__m128i bytes, __m256i& first, __m256i& last) {
  const __m256i both = _mm256_broadcastsi128_si256(bytes);
  alignas(32) int8_t from[2][32];
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) {  // into the upper byte of each s16
      from[0][Order::lane(g) * 4 + b] = int8_t(b % 2 == 0 ? -1 : 2 * g);
      from[1][Order::lane(g) * 4 + b] = int8_t(b % 2 == 0 ? -1 : 2 * g + 1);
    }
  }
  const auto pick = [&](const int8_t* at) __attribute__((always_inline)) {
    const __m256i index = _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
    return _mm256_srai_epi16(_mm256_shuffle_epi8(both, index), 8);
  };
  first = pick(from[0]);
  last = pick(from[1]);
}

struct Q2K {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 84, kSpanBytes = kBlock;
  static constexpr Math math(bool) {
    return {.parts = Math::ints, .scaled = true, .offset = Math::halves};
  }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) w[v] = two_bits(p + 16, v);
  }
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
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    const __m256i bit = by_lane(0x01010101, 0x04040404, 0x10101010, 0x40404040, 0x02020202,
                                0x08080808, 0x20202020, int(0x80808080));
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const __m256i bits = _mm256_and_si256(dword_everywhere(p + 4 * v), bit);
      const __m256i set = _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit), _mm256_set1_epi8(4));
      w[v] = _mm256_or_si256(two_bits(p + 32, v), set);
    }
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
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    __m256i v[4], h[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = load_codes(p + 32 * i);
    transpose_fours(v);  // low halves: groups 0 1 4 5; high halves: groups 2 3 6 7
    h[0] = h[1] = load_codes(p + 128);
    h[2] = h[3] = load_codes(p + 160);
    transpose_fours(h);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256i bits = _mm256_srlv_epi32(h[i], by_lane(0, 2, 0, 2, 0, 2, 0, 2));
      const __m256i upper = _mm256_set1_epi8(0x30);
      const __m256i low =
          _mm256_or_si256(low_nibbles(v[i]), _mm256_and_si256(_mm256_slli_epi16(bits, 4), upper));
      const __m256i high = _mm256_or_si256(high_nibbles(v[i]), _mm256_and_si256(bits, upper));
      w[i] = _mm256_permute2x128_si256(low, high, 0x20);
      w[4 + i] = _mm256_permute2x128_si256(low, high, 0x31);
    }
  }
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
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    nibbles_of_groups(p + 8, 16, w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) w[i] = codes::iq4_values(w[i]);
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

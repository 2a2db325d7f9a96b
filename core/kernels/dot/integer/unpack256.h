// Bits to codes in the lanes of a span, one vector of the layout in a register. Included by ISA files
// only.
#pragma once
#include <immintrin.h>

#include "kernels/dot/integer/math.h"
#include "kernels/vec/avx2_codes.h"

namespace cpumoe::CPUMOE_NS {

// In each half of a register, four vectors of four dwords transposed: v[i] gets dword i of each.
CPUMOE_INLINE void transpose_fours(__m256i v[4]) {
  const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
  const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm256_unpacklo_epi64(a, c);
  v[1] = _mm256_unpackhi_epi64(a, c);
  v[2] = _mm256_unpacklo_epi64(b, d);
  v[3] = _mm256_unpackhi_epi64(b, d);
}

CPUMOE_INLINE __m256i load_two(const char* low, const char* high) {
  return _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}

CPUMOE_INLINE __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
CPUMOE_INLINE __m256i flip(__m256i v, int bits) {
  return _mm256_xor_si256(v, _mm256_set1_epi8(char(bits)));
}
CPUMOE_INLINE __m256i high_nibbles(__m256i v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }

CPUMOE_INLINE __m256i look_up(const int8_t table[16], __m256i nibbles) {
  const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), nibbles);
}

// Eight groups of 32 bytes, kStep bytes apart, at p + kAt. Quads.
template <int kStep, int kAt>
CPUMOE_INLINE void bytes_of_groups(const char* p, __m256i w[8]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const char* a = p + kAt + 2 * j * kStep;
    w[j] = load_two(a, a + kStep);
    w[4 + j] = load_two(a + 16, a + kStep + 16);
  }
  transpose_fours(w);
  transpose_fours(w + 4);
}

// Eight groups of 16 bytes, kStep bytes apart, at p + kAt; inputs 0..15 in the low halves of the bytes, 16..31
// in the high ones. Quads.
template <int kStep, int kAt>
CPUMOE_INLINE void nibbles_of_groups(const char* p, __m256i w[8]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j)
    w[j] = load_two(p + kAt + 2 * j * kStep, p + kAt + (2 * j + 1) * kStep);
  transpose_fours(w);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    w[4 + j] = high_nibbles(w[j]);
    w[j] = low_nibbles(w[j]);
  }
}

// 128 bytes of nibbles, inputs in order. Pairs.
CPUMOE_INLINE void nibbles_in_order(const char* p, __m256i w[8]) {
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

// 64 bytes of two-bit codes, inputs in order. Fours.
CPUMOE_INLINE void two_bits_in_order(const char* p, __m256i w[8]) {
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

// Eight inputs, 24 bits of every lane: two vectors, the even and the odd ones.
CPUMOE_INLINE void split_threes(__m256i v, __m256i& even, __m256i& odd) {
  const auto bits = [](int mask) { return _mm256_set1_epi32(mask); };
  const __m256i halves = _mm256_or_si256(_mm256_and_si256(v, bits(0xfff)),
                                         _mm256_slli_epi32(_mm256_and_si256(v, bits(0xfff000)), 4));
  const __m256i bytes =
      _mm256_or_si256(_mm256_and_si256(halves, bits(0x003f003f)),
                      _mm256_slli_epi32(_mm256_and_si256(halves, bits(0x0fc00fc0)), 2));
  even = _mm256_and_si256(bytes, bits(0x07070707));
  odd = _mm256_and_si256(_mm256_srli_epi32(bytes, 3), bits(0x07070707));
}
// 96 bytes of three-bit codes, inputs in order. Pairs.
CPUMOE_INLINE void three_bits_in_order(const char* p, __m256i w[8]) {
  __m256i v[4];
#pragma GCC unroll 3
  for (int j = 0; j < 3; ++j) v[j] = load_two(p + 24 * j, p + 24 * j + 12);
  // Groups 6 and 7 end with the span: 16 bytes are read from before its last group.
  v[3] = load_two(p + 72, p + 80);
  const __m256i last = _mm256_shuffle_epi32(v[3], 0xf9);  // dwords 1 2 3 3
  v[3] = _mm256_blend_epi32(v[3], last, 0xf0);
  transpose_fours(v);
  split_threes(v[0], w[0], w[2]);
  split_threes(_mm256_or_si256(_mm256_srli_epi32(v[0], 24), _mm256_slli_epi32(v[1], 8)), w[1],
               w[3]);
  split_threes(_mm256_or_si256(_mm256_srli_epi32(v[1], 16), _mm256_slli_epi32(v[2], 16)), w[4],
               w[6]);
  split_threes(_mm256_srli_epi32(v[2], 8), w[5], w[7]);
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

// q6_k: 128 bytes of nibbles, 64 of upper bits. QuadsHigh.
CPUMOE_INLINE void six_bits(const char* p, __m256i w[8]) {
  __m256i v[4], h[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[i] = load_codes(p + 32 * i);
  transpose_fours(v);  // low halves: groups 0 1 4 5; high halves: groups 2 3 6 7
  h[0] = h[1] = load_codes(p + 128);
  h[2] = h[3] = load_codes(p + 160);
  transpose_fours(h);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i bits = _mm256_srlv_epi32(h[i], _mm256_setr_epi32(0, 2, 0, 2, 0, 2, 0, 2));
    const __m256i upper = _mm256_set1_epi8(0x30);
    const __m256i low =
        _mm256_or_si256(low_nibbles(v[i]), _mm256_and_si256(_mm256_slli_epi16(bits, 4), upper));
    const __m256i high = _mm256_or_si256(high_nibbles(v[i]), _mm256_and_si256(bits, upper));
    w[i] = _mm256_permute2x128_si256(low, high, 0x20);
    w[4 + i] = _mm256_permute2x128_si256(low, high, 0x31);
  }
}

// 64 bytes of two-bit codes, four groups in each half. Quads.
CPUMOE_INLINE void two_bits_of_halves(const char* p, __m256i w[8]) {
  const __m256i shift = _mm256_setr_epi32(0, 4, 0, 4, 2, 6, 2, 6);
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) {
    const __m256i first = _mm256_set1_epi32(codes::load_bits<int32_t>(p + 4 * v));
    const __m256i last = _mm256_set1_epi32(codes::load_bits<int32_t>(p + 32 + 4 * v));
    // Lanes hold groups 0 2 4 6 1 3 5 7, of which 4 and more lie in the second half.
    const __m256i both = _mm256_blend_epi32(first, last, 0xcc);
    w[v] = _mm256_and_si256(_mm256_srlv_epi32(both, shift), _mm256_set1_epi8(3));
  }
}

// Ors bit g of byte e, moved to kValue, into input e of group g. Quads.
template <int kValue>
CPUMOE_INLINE void or_bits_of_groups(const char* p, __m256i w[8]) {
  const __m256i bit = _mm256_setr_epi32(0x01010101, 0x04040404, 0x10101010, 0x40404040, 0x02020202,
                                        0x08080808, 0x20202020, int(0x80808080));
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) {
    const __m256i all = _mm256_set1_epi32(codes::load_bits<int32_t>(p + 4 * v));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(all, bit), bit);
    w[v] = _mm256_or_si256(w[v], _mm256_and_si256(set, _mm256_set1_epi8(kValue)));
  }
}

// fp16 at p + kAt + j * kStep for block j, in the lanes of Quads.
// at(g) of every group g, one word a lane of Quads.
template <class At>
CPUMOE_INLINE __m128i words_in_lanes(const At& at) {
  __m128i v = _mm_cvtsi32_si128(at(0));
  v = _mm_insert_epi16(v, at(2), 1);
  v = _mm_insert_epi16(v, at(4), 2);
  v = _mm_insert_epi16(v, at(6), 3);
  v = _mm_insert_epi16(v, at(1), 4);
  v = _mm_insert_epi16(v, at(3), 5);
  v = _mm_insert_epi16(v, at(5), 6);
  return _mm_insert_epi16(v, at(7), 7);
}
template <int kStep, int kAt>
CPUMOE_INLINE __m256 halves_of_blocks(const char* p) {
  const auto at = [=](int j) __attribute__((always_inline)) {
    uint16_t u;
    memcpy(&u, p + kAt + j * kStep, 2);
    return int(u);
  };
  return _mm256_cvtph_ps(words_in_lanes(at));
}

// Ors the fifth bits, 32 of every block at p + kAt + j * kStep, into the codes: bit e of a block to bit 4
// of input e.
template <int kStep, int kAt>
CPUMOE_INLINE void or_fifth_bits(const char* p, __m256i w[8]) {
  const auto at = [=](int j) __attribute__((always_inline)) {
    int32_t u;
    memcpy(&u, p + kAt + j * kStep, 4);
    return u;
  };
  const auto four = [=](int j) __attribute__((always_inline)) {
    const __m128i low = _mm_insert_epi32(_mm_cvtsi32_si128(at(j)), at(j + 2), 1);
    const __m128i high = _mm_insert_epi32(_mm_cvtsi32_si128(at(j + 4)), at(j + 6), 1);
    return _mm_unpacklo_epi64(low, high);
  };
  const __m256i bits = _mm256_inserti128_si256(_mm256_castsi128_si256(four(0)), four(1), 1);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // byte i of a block: vectors 2i and 2i + 1
    const __m256i from = _mm256_setr_epi32(0x00000000, 0x04040404, 0x08080808, 0x0c0c0c0c,
                                           0x00000000, 0x04040404, 0x08080808, 0x0c0c0c0c);
    const __m256i byte =
        _mm256_shuffle_epi8(bits, _mm256_add_epi8(from, _mm256_set1_epi8(char(i))));
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i mask = _mm256_set1_epi32(h == 0 ? 0x08040201 : int(0x80402010));
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(byte, mask), mask);
      w[2 * i + h] = _mm256_or_si256(w[2 * i + h], _mm256_and_si256(set, _mm256_set1_epi8(16)));
    }
  }
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

// The first byte of every block, one a lane.
template <int kStep>
CPUMOE_INLINE __m256i first_bytes(const char* p) {
  return _mm256_cvtepu16_epi32(words_in_lanes(
      [=](int j) __attribute__((always_inline)) { return int(uint8_t(p[j * kStep])); }));
}

// Bytes 0..7, and bytes 8..15, into Quads' lanes.
CPUMOE_INLINE __m128i to_quads(__m128i bytes) {
  return _mm_shuffle_epi8(bytes,
                          _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
}

CPUMOE_INLINE void nibbles_in_place(const char* p, __m256i w[8]) { nibbles_of_pairs(p, w); }
// d, dmin and the 12 bytes of six-bit scales and minima of q4_k and q5_k.
template <bool kInPlace>
CPUMOE_INLINE void scales_and_minima(const char* p, Factors& f) {
  const codes::KScales k = codes::k_scales(p + 4);
  const __m128i both = to_quads(_mm_set_epi64x(int64_t(k.minima), int64_t(k.scales)));
  const __m256 s = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(both));
  const __m256 m = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(both, both)));
  const __m256 minus = _mm256_set1_ps(-0.0f);
  f.s0 = _mm256_mul_ps(s, _mm256_set1_ps(codes::half_at(p)));
  f.o0 = _mm256_mul_ps(m, _mm256_xor_ps(_mm256_set1_ps(codes::half_at(p + 2)), minus));
}

}  // namespace cpumoe::CPUMOE_NS

// GGUF's blocks (formats/gguf.cc) to fp32, 32 elements at a time, with the same bits as
// decode_gguf_block but for the sign of a zero and the payload of a NaN. Included by avx2.cc files
// only.
#pragma once
#include <immintrin.h>

#include "formats/gguf.h"
#include "kernels/vec/avx2_codes.h"

namespace cpumoe::CPUMOE_NS::codes {

// 32 signed codes q; elements 0..15 are q * scale[0] - minimum[0], the others of [1].
struct Codes32 {
  __m256i q;
  float scale[2], minimum[2];
  bool has_minimum;
};

CPUMOE_INLINE float half_at(const char* p) { return _cvtsh_ss(load_bits<uint16_t>(p)); }
CPUMOE_INLINE __m256i load32(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
CPUMOE_INLINE __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
// Two bits of each byte, from bit `shift` on.
CPUMOE_INLINE __m256i bit_pairs(__m256i v, int shift) {
  return _mm256_and_si256(_mm256_srl_epi16(v, _mm_cvtsi32_si128(shift)), _mm256_set1_epi8(3));
}
// `value` in the bytes that have bit `bit`.
CPUMOE_INLINE __m256i where_bit(__m256i v, int bit, int value) {
  const __m256i mask = _mm256_set1_epi8(char(1 << bit));
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(v, mask), mask),
                          _mm256_set1_epi8(char(value)));
}
// `value` in the bytes whose bit is set in `bits`.
CPUMOE_INLINE __m256i where_bits(uint32_t bits, int value) {
  const __m256i byte_of =
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
  const __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), byte_of);
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(v, bit_of), bit_of),
                          _mm256_set1_epi8(char(value)));
}
// nibbles[16]: low halves, then high halves.
CPUMOE_INLINE __m256i nibbles32(const char* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return low_nibbles(_mm256_set_m128i(_mm_srli_epi16(v, 4), v));
}
CPUMOE_INLINE __m256i less(__m256i v, int n) {
  return _mm256_sub_epi8(v, _mm256_set1_epi8(char(n)));
}
CPUMOE_INLINE __m256i iq4_values(__m256i nibbles) {
  return _mm256_shuffle_epi8(
      _mm256_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
                       -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
      nibbles);
}
CPUMOE_INLINE __m256i e2m1_doubled(__m256i nibbles) {
  return _mm256_shuffle_epi8(
      _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,  //
                       0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
      nibbles);
}
CPUMOE_INLINE Codes32 scaled32(__m256i q, float a, float b) { return {q, {a, b}, {0, 0}, false}; }
CPUMOE_INLINE Codes32 scaled32(__m256i q, float scale) { return scaled32(q, scale, scale); }

// Six-bit scales (low word) and minima (high word) of q4_k and q5_k, a byte for each group.
struct KScales {
  uint64_t scales, minima;
};
CPUMOE_INLINE KScales k_scales(const char* p) {
  const uint32_t a = load_bits<uint32_t>(p), b = load_bits<uint32_t>(p + 4),
                 c = load_bits<uint32_t>(p + 8);
  const uint32_t s = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
  const uint32_t m = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
  return {(a & 0x3f3f3f3fu) | uint64_t(s) << 32, (b & 0x3f3f3f3fu) | uint64_t(m) << 32};
}
CPUMOE_INLINE Codes32 k_group(const char* block, int g, __m256i q) {
  const KScales k = k_scales(block + 4);
  const float s = half_at(block) * float(k.scales >> (8 * g) & 255);
  const float m = half_at(block + 2) * float(k.minima >> (8 * g) & 255);
  return {q, {s, s}, {m, m}, true};
}
// Half `g & 1` of the nibbles of 32 bytes.
CPUMOE_INLINE __m256i nibble_half(const char* p, int g) {
  return low_nibbles(_mm256_srl_epi16(load32(p), _mm_cvtsi32_si128(g % 2 * 4)));
}
CPUMOE_INLINE int q3_scale(const char* p, int g) {
  const uint32_t low = uint32_t(uint8_t(p[g % 8])) >> (g / 8 * 4) & 15;
  return int(low | (uint32_t(uint8_t(p[8 + g % 4])) >> (g / 4 * 2) & 3) << 4) - 32;
}

// Elements 32 g .. 32 g + 31 of the block.
template <Code C>
CPUMOE_INLINE Codes32 gguf_group(const char* p, int g) {
  if constexpr (C == Code::q8_0) return scaled32(load32(p + 2), half_at(p));
  if constexpr (C == Code::q4_0) return scaled32(less(nibbles32(p + 2), 8), half_at(p));
  if constexpr (C == Code::q4_1) {
    const float d = half_at(p), m = -half_at(p + 2);
    return {nibbles32(p + 4), {d, d}, {m, m}, true};
  }
  if constexpr (C == Code::q5_0) {
    const __m256i high = where_bits(load_bits<uint32_t>(p + 2), 16);
    return scaled32(less(_mm256_or_si256(nibbles32(p + 6), high), 16), half_at(p));
  }
  if constexpr (C == Code::q5_1) {
    const __m256i high = where_bits(load_bits<uint32_t>(p + 4), 16);
    const float d = half_at(p), m = -half_at(p + 2);
    return {_mm256_or_si256(nibbles32(p + 8), high), {d, d}, {m, m}, true};
  }
  if constexpr (C == Code::iq4_nl) return scaled32(iq4_values(nibbles32(p + 2)), half_at(p));
  if constexpr (C == Code::gguf_mxfp4) {
    const uint32_t e = uint8_t(*p);
    const float d = bits_to_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    return scaled32(e2m1_doubled(nibbles32(p + 1)), d);
  }
  if constexpr (C == Code::q2_k) {
    const __m256i q = bit_pairs(load32(p + 16 + g / 4 * 32), g % 4 * 2);
    const float d = half_at(p + 80), dmin = half_at(p + 82);
    const uint32_t a = uint8_t(p[2 * g]), b = uint8_t(p[2 * g + 1]);
    return {q,
            {d * float(a & 15), d * float(b & 15)},
            {dmin * float(a >> 4), dmin * float(b >> 4)},
            true};
  }
  if constexpr (C == Code::q3_k) {
    const __m256i low = bit_pairs(load32(p + 32 + g / 4 * 32), g % 4 * 2);
    const __m256i q = less(_mm256_or_si256(low, where_bit(load32(p), g, 4)), 4);
    const float d = half_at(p + 108);
    return scaled32(q, d * float(q3_scale(p + 96, 2 * g)), d * float(q3_scale(p + 96, 2 * g + 1)));
  }
  if constexpr (C == Code::q4_k) return k_group(p, g, nibble_half(p + 16 + g / 2 * 32, g));
  if constexpr (C == Code::q5_k) {
    const __m256i high = where_bit(load32(p + 16), g, 16);
    return k_group(p, g, _mm256_or_si256(nibble_half(p + 48 + g / 2 * 32, g), high));
  }
  if constexpr (C == Code::q6_k) {
    const int s = g % 4;
    const __m256i low = nibble_half(p + g / 4 * 64 + s % 2 * 32, s / 2);
    const __m256i high = _mm256_slli_epi16(bit_pairs(load32(p + 128 + g / 4 * 32), 2 * s), 4);
    const float d = half_at(p + 208);
    return scaled32(less(_mm256_or_si256(low, high), 32), d * float(int8_t(p[192 + 2 * g])),
                    d * float(int8_t(p[192 + 2 * g + 1])));
  }
  if constexpr (C == Code::iq4_xs) {
    const uint32_t low = uint32_t(uint8_t(p[4 + g / 2])) >> (g % 2 * 4) & 15;
    const uint32_t high = uint32_t(load_bits<uint16_t>(p + 2)) >> (2 * g) & 3;
    const float d = half_at(p) * float(int(low | high << 4) - 32);
    return scaled32(iq4_values(nibbles32(p + 8 + g * 16)), d);
  }
}

// Elements 8 i .. 8 i + 7 of 32.
CPUMOE_INLINE __m256 decode8(const Codes32& c, int i) {
  const __m128i half = i < 2 ? _mm256_castsi256_si128(c.q) : _mm256_extracti128_si256(c.q, 1);
  const __m128i bytes = i % 2 == 0 ? half : _mm_unpackhi_epi64(half, half);
  const __m256 q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  const __m256 v = _mm256_mul_ps(q, _mm256_set1_ps(c.scale[i / 2]));
  return c.has_minimum ? _mm256_sub_ps(v, _mm256_set1_ps(c.minimum[i / 2])) : v;
}

// `depth` elements (a multiple of 32; whole blocks of 256 where a block has them) to out.
template <Code C>
CPUMOE_INLINE void decode_gguf(const char* p, int64_t depth, float* out) {
  const CodeBlock b = code_block(C);
  for (int64_t k = 0; k < depth; k += 32) {
    const char* block = p + k / b.elements * b.bytes;
    const Codes32 c = gguf_group<C>(block, int(k % b.elements / 32));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) _mm256_storeu_ps(out + k + 8 * i, decode8(c, i));
  }
}

}  // namespace cpumoe::CPUMOE_NS::codes

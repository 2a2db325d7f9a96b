// Bits to codes in the lanes of a span. Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "kernels/dot/integer/math.h"
#include "kernels/vec/avx2_gguf.h"

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

using codes::low_nibbles;
CPUMOE_INLINE __m256i high_nibbles(__m256i v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }

CPUMOE_INLINE __m256i look_up(const int8_t table[16], __m256i nibbles) {
  const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), nibbles);
}

// Eight groups of 32 bytes, `step` bytes apart. Quads.
CPUMOE_INLINE void bytes_of_groups(const char* p, int64_t step, __m256i w[8]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const char* a = p + 2 * j * step;
    w[j] = load_two(a, a + step);
    w[4 + j] = load_two(a + 16, a + step + 16);
  }
  transpose_fours(w);
  transpose_fours(w + 4);
}

// Eight groups of 16 bytes, `step` bytes apart; inputs 0..15 in the low halves of the bytes, 16..31
// in the high ones. Quads.
CPUMOE_INLINE void nibbles_of_groups(const char* p, int64_t step, __m256i w[8]) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) w[j] = load_two(p + 2 * j * step, p + (2 * j + 1) * step);
  transpose_fours(w);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    w[4 + j] = high_nibbles(w[j]);
    w[j] = low_nibbles(w[j]);
  }
}

// Doubled e2m1 plus 12, so that they are unsigned.
constexpr int8_t kE2m1Plus12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace cpumoe::CPUMOE_NS

// Eight neighbours of a line of scales or of zero points as fp32. Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "base/types.h"
#include "kernels/vec/avx2_codes.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::CPUMOE_NS {

template <Code C>
CPUMOE_INLINE __m256 scales8(const char* p) {
  if constexpr (C == Code::f32) return F32::load8(p);
  if constexpr (C == Code::f16) return F16::load8(p);
  if constexpr (C == Code::bf16) return BF16::load8(p);
  if constexpr (C == Code::e4m3) return codes::E4M3::load8(p, 0);
  if constexpr (C == Code::e8m0) return codes::E8M0::load8(p, 0);
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
    const __m256i at =
        _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(bits));
    v = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(int(uint32_t(u))), at),
                         _mm256_set1_epi32((1 << bits) - 1));
  }
  return _mm256_cvtepi32_ps(v);
}

}  // namespace cpumoe::CPUMOE_NS

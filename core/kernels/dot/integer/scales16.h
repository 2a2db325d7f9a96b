// Sixteen neighbours of a line of scales as fp32. Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "base/types.h"

namespace cpumoe::CPUMOE_NS {

// Sixteen neighbours of a line from p on; those whose bytes lie past `end` are not read.
template <Code C>
CPUMOE_INLINE __m512 scales16(const char* p, const char* end) {
  constexpr int64_t kSize = code_block(C).bytes;
  const __mmask16 there = __mmask16((1u << min64(16, (end - p) / kSize)) - 1);
  if constexpr (C == Code::f32) return _mm512_maskz_loadu_ps(there, p);
  if constexpr (C == Code::f16 || C == Code::bf16) {
    const __m256i v = _mm256_maskz_loadu_epi16(there, p);
    if constexpr (C == Code::f16) return _mm512_cvtph_ps(v);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  }
  const __m128i bytes = _mm_maskz_loadu_epi8(there, p);
  if constexpr (C == Code::e8m0) {
    const __m512i e = _mm512_cvtepu8_epi32(bytes), low = _mm512_set1_epi32(0x400000);
    // 0: 2^-127, below the normal range. 255: NaN, the bit below infinity's exponent set.
    const __m512i least = _mm512_max_epu32(_mm512_slli_epi32(e, 23), low);
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(255));
    return _mm512_castsi512_ps(_mm512_mask_or_epi32(least, nan, least, low));
  }
  if constexpr (C == Code::e4m3) {  // by way of fp16, whose subnormals are kept
    const __m256i v = _mm256_cvtepu8_epi16(bytes);
    const __m256i fields = _mm256_and_si256(_mm256_slli_epi16(v, 7), _mm256_set1_epi16(0x3f80));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(v, 8), _mm256_set1_epi16(-0x8000));
    const __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(fields, sign)),
                                       _mm512_set1_ps(256));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(fields, _mm256_set1_epi16(0x3f80));
    return _mm512_mask_mov_ps(value, nan, _mm512_set1_ps(__builtin_nanf("")));
  }
}

}  // namespace cpumoe::CPUMOE_NS

// Elements as eight fp32 lanes and back (round to nearest even, as base/types.h), by Code.
// Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "base/types.h"
#include "kernels/vec/avx2.h"
#include "kernels/vec/avx2_decode.h"

namespace cpumoe::CPUMOE_NS {

// Elements i..i + 7 of p.
template <Code C>
CPUMOE_INLINE __m256 load8(const void* p, int64_t i) {
  const char* at = static_cast<const char*>(p);
  if constexpr (C == Code::f32) return F32::load8(at + i * F32::kBytes);
  if constexpr (C == Code::f16) return F16::load8(at + i * F16::kBytes);
  if constexpr (C == Code::bf16) return BF16::load8(at + i * BF16::kBytes);
}

// The first n lanes of v to elements i..i + n - 1 of p; n in 0..8.
template <Code C>
CPUMOE_INLINE void store_lanes(void* p, int64_t i, __m256 v, int64_t n) {
  if constexpr (C == Code::f32) {
    Vec::store(static_cast<float*>(p) + i, v, n);
  } else {
    __m128i h;
    if constexpr (C == Code::f16) {
      h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const __m256i u = _mm256_castps_si256(v), one = _mm256_set1_epi32(1);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), one);
      const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
      const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
      const __m256i r =
          _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, _mm256_castps_si256(nan)), 16);
      h = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    }
    char* out = static_cast<char*>(p) + i * 2;
    if (n >= 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), h);
    } else {
      alignas(16) char bytes[16];
      _mm_store_si128(reinterpret_cast<__m128i*>(bytes), h);
      memcpy(out, bytes, size_t(n) * 2);
    }
  }
}

}  // namespace cpumoe::CPUMOE_NS

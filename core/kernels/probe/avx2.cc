#include <immintrin.h>

#include "base/types.h"
#include "kernels/probe/probe.h"

namespace cpumoe::avx2 {

extern const int32_t probe_flops = 12 * 8 * 2;

uint64_t probe_read(const void* p, int64_t bytes) {
  const __m256i* at = static_cast<const __m256i*>(p);
  __m256i a[8];
  for (int j = 0; j < 8; ++j) a[j] = _mm256_setzero_si256();
  for (int64_t i = 0; i < bytes / 32; i += 8) {
    for (int j = 0; j < 8; ++j) a[j] = _mm256_or_si256(a[j], _mm256_load_si256(at + i + j));
  }
  for (int j = 1; j < 8; ++j) a[0] = _mm256_or_si256(a[0], a[j]);
  const __m128i half =
      _mm_or_si128(_mm256_castsi256_si128(a[0]), _mm256_extracti128_si256(a[0], 1));
  return uint64_t(_mm_extract_epi64(half, 0)) | uint64_t(_mm_extract_epi64(half, 1));
}

float probe_fma(int64_t passes) {
  __m256 x = _mm256_set1_ps(0.999999f), y = _mm256_set1_ps(1e-7f), c[12];
  for (int j = 0; j < 12; ++j) c[j] = _mm256_set1_ps(float(j));
  for (int64_t i = 0; i < passes; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) c[j] = _mm256_fmadd_ps(c[j], x, y);
    __asm__ volatile("" : "+x"(x));  // keeps the compiler from folding passes together
  }
  for (int j = 1; j < 12; ++j) c[0] = _mm256_add_ps(c[0], c[j]);
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(c[0]), _mm256_extractf128_ps(c[0], 1));
  float lanes[4];
  _mm_storeu_ps(lanes, half);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

}  // namespace cpumoe::avx2

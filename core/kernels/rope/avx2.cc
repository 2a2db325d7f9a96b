#include <immintrin.h>

#include "kernels/rope/rope.h"

namespace cpumoe::avx2 {
namespace {

// Four pairs a vector: each cosine and sine serves two neighbouring lanes.
void rotate_neighbours(float* x, const float* cos, const float* sin, int64_t half) {
  const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  int64_t j = 0;
  for (; j + 4 <= half; j += 4) {
    const __m256 c = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(cos + j)), twice);
    const __m256 s = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(sin + j)), twice);
    const __m256 v = _mm256_loadu_ps(x + 2 * j), swapped = _mm256_permute_ps(v, 0xB1);
    _mm256_storeu_ps(x + 2 * j, _mm256_fmaddsub_ps(v, c, _mm256_mul_ps(swapped, s)));
  }
  for (; j < half; ++j) {
    const float first = x[2 * j], second = x[2 * j + 1];
    x[2 * j] = first * cos[j] - second * sin[j];
    x[2 * j + 1] = second * cos[j] + first * sin[j];
  }
}

void rotate_halves(float* x, const float* cos, const float* sin, int64_t half) {
  float* y = x + half;
  int64_t j = 0;
  for (; j + 8 <= half; j += 8) {
    const __m256 c = _mm256_loadu_ps(cos + j), s = _mm256_loadu_ps(sin + j);
    const __m256 first = _mm256_loadu_ps(x + j), second = _mm256_loadu_ps(y + j);
    _mm256_storeu_ps(x + j, _mm256_fmsub_ps(first, c, _mm256_mul_ps(second, s)));
    _mm256_storeu_ps(y + j, _mm256_fmadd_ps(second, c, _mm256_mul_ps(first, s)));
  }
  for (; j < half; ++j) {
    const float first = x[j], second = y[j];
    x[j] = first * cos[j] - second * sin[j];
    y[j] = second * cos[j] + first * sin[j];
  }
}

}  // namespace

void rope(const RopeArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* cos = a.cos + r * a.table_stride;
    const float* sin = a.sin + r * a.table_stride;
    for (int64_t h = 0; h < a.heads; ++h) {
      float* x = a.x + r * a.row_stride + h * a.head_dim;
      (a.interleaved ? rotate_neighbours : rotate_halves)(x, cos, sin, a.dims / 2);
    }
  }
}

}  // namespace cpumoe::avx2

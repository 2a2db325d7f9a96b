#include <immintrin.h>

#include "kernels/rope/rope.h"

namespace cpumoe::avx2 {

void rope(const RopeArgs& a) {
  const int64_t half = a.dims / 2;
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* cos = a.cos + r * a.table_stride;
    const float* sin = a.sin + r * a.table_stride;
    for (int64_t h = 0; h < a.heads; ++h) {
      float* x = a.x + r * a.row_stride + h * a.head_dim;
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
  }
}

}  // namespace cpumoe::avx2

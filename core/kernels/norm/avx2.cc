#include <immintrin.h>

#include "kernels/norm/norm.h"
#include "kernels/vec/avx2_lanes.h"

namespace cpumoe::avx2 {
namespace {

CPUMOE_INLINE float sum_lanes(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// sum of x^2 in four chains of eight lanes, so that the additions overlap.
float sum_squares(const float* x, int64_t size) {
  __m256 s[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                 _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) {
    for (int j = 0; j < 4; ++j) {
      const __m256 v = _mm256_loadu_ps(x + i + 8 * j);
      s[j] = _mm256_fmadd_ps(v, v, s[j]);
    }
  }
  for (; i < size; i += 8) {
    const __m256 v = Vec::load(x + i, size - i);
    s[0] = _mm256_fmadd_ps(v, v, s[0]);
  }
  return sum_lanes(_mm256_add_ps(_mm256_add_ps(s[0], s[1]), _mm256_add_ps(s[2], s[3])));
}

template <Code C>
void scale_row(const NormArgs& a, const float* x, float inverse, float* out) {
  const __m256 inv = _mm256_set1_ps(inverse), offset = _mm256_set1_ps(a.weight_offset);
  int64_t i = 0;
  if (a.weight.step == 1) {
    for (; i + 8 <= a.size; i += 8) {
      const __m256 w = _mm256_add_ps(load8<C>(a.weight.data, i), offset);
      _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), inv), w));
    }
  }
  for (; i < a.size; ++i) {
    const float w = load_as_float(a.weight.data, C, i * a.weight.step) + a.weight_offset;
    out[i] = x[i] * inverse * w;
  }
}

}  // namespace

void norm(const NormArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.x + r * a.x_stride;
    if (a.residual != nullptr) {
      const float* residual = a.residual + r * a.x_stride;
      float* sum = a.sum + r * a.x_stride;
      for (int64_t i = 0; i < a.size; i += 8) {
        const int64_t n = a.size - i;
        Vec::store(sum + i, _mm256_add_ps(Vec::load(x + i, n), Vec::load(residual + i, n)), n);
      }
      x = sum;
    }
    const float mean = sum_squares(x, a.size) / float(a.size);
    const float inverse = 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + a.eps)));
    float* out = a.out + r * a.out_stride;
    if (a.weight.data == nullptr) {
      const __m256 inv = _mm256_set1_ps(inverse);
      for (int64_t i = 0; i < a.size; i += 8) {
        Vec::store(out + i, _mm256_mul_ps(Vec::load(x + i, a.size - i), inv), a.size - i);
      }
    } else if (a.weight.code == Code::f32) {
      scale_row<Code::f32>(a, x, inverse, out);
    } else if (a.weight.code == Code::f16) {
      scale_row<Code::f16>(a, x, inverse, out);
    } else {
      scale_row<Code::bf16>(a, x, inverse, out);
    }
  }
}

}  // namespace cpumoe::avx2

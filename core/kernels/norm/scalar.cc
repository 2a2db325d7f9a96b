// Reference kernel: fp32 steps, the sum of squares in float64.
#include <cmath>

#include "kernels/norm/norm.h"

namespace cpumoe::scalar {

void norm(const NormArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.x + r * a.x_stride;
    if (a.residual != nullptr) {
      const float* residual = a.residual + r * a.x_stride;
      float* sum = a.sum + r * a.x_stride;
      for (int64_t i = 0; i < a.size; ++i) sum[i] = x[i] + residual[i];
      x = sum;
    }
    double squares = 0;
    for (int64_t i = 0; i < a.size; ++i) squares += double(x[i]) * x[i];
    const float mean = float(squares / double(a.size));
    const float inverse = 1.0f / std::sqrt(mean + a.eps);
    float* out = a.out + r * a.out_stride;
    for (int64_t i = 0; i < a.size; ++i) {
      float w = 1;
      if (a.weight.data != nullptr) {
        w = load_as_float(a.weight.data, a.weight.code, i * a.weight.step) + a.weight_offset;
      }
      out[i] = x[i] * inverse * w;
    }
  }
}

}  // namespace cpumoe::scalar

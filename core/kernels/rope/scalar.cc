// Reference kernel, and the table that every ISA shares.
#include <cmath>

#include "kernels/rope/rope.h"

namespace cpumoe {

void rope_table(int64_t position, const float* inv_freq, int64_t half, float scale, float* cos,
                float* sin) {
  for (int64_t j = 0; j < half; ++j) {
    const double angle = float(position) * inv_freq[j];
    cos[j] = float(std::cos(angle)) * scale;
    sin[j] = float(std::sin(angle)) * scale;
  }
}

namespace scalar {

void rope(const RopeArgs& a) {
  const int64_t half = a.dims / 2;
  const int64_t step = a.interleaved ? 2 : 1, apart = a.interleaved ? 1 : half;
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* cos = a.cos + r * a.table_stride;
    const float* sin = a.sin + r * a.table_stride;
    for (int64_t h = 0; h < a.heads; ++h) {
      float* x = a.x + r * a.row_stride + h * a.head_dim;
      for (int64_t j = 0; j < half; ++j) {
        float& first = x[j * step];
        float& second = x[j * step + apart];
        const float before = first;
        first = before * cos[j] - second * sin[j];
        second = second * cos[j] + before * sin[j];
      }
    }
  }
}

}  // namespace scalar
}  // namespace cpumoe

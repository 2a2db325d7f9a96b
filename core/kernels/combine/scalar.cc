#include "kernels/combine/combine.h"

namespace cpumoe::scalar {

void combine(const CombineArgs& a) {
  for (int64_t i = 0; i < a.len; ++i) {
    float sum = a.accumulate ? load_as_float(a.out, a.out_code, i) : 0.0f;
    for (int64_t r = 0; r < a.count; ++r) {
      sum += a.rows[(a.index ? a.index[r] : r) * a.row_stride + i];
    }
    store_from_float(a.out, a.out_code, i, sum);
  }
}

}  // namespace cpumoe::scalar

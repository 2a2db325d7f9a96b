// Room `rope`: rotary positions on half-split pairs, and the table of their cosines and sines.
//   angle[r, j] = fp32(position[r]) * inv_freq[j]      rounded to fp32, as Transformers does
//   x[r, h, j]        <- x[j] * cos - x[j + half] * sin       j in [0, half), half = dims / 2
//   x[r, h, j + half] <- x[j + half] * cos + x[j] * sin       elements from `dims` on stay
#pragma once
#include "base/types.h"
#include "machine/isa.h"

namespace cpumoe {

struct RopeArgs {
  float* x;  // rows x heads x head_dim, in place
  int64_t rows, heads, head_dim;
  int64_t row_stride;  // elements between rows; heads are head_dim apart
  int64_t dims;        // even, <= head_dim
  const float* cos;    // rows x dims / 2, `table_stride` elements between rows
  const float* sin;
  int64_t table_stride;
};
// Rounding: two products and one sum per element, one rounding each or fused: at most
// 3 eps (|x[j] cos| + |x[j + half] sin|) from float64 on the same table. NaN and Inf propagate.
struct RopeKernel {
  const char* name;
  Isa isa;
  void (*run)(const RopeArgs&);
};
const RopeKernel* rope_kernels(int* count);
const RopeKernel* select_rope(IsaSet isa);

// One row of the table: cos and sin (each `half` elements) of the fp32 angle, evaluated in float64
// so that long positions lose nothing more, times `scale`.
void rope_table(int64_t position, const float* inv_freq, int64_t half, float scale, float* cos,
                float* sin);

}  // namespace cpumoe

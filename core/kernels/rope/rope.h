// Room `rope`: rotary positions on pairs, and the table of their cosines and sines.
//   angle[r, j] = fp32(position[r]) * inv_freq[j]      rounded to fp32, as Transformers does
//   a <- a * cos - b * sin, b <- b * cos + a * sin     elements from `dims` on stay
// Pair j in [0, half), half = dims / 2, of x[r, h]:
//   half-split:  a = x[j], b = x[j + half]
//   interleaved: a = x[2j], b = x[2j + 1]     (DeepSeek; GGUF's llama)
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
  bool interleaved = false;
};
// Rounding: two products and one sum per element, one rounding each or fused: at most
// 3 eps (|a cos| + |b sin|) from float64 on the same table. NaN and Inf propagate.
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

// Room `norm`: root-mean-square normalisation of rows.
//   out[r, i] = x[r, i] / sqrt(mean_i(x^2) + eps) * (weight[i] + weight_offset)
#pragma once
#include "base/types.h"
#include "machine/isa.h"

namespace cpumoe {

struct NormArgs {
  const float* x;                            // rows x size
  int64_t rows, size, x_stride, out_stride;  // elements
  VectorView weight;                         // size elements; absent: all ones
  float weight_offset;                       // 0; 1 for Gemma-style weights
  float eps;
  const float* residual;  // nullable, rows x size with x_stride: x + residual is normalised, and
                          // written to `sum`
  float* sum;             // with residual only; may be == x
  float* out;             // may be == x
};
struct NormKernel {
  const char* name;
  Isa isa;
  void (*run)(const NormArgs&);
};
const NormKernel* norm_kernels(int* count);
const NormKernel* select_norm(IsaSet isa);

}  // namespace cpumoe

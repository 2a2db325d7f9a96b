// Room `combine`: the operator's last step, a sum of fp32 rows and one rounding to the output code.
//   out[i] = round(base + rows[index[0]][i] + rows[index[1]][i] + ...)      i in [0, len)
//   base = out[i] when `accumulate`, else 0
#pragma once
#include <cstdint>

#include "base/types.h"
#include "machine/isa.h"

namespace cpumoe {

struct CombineArgs {
  const float* rows;
  int64_t row_stride;    // elements
  const int32_t* index;  // `count` row numbers; null: 0, 1, ..., count - 1
  int64_t count;         // 0 allowed: out = base
  int64_t len;           // elements
  void* out;             // element i of the slice at out + i; any alignment; not among the rows
  Code out_code;
  bool accumulate;
};

struct CombineKernel {
  const char* name;
  Isa isa;
  void (*run)(const CombineArgs&);
};
// Rounding order: fp32 additions from the left, base first; then one rounding to nearest even.
// Every ISA gives the same bits. NaN and Inf propagate. Nothing past `len` is read or written.
const CombineKernel* combine_kernels(int* count);
const CombineKernel* select_combine(IsaSet isa);

}  // namespace cpumoe

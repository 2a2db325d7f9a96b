#include "kernels/attend/attend.h"

#include <cmath>

namespace cpumoe {

#define CPUMOE_ATTEND(isa, code)           \
  namespace isa {                          \
  void attend_##code(const AttendArgs& a); \
  void append_##code(const AppendArgs& a); \
  }
#include "kernels/attend/kernels.inc"
#undef CPUMOE_ATTEND

namespace {
#define CPUMOE_ATTEND(isa, code) \
  {"attend_" #code "_" #isa, Isa::isa, Code::code, isa::attend_##code, isa::append_##code},
constexpr AttendKernel kKernels[] = {
#include "kernels/attend/kernels.inc"
};
#undef CPUMOE_ATTEND
}  // namespace

const AttendKernel* attend_kernels(int* count) {
  *count = int(sizeof(kKernels) / sizeof(kKernels[0]));
  return kKernels;
}

const AttendKernel* select_attend(Code code, IsaSet isa) {
  for (const AttendKernel& k : kKernels) {
    if (k.code == code && isa.has(k.isa)) return &k;
  }
  return nullptr;
}

void attend_merge(const MergeArgs& a) {
  const int64_t rows = a.tokens * a.group, stride = state_stride(a.value_dim);
  const int64_t lanes = value_stride(a.value_dim);
  for (int64_t r = 0; r < rows; ++r) {
    const float* first = a.states + r * stride;
    float top = first[lanes];
    for (int64_t p = 1; p < a.parts; ++p) {
      const float m = first[p * rows * stride + lanes];
      if (m > top) top = m;
    }
    float* out = a.out + r / a.group * a.out_stride + r % a.group * a.value_dim;
    float sum = 0;
    for (int64_t d = 0; d < a.value_dim; ++d) out[d] = 0;
    for (int64_t p = 0; p < a.parts; ++p) {
      const float* state = first + p * rows * stride;
      const float weight = std::exp(state[lanes] - top);
      sum += state[lanes + 1] * weight;
      for (int64_t d = 0; d < a.value_dim; ++d) out[d] += state[d] * weight;
    }
    for (int64_t d = 0; d < a.value_dim; ++d) out[d] /= sum;
  }
}

}  // namespace cpumoe

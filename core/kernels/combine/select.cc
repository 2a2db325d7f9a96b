#include "kernels/combine/combine.h"
#include "kernels/select.h"

namespace cpumoe {

#define CPUMOE_COMBINE(isa)           \
  namespace isa {                     \
  void combine(const CombineArgs& a); \
  }
#include "kernels/combine/kernels.inc"
#undef CPUMOE_COMBINE

namespace {
#define CPUMOE_COMBINE(isa) {"combine_" #isa, Isa::isa, isa::combine},
constexpr CombineKernel kKernels[] = {
#include "kernels/combine/kernels.inc"
};
#undef CPUMOE_COMBINE
}  // namespace

const CombineKernel* combine_kernels(int* count) {
  *count = int(sizeof(kKernels) / sizeof(kKernels[0]));
  return kKernels;
}

const CombineKernel* select_combine(IsaSet isa) { return first_usable(kKernels, isa); }

}  // namespace cpumoe

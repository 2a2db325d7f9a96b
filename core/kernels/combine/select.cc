#include "kernels/combine/combine.h"

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

const CombineKernel* select_combine(IsaSet isa) {
  for (const CombineKernel& k : kKernels) {
    if (isa.has(k.isa)) return &k;
  }
  return nullptr;
}

}  // namespace cpumoe

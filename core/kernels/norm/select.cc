#include "kernels/norm/norm.h"
#include "kernels/select.h"

namespace cpumoe {

#define CPUMOE_NORM(isa)        \
  namespace isa {               \
  void norm(const NormArgs& a); \
  }
#include "kernels/norm/kernels.inc"
#undef CPUMOE_NORM

namespace {
#define CPUMOE_NORM(isa) {"norm_" #isa, Isa::isa, isa::norm},
constexpr NormKernel kKernels[] = {
#include "kernels/norm/kernels.inc"
};
#undef CPUMOE_NORM
}  // namespace

const NormKernel* norm_kernels(int* count) {
  *count = int(sizeof(kKernels) / sizeof(kKernels[0]));
  return kKernels;
}

const NormKernel* select_norm(IsaSet isa) { return first_usable(kKernels, isa); }

}  // namespace cpumoe

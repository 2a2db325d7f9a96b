#include "kernels/rope/rope.h"
#include "kernels/select.h"

namespace cpumoe {

#define CPUMOE_ROPE(isa)        \
  namespace isa {               \
  void rope(const RopeArgs& a); \
  }
#include "kernels/rope/kernels.inc"
#undef CPUMOE_ROPE

namespace {
#define CPUMOE_ROPE(isa) {"rope_" #isa, Isa::isa, isa::rope},
constexpr RopeKernel kKernels[] = {
#include "kernels/rope/kernels.inc"
};
#undef CPUMOE_ROPE
}  // namespace

const RopeKernel* rope_kernels(int* count) {
  *count = int(sizeof(kKernels) / sizeof(kKernels[0]));
  return kKernels;
}

const RopeKernel* select_rope(IsaSet isa) { return first_usable(kKernels, isa); }

}  // namespace cpumoe

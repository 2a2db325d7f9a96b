#include <cstring>

#include "kernels/act/act.h"
#include "kernels/select.h"

namespace cpumoe {

#define CPUMOE_ACT(isa)       \
  namespace isa {             \
  void act(const ActArgs& a); \
  }
#include "kernels/act/kernels.inc"
#undef CPUMOE_ACT

namespace {
#define CPUMOE_ACT(isa) {"act_" #isa, Isa::isa, isa::act},
constexpr ActKernel kKernels[] = {
#include "kernels/act/kernels.inc"
};
#undef CPUMOE_ACT

struct Name {
  const char* name;
  ActKind kind;
};
// The names of Hugging Face's ACT2FN, and our own.
constexpr Name kNames[] = {
    {"identity", ActKind::identity},   {"linear", ActKind::identity},
    {"silu", ActKind::silu},           {"swish", ActKind::silu},
    {"gelu", ActKind::gelu_erf},       {"gelu_erf", ActKind::gelu_erf},
    {"gelu_tanh", ActKind::gelu_tanh}, {"gelu_pytorch_tanh", ActKind::gelu_tanh},
    {"gelu_new", ActKind::gelu_tanh},  {"relu", ActKind::relu},
    {"relu2", ActKind::relu2},         {"swiglu_oai", ActKind::swiglu_oai},
};
}  // namespace

const ActKernel* act_kernels(int* count) {
  *count = int(sizeof(kKernels) / sizeof(kKernels[0]));
  return kKernels;
}

const ActKernel* select_act(IsaSet isa) { return first_usable(kKernels, isa); }

bool find_act(const char* name, ActKind* kind) {
  for (const Name& n : kNames) {
    if (std::strcmp(name, n.name) == 0) {
      *kind = n.kind;
      return true;
    }
  }
  return false;
}

}  // namespace cpumoe

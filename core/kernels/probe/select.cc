#include "kernels/probe/probe.h"
#include "kernels/select.h"

namespace cpumoe {

#define CPUMOE_PROBE(isa)                           \
  namespace isa {                                   \
  extern const int32_t probe_flops;                 \
  uint64_t probe_read(const void* p, int64_t bytes); \
  float probe_fma(int64_t passes);                  \
  }
#include "kernels/probe/kernels.inc"
#undef CPUMOE_PROBE

const ProbeKernel* probe_kernels(int* count) {
  static const ProbeKernel kernels[] = {
#define CPUMOE_PROBE(isa) \
  {"probe_" #isa, Isa::isa, isa::probe_read, isa::probe_fma, isa::probe_flops},
#include "kernels/probe/kernels.inc"
#undef CPUMOE_PROBE
  };
  *count = int(sizeof(kernels) / sizeof(kernels[0]));
  return kernels;
}

const ProbeKernel* select_probe(IsaSet isa) {
  int count = 0;
  const ProbeKernel* kernels = probe_kernels(&count);
  return first_usable(kernels, count, isa);
}

}  // namespace cpumoe

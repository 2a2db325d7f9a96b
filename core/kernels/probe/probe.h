// Room `probe`: loops that do nothing but reach a limit of the machine. measure.h times them.
#pragma once
#include <cstdint>

#include "machine/isa.h"

namespace cpumoe {

struct ProbeKernel {
  const char* name;
  Isa isa;
  // Loads each byte of [p, p + bytes) once, in rising order; p 64-byte aligned, bytes a multiple of
  // 256. Returns the bitwise or of all 64-bit words.
  uint64_t (*read)(const void* p, int64_t bytes);
  // `passes` times 12 independent chains of c = c * x + y, as wide as the ISA's registers.
  // Returns the sum of the chains.
  float (*fma)(int64_t passes);
  int32_t flops_per_pass;  // multiplies and adds
};

const ProbeKernel* probe_kernels(int* count);
const ProbeKernel* select_probe(IsaSet isa);

}  // namespace cpumoe

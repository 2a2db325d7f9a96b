// The native module's parts. Each checks arguments, builds views, keeps owners alive, releases the
// GIL and calls core; none computes.
#pragma once
#include <nanobind/nanobind.h>

#include "machine/executor.h"
#include "machine/machine.h"

namespace cpumoe_py {

void bind_machine(nanobind::module_& m);  // machine.cc: Machine, Executor, Error
void bind_ops(nanobind::module_& m);      // ops.cc: Experts, moe, route, linear
void bind_decoder(nanobind::module_& m);  // decoder.cc: Decoder, KvCache
void bind_inspect(nanobind::module_& m);  // inspect.cc: kernels, select_dot, selected

// The instruction sets that this process uses: CPUID and CPUMOE_ISA as they were at the first call.
cpumoe::IsaSet process_isa();  // ops.cc

}  // namespace cpumoe_py

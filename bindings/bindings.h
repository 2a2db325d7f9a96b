// The native module's parts. Each checks arguments, builds views, keeps owners alive, releases the GIL
// and calls core; none computes.
#pragma once
#include <nanobind/nanobind.h>

namespace cpumoe_py {

void bind_machine(nanobind::module_& m);  // machine.cc: Machine, Executor, Error
void bind_ops(nanobind::module_& m);      // ops.cc: Experts, moe, route, linear
void bind_decoder(nanobind::module_& m);  // decoder.cc: Decoder, KvCache

}  // namespace cpumoe_py

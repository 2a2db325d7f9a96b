// Named instruction sets: which this CPU runs, which one the user forces.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cpumoe {

enum class Isa : uint8_t {
#define CPUMOE_ISA(name) name,
#include "machine/isa.inc"
#undef CPUMOE_ISA
};
inline constexpr int kIsaCount = 0
#define CPUMOE_ISA(name) +1
#include "machine/isa.inc"
#undef CPUMOE_ISA
    ;

// A set of Isa rows; bit i stands for row i.
struct IsaSet {
  uint32_t mask = 1;
  bool has(Isa i) const { return (mask >> unsigned(i)) & 1u; }
};

const char* isa_name(Isa isa);
std::string isa_list(IsaSet set);  // "scalar, avx2"
// What this CPU and operating system can run (CPUID and XGETBV), whatever was compiled in.
IsaSet probe_isa();
// The rows that may be used: probed, compiled in, and not above `forced` ("" = no limit).
// Throws Error when `forced` is no row or the CPU lacks it. See also CPUMOE_ISA in machine.h.
IsaSet usable_isa(std::string_view forced);

}  // namespace cpumoe

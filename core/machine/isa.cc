#include "machine/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/error.h"

namespace cpumoe {
namespace {

constexpr const char* kNames[] = {
#define CPUMOE_ISA(name) #name,
#include "machine/isa.inc"
#undef CPUMOE_ISA
};

#if defined(__x86_64__)
struct Regs {
  unsigned a = 0, b = 0, c = 0, d = 0;
};
Regs cpuid(unsigned leaf, unsigned sub) {
  Regs r;
  if (__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d) == 0) return {};
  return r;
}
bool all(unsigned value, unsigned mask) { return (value & mask) == mask; }

// Register state that the operating system saves; 0 without OSXSAVE.
uint64_t saved_state() {
  if ((cpuid(1, 0).c & bit_OSXSAVE) == 0) return 0;
  uint32_t lo = 0, hi = 0;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return uint64_t(hi) << 32 | lo;
}

bool runs_avx2() {
  const bool ymm = (saved_state() & 6) == 6;  // XMM and the upper half of YMM
  return ymm && all(cpuid(1, 0).c, bit_AVX | bit_FMA | bit_F16C) && all(cpuid(7, 0).b, bit_AVX2);
}
bool runs_avx512() {
  const bool zmm = (saved_state() & 0xe6) == 0xe6;  // and masks, upper ZMM, ZMM16 to ZMM31
  constexpr unsigned kBase =
      bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL | bit_AVX512CD;
  return runs_avx2() && zmm && all(cpuid(7, 0).b, kBase) && all(cpuid(7, 0).c, bit_AVX512VNNI);
}
bool runs_avx512_bf16() {
  return runs_avx512() && all(cpuid(7, 1).a, bit_AVX512BF16) && all(cpuid(7, 0).c, bit_AVX512VBMI);
}
#else
bool runs_avx2() { return false; }
bool runs_avx512() { return false; }
bool runs_avx512_bf16() { return false; }
#endif

bool runs_scalar() { return true; }

// Bit i: row i has files in this build (cmake/isa.cmake).
constexpr uint32_t kCompiled = 1u
#ifdef CPUMOE_HAVE_avx2
                               | 1u << unsigned(Isa::avx2)
#endif
#ifdef CPUMOE_HAVE_avx512
                               | 1u << unsigned(Isa::avx512)
#endif
#ifdef CPUMOE_HAVE_avx512_bf16
                               | 1u << unsigned(Isa::avx512_bf16)
#endif
    ;

}  // namespace

const char* isa_name(Isa isa) { return kNames[unsigned(isa)]; }
std::string isa_list(IsaSet set) {
  std::string text;
  for (int i = 0; i < kIsaCount; ++i) {
    if (set.has(Isa(i))) text += (text.empty() ? "" : ", ") + std::string(kNames[i]);
  }
  return text;
}

IsaSet probe_isa() {
  static const IsaSet set = [] {
    IsaSet s{0};
#define CPUMOE_ISA(name) \
  if (runs_##name()) s.mask |= 1u << unsigned(Isa::name);
#include "machine/isa.inc"
#undef CPUMOE_ISA
    return s;
  }();
  return set;
}

IsaSet usable_isa(std::string_view forced) {
  const IsaSet here{probe_isa().mask & kCompiled};
  if (forced.empty()) return here;
  for (int i = 0; i < kIsaCount; ++i) {
    if (forced != kNames[i]) continue;
    require(here.has(Isa(i)), "CPUMOE_ISA", "this CPU and this build must have ", forced,
            "; they have ", isa_list(here), ". Choose one of these or unset CPUMOE_ISA.");
    return {here.mask & ((2u << i) - 1)};
  }
  throw Error(concat("CPUMOE_ISA: must name an instruction set; got \"", forced,
                     "\". Choose one of ", isa_list(here), " or unset CPUMOE_ISA."));
}

}  // namespace cpumoe

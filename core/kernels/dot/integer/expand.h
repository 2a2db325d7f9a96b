// Rows: scales and offsets in the lanes of a span. Included by one file per ISA.
#pragma once
#ifdef __AVX512VNNI__
#include "kernels/dot/integer/expand512.h"
#else
#include "kernels/dot/integer/expand256.h"
#endif

namespace cpumoe::CPUMOE_NS {
namespace {

template <Code C>
CPUMOE_INLINE Expand choose(bool halves, Zeros zeros) {
  if (zeros == Zeros::none)
    return halves ? expand<C, true, Zeros::none> : expand<C, false, Zeros::none>;
  if (zeros == Zeros::constant)
    return halves ? expand<C, true, Zeros::constant> : expand<C, false, Zeros::constant>;
  return halves ? expand<C, true, Zeros::stored> : expand<C, false, Zeros::stored>;
}

}  // namespace

Expand select_expand(Code scales, bool halves, Zeros zeros) {
  switch (scales) {
    case Code::f16:
      return choose<Code::f16>(halves, zeros);
    case Code::bf16:
      return choose<Code::bf16>(halves, zeros);
    case Code::e8m0:
      return choose<Code::e8m0>(halves, zeros);
    case Code::e4m3:
      return choose<Code::e4m3>(halves, zeros);
    default:
      return choose<Code::f32>(halves, zeros);
  }
}

}  // namespace cpumoe::CPUMOE_NS

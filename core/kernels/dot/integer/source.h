// What kernels ask of a code. Included by ISA files only.
//
// A source, one small struct per code:
//   Order           of its activations (layouts.h)
//   kSpanBytes      of 256 inputs
//   math(halves)    how its codes are multiplied; `halves`: 16 inputs share a scale
//   decode(p, w)    the 8 vectors of the span at p
//   kPlain          true: scales lie apart; kCountedFrom (the number of code 0), kMiddle, and kFactor
//                   of each scale
//                   false: factors(p, f) reads them from the span
#pragma once
#include "kernels/dot/integer/scales.h"

namespace cpumoe::CPUMOE_NS {

template <Math M>
constexpr int64_t kFactorFloats =
    8 * ((M.parts == Math::floats ? 2 : 1) + (M.offset == Math::none    ? 0
                                              : M.offset == Math::group ? 1
                                                                        : 2));

// Factors of a plain code's span, as expand() lays them out.
template <Math M>
CPUMOE_INLINE void load_factors(const float* p, Factors& f) {
  constexpr int64_t kParts = M.parts == Math::floats ? 2 : 1;
  f.s0 = _mm256_loadu_ps(p);
  if (kParts == 2) f.s1 = _mm256_loadu_ps(p + 8);
  if (M.offset != Math::none) f.o0 = _mm256_loadu_ps(p + 8 * kParts);
  if (M.offset == Math::halves) f.o1 = _mm256_loadu_ps(p + 8 * kParts + 8);
}

// The span at p, whose bytes past `bytes` are not there.
template <class S>
CPUMOE_INLINE void copy_span(const char* p, int64_t bytes, char* to) {
  memset(to, 0, size_t(S::kSpanBytes));
  memcpy(to, p, size_t(bytes));
}

}  // namespace cpumoe::CPUMOE_NS

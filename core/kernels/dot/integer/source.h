// What kernels ask of a code. Included by ISA files only.
//
// A source, one small struct per code:
//   Order           of its activations (layouts.h)
//   kSpanBytes      of 256 inputs
//   math(halves)    how its codes are multiplied; `halves`: 16 inputs share a scale
//   decode(p, w)    the codes of the span at p
//   kPlain          true: scales lie apart; kCountedFrom (the number of code 0), kMiddle, and kFactor
//                   of each scale
//                   false: factors(p, f) reads them from the span
#pragma once
#include "kernels/dot/integer/scales.h"
#include "kernels/dot/integer/unpack.h"
#ifdef __AVX512VNNI__
#include "kernels/dot/integer/vnni.h"
#else
#include "kernels/dot/integer/maddubs.h"
#endif

namespace cpumoe::CPUMOE_NS {

// The arithmetic and the codes that go with it: those of S, or their unsigned form.
template <class S>
constexpr Math math_of(bool halves) {
  Math m = S::math(halves);
  if (kVnni && m.bytes) m.bytes = false, m.middle = 128;
  if (kVnni && m.parts == Math::ints && !m.scaled) m.parts = Math::whole;
  return m;
}
template <class S>
CPUMOE_INLINE void decode_span(const char* p, Codes w[kRegisters]) {
  S::decode(p, w);
  if constexpr (kVnni && S::math(false).bytes) flip_all(0x80, w);
}

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

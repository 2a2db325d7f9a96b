// Four fp32 lanes in the compiler's own vector type: whatever the baseline CPU has, no intrinsics
// and no compiler flags. The meaning of each function is in vec/scalar.h; fma rounds twice.
#pragma once
#include "base/types.h"

namespace cpumoe::portable {

struct Vec {
  typedef float V __attribute__((vector_size(16)));
  typedef int32_t Bits __attribute__((vector_size(16)));
  static constexpr int64_t kLanes = 4;

  // Whole vectors only: four elements at any alignment.
  CPUMOE_INLINE V load(const float* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  CPUMOE_INLINE void store(float* p, V v) { memcpy(p, &v, sizeof v); }
  CPUMOE_INLINE V set1(float f) { return V{f, f, f, f}; }
  CPUMOE_INLINE V add(V a, V b) { return a + b; }
  CPUMOE_INLINE V sub(V a, V b) { return a - b; }
  CPUMOE_INLINE V mul(V a, V b) { return a * b; }
  CPUMOE_INLINE V div(V a, V b) { return a / b; }
  CPUMOE_INLINE V fma(V a, V b, V c) { return a * b + c; }
  CPUMOE_INLINE V fnma(V a, V b, V c) { return c - a * b; }
  CPUMOE_INLINE V min(V a, V b) { return if_less(a, b, a, b); }
  CPUMOE_INLINE V max(V a, V b) { return if_less(b, a, a, b); }
  CPUMOE_INLINE V abs(V a) { return V(Bits(a) & 0x7fffffff); }
  CPUMOE_INLINE V if_less(V a, V b, V yes, V no) {
    const Bits m = a < b;
    return V((Bits(yes) & m) | (Bits(no) & ~m));
  }
  CPUMOE_INLINE V pow2(V n) { return V(Bits(n + 12583039.0f) << 23); }
};

}  // namespace cpumoe::portable

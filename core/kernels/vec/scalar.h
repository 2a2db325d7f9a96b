// One-lane "vector" with the interface that vec/math.h and the templates of the rooms expect.
// Included by scalar.cc files only; everything is inlined into them.
#pragma once
#include "base/types.h"

namespace cpumoe::scalar {

struct Vec {
  using V = float;
  static constexpr int64_t kLanes = 1;

  // n: lanes in use, 1..kLanes; lanes past n read as zero and are not stored.
  CPUMOE_INLINE V load(const float* p, int64_t) { return *p; }
  CPUMOE_INLINE void store(float* p, V v, int64_t) { *p = v; }
  // Element pairs (2i, 2i + 1) of p apart into even and odd.
  CPUMOE_INLINE void load_pairs(const float* p, int64_t, V* even, V* odd) {
    *even = p[0];
    *odd = p[1];
  }
  CPUMOE_INLINE V set1(float f) { return f; }
  CPUMOE_INLINE V add(V a, V b) { return a + b; }
  CPUMOE_INLINE V sub(V a, V b) { return a - b; }
  CPUMOE_INLINE V mul(V a, V b) { return a * b; }
  CPUMOE_INLINE V div(V a, V b) { return a / b; }
  // a * b + c and c - a * b with one rounding (here: but for a double rounding by way of float64).
  CPUMOE_INLINE V fma(V a, V b, V c) { return V(double(a) * double(b) + double(c)); }
  CPUMOE_INLINE V fnma(V a, V b, V c) { return V(double(c) - double(a) * double(b)); }
  // a * b - p without rounding error, p being the rounded product; NaN where p overflowed.
  CPUMOE_INLINE V product_error(V a, V b, V p) { return V(double(a) * double(b) - double(p)); }
  // The second operand when either is NaN.
  CPUMOE_INLINE V min(V a, V b) { return a < b ? a : b; }
  CPUMOE_INLINE V max(V a, V b) { return a > b ? a : b; }
  CPUMOE_INLINE V abs(V a) { return bits_to_float(float_to_bits(a) & 0x7fffffffu); }
  CPUMOE_INLINE V if_less(V a, V b, V yes, V no) { return a < b ? yes : no; }
  // 2^n for a whole n in [-126, 127]; any value when n is NaN.
  CPUMOE_INLINE V pow2(V n) { return bits_to_float(float_to_bits(n + 12583039.0f) << 23); }
};

}  // namespace cpumoe::scalar

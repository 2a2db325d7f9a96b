// Error bounds for kernel tests, derived from epsilon, k and magnitudes: the only tolerances used.
#pragma once
#include <cmath>
#include <cstdint>

namespace cpumoe::testing {

// Unit roundoff of fp32 and the smallest positive fp32 (one rounding below the normal range adds at
// most half of it).
inline constexpr double kRoundoff = 5.9604644775390625e-8;  // 2^-24
inline constexpr double kTiny = 1.401298464324817e-45;      // 2^-149

// gamma(n) = n u / (1 - n u): the relative error of n successive roundings.
inline double gamma(int64_t n) {
  const double nu = double(n) * kRoundoff;
  return nu / (1 - nu);
}

// |fp32 sum of k products - exact sum|, in any order of summation, fused or not: every product
// meets one rounding of its own and at most k - 1 additions (adding an exact zero rounds nothing).
// sum_abs = sum of |w| |x| over the k products.
inline double dot_bound(int64_t k, double sum_abs) {
  return gamma(k) * sum_abs + double(k) * kTiny;
}

// The same where products of bf16 pairs are added two at a time, in any order, and what lies below
// 2^-126 may count as zero: each of two operands of a product (then the product is lost, at most
// 2^-126 times the other operand, of at most `largest`), the product and the sum it meets.
inline double flushed_dot_bound(int64_t k, double sum_abs, double largest) {
  return gamma(k + 1) * sum_abs + double(k) * (2 * largest + 2) * 1.1754943508222875e-38;
}

// The same for quantised weights w = s (q - z) or s q - m, whose products with activations a may be
// summed as s sum(q a) - s z sum(a), and for activations with a scale per 32 inputs. Whatever the
// order: at most 32 roundings of sums inside a group, then three for each of the groups (its two
// parts and their sum); 16 for scales, zero points, conversions and the fp32 weight compared with.
// sum_parts = sum of (|s q| + |s z|) |a| (weights.h). A factor may be below the normal range, and is
// then off by half of kTiny before it meets a sum of at most 2^31.
inline double quantized_dot_bound(int64_t k, double sum_parts) {
  const int64_t groups = (k + 31) / 32;
  return gamma(48 + 3 * groups) * sum_parts + double(groups) * 2147483648.0 * kTiny;
}

// Distance of `got` from `want` in units in the last place of fp32 at `want`; infinite when only
// one of the two is a NaN or when infinities differ.
inline double ulp_error(float got, double want) {
  if (std::isnan(want) || std::isnan(got))
    return std::isnan(want) && std::isnan(got) ? 0 : INFINITY;
  const float nearest = float(want);
  if (std::isinf(nearest) || std::isinf(got)) return nearest == got ? 0 : INFINITY;
  int exponent;
  std::frexp(nearest, &exponent);
  const double ulp = std::fmax(std::ldexp(1.0, exponent - 24), kTiny);
  return std::fabs(double(got) - want) / ulp;
}

}  // namespace cpumoe::testing

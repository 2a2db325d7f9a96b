// Elementary functions over a vector type O (cpumoe::<isa>::Vec). Errors are in units of 2^-24 of
// the value, worst case measured over dense sweeps by act_test.
#pragma once
#include "base/types.h"

namespace cpumoe {

// exp(x + x_low) = p * 2^n with p in [0.7, 1.42] and n whole (kept in a float), |x| <= 1000.
// p is off by at most 2 units. Cody-Waite reduction; degree 6, minimax (0.05 units).
template <class O>
CPUMOE_INLINE typename O::V exp_parts(typename O::V x, typename O::V x_low, typename O::V* n) {
  const auto magic = O::set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const auto k = O::sub(O::fma(x, O::set1(0x1.715476p+0f), magic), magic);
  auto r = O::fnma(k, O::set1(0.693359375f), x);
  r = O::add(O::fnma(k, O::set1(-2.12194440e-4f), r), x_low);
  auto q = O::set1(0x1.6a23cep-10f);
  q = O::fma(q, r, O::set1(0x1.123a20p-7f));
  q = O::fma(q, r, O::set1(0x1.5558f2p-5f));
  q = O::fma(q, r, O::set1(0x1.555492p-3f));
  q = O::fma(q, r, O::set1(0x1.fffffcp-2f));
  *n = k;
  return O::add(O::fma(O::mul(r, r), q, r), O::set1(1.0f));
}

// v * 2^n for a whole n in [-375, 1], rounded once unless v itself is tiny.
template <class O>
CPUMOE_INLINE typename O::V scale_down(typename O::V v, typename O::V n) {
  const auto step = O::set1(-125.0f);
  const auto n1 = O::max(step, n), rest = O::sub(n, n1);
  const auto n2 = O::max(step, rest), n3 = O::sub(rest, n2);
  return O::mul(O::mul(O::mul(v, O::pow2(n1)), O::pow2(n2)), O::pow2(n3));
}

// exp(x), any x: 0 below -104, infinity above 88.73, NaN for NaN; at most 2 units where normal.
template <class O>
CPUMOE_INLINE typename O::V exp(typename O::V x) {
  x = O::min(O::set1(89.0f), O::max(O::set1(-105.0f), x));
  typename O::V n;
  const auto p = exp_parts<O>(x, O::set1(0.0f), &n);
  // Two factors: neither 2^128 nor 2^-150 is a normal number.
  const auto half = O::max(O::set1(-75.0f), O::min(O::set1(64.0f), n));
  return O::mul(O::mul(p, O::pow2(half)), O::pow2(O::sub(n, half)));
}

// a * sigmoid(z + z_low), with the relative accuracy of z + z_low even where sigmoid underflows.
// |a| and z finite or infinite; NaN in either gives NaN.
template <class O>
CPUMOE_INLINE typename O::V mul_sigmoid(typename O::V a, typename O::V z, typename O::V z_low) {
  const auto zero = O::set1(0.0f), far = O::set1(250.0f);
  const auto magnitude = O::abs(z);
  auto down = O::sub(zero, O::min(far, magnitude));  // -|z|
  auto low = O::if_less(z, zero, z_low, O::sub(zero, z_low));
  low = O::if_less(magnitude, far, low, zero);
  typename O::V n;
  const auto p = exp_parts<O>(down, low, &n);  // exp(-|z|)
  const auto one_plus = O::add(O::set1(1.0f), scale_down<O>(p, n));
  // z >= 0: a / (1 + e); z < 0: a e / (1 + e), scaled last so that only the result may underflow,
  // and by p / 2 first so that a large `a` does not overflow.
  const auto top = O::if_less(z, zero, O::mul(a, O::mul(p, O::set1(0.5f))), a);
  return scale_down<O>(O::div(top, one_plus), O::if_less(z, zero, O::add(n, O::set1(1.0f)), zero));
}

// x * Phi(x), Phi the normal distribution function: the exact gelu. Phi(-y) = exp(-y^2 / 2) h(y)
// with h(y) = erfcx(y / sqrt 2) / 2 = P((y - 4) / (y + 4)) / (1 + sqrt(2) y),
// P of degree 10 (0.04 units).
template <class O>
CPUMOE_INLINE typename O::V mul_normal_cdf(typename O::V x) {
  const auto zero = O::set1(0.0f), one = O::set1(1.0f);
  const auto y = O::min(O::set1(15.0f), O::abs(x));
  const auto q = O::div(O::sub(y, O::set1(4.0f)), O::add(y, O::set1(4.0f)));
  auto h = O::set1(-0x1.b0e8a0p-14f);
  h = O::fma(h, q, O::set1(-0x1.fa1c36p-15f));
  h = O::fma(h, q, O::set1(0x1.13cde2p-10f));
  h = O::fma(h, q, O::set1(-0x1.6ef77cp-11f));
  h = O::fma(h, q, O::set1(-0x1.dd8e00p-8f));
  h = O::fma(h, q, O::set1(0x1.d9572ep-6f));
  h = O::fma(h, q, O::set1(-0x1.ddbe7ap-5f));
  h = O::fma(h, q, O::set1(0x1.1f5408p-4f));
  h = O::fma(h, q, O::set1(-0x1.03dc1cp-5f));
  h = O::fma(h, q, O::set1(-0x1.0f10fap-4f));
  h = O::fma(h, q, O::set1(0x1.41c7dap-1f));
  h = O::div(h, O::fma(y, O::set1(0x1.6a09e6p+0f), one));
  const auto s = O::mul(y, y);
  const auto s_low = O::product_error(y, y, s);
  typename O::V n;
  const auto minus_half = O::set1(-0.5f);
  const auto p = exp_parts<O>(O::mul(s, minus_half), O::mul(s_low, minus_half), &n);
  const auto hp = O::mul(h, p);
  // x < 0: x h exp(-y^2 / 2), the power of two last. x >= 0: x (1 - h exp(-y^2 / 2)).
  const auto bounded = O::max(O::set1(-15.0f), x);
  const auto below = scale_down<O>(O::mul(bounded, hp), n);
  const auto above = O::mul(x, O::sub(one, scale_down<O>(hp, n)));
  // |x| < 1/2, where h would lose bits: x (1/2 + x R(x^2)), the Taylor series to x^11
  // (next term 2^-33).
  auto t = O::set1(-0x1.3ce8fap-17f);
  t = O::fma(t, s, O::set1(0x1.e42b0ep-14f));
  t = O::fma(t, s, O::set1(-0x1.37404p-10f));
  t = O::fma(t, s, O::set1(0x1.46d042p-7f));
  t = O::fma(t, s, O::set1(-0x1.105838p-4f));
  t = O::fma(t, s, O::set1(0x1.988454p-2f));
  const auto near = O::mul(x, O::fma(x, t, O::set1(0.5f)));
  return O::if_less(y, O::set1(0.5f), near, O::if_less(x, zero, below, above));
}

// The tanh form of gelu: x / 2 (1 + tanh w) = x sigmoid(2 w), 2 w = x (c1 + c3 x^2), in two floats,
// since an error of w times |w| is the relative error of the tail.
template <class O>
CPUMOE_INLINE typename O::V mul_tanh_gelu(typename O::V x) {
  const auto c1 = O::set1(0x1.988454p+0f), c1_low = O::set1(-0x1.857936p-25f);
  const auto c3 = O::set1(0x1.2444f2p-4f), c3_low = O::set1(0x1.49b16ap-29f);
  // Beyond these the result is x or, below, rounds to -0.
  const auto b = O::min(O::set1(12.0f), O::max(O::set1(-12.0f), x));
  const auto s = O::mul(b, b);
  const auto s_low = O::product_error(b, b, s);
  const auto t = O::mul(c3, s);
  const auto t_low = O::add(O::product_error(c3, s, t), O::fma(c3, s_low, O::mul(c3_low, s)));
  const auto u = O::add(c1, t), v = O::sub(u, c1);
  const auto u_low = O::add(O::add(O::sub(c1, O::sub(u, v)), O::sub(t, v)), O::add(c1_low, t_low));
  const auto w = O::mul(b, u);
  const auto w_low = O::fma(b, u_low, O::product_error(b, u, w));
  return mul_sigmoid<O>(O::max(O::set1(-12.0f), x), w, w_low);
}

}  // namespace cpumoe

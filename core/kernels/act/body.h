// The activation on a tile, over a vector type O: one text for every ISA. Included by this room's
// ISA files only; the functions are static, so each keeps its own copy.
#pragma once
#include "kernels/act/act.h"
#include "kernels/vec/math.h"

namespace cpumoe {

template <class O, ActKind kKind>
CPUMOE_INLINE typename O::V act_value(typename O::V g, const Activation& act) {
  const auto zero = O::set1(0.0f);
  if constexpr (kKind == ActKind::silu) {
    g = O::max(O::set1(-250.0f), g);  // silu is -0 there, and stays so for -inf
    return mul_sigmoid<O>(g, g, zero);
  } else if constexpr (kKind == ActKind::swiglu_oai) {
    const auto alpha = O::set1(act.alpha);
    g = O::max(O::set1(-3.40282347e+38f), g);
    const auto z = O::mul(g, alpha);
    return mul_sigmoid<O>(g, z, O::product_error(g, alpha, z));
  } else if constexpr (kKind == ActKind::gelu_erf) {
    return mul_normal_cdf<O>(g);
  } else if constexpr (kKind == ActKind::gelu_tanh) {
    return mul_tanh_gelu<O>(g);
  } else if constexpr (kKind == ActKind::relu) {
    return O::max(zero, g);
  } else if constexpr (kKind == ActKind::relu2) {
    const auto r = O::max(zero, g);
    return O::mul(r, r);
  } else {
    return g;
  }
}

// One line: `gate` and `up` point at it (up null: not gated; pairs: both alternate in `gate`). A
// bias is one value for the line (bias_step 0) or one per element (bias_step 1).
template <class O, ActKind kKind>
static void act_line(const ActArgs& a, const float* gate, const float* up, bool pairs,
                     const float* gate_bias, const float* up_bias, int bias_step, float* out) {
  const auto limit = O::set1(a.act.limit), low = O::set1(-a.act.limit);
  const bool gated = pairs || up != nullptr;
  for (int64_t j = 0; j < a.len; j += O::kLanes) {
    const int64_t n = min64(O::kLanes, a.len - j);
    auto g = O::set1(0.0f), u = g;
    if (pairs) {
      O::load_pairs(gate + 2 * j, n, &g, &u);
    } else {
      g = O::load(gate + j, n);
      if (gated) u = O::load(up + j, n);
    }
    if (gate_bias != nullptr) {
      g = O::add(g, bias_step ? O::load(gate_bias + j, n) : O::set1(*gate_bias));
    }
    if (!gated) {
      O::store(out + j, act_value<O, kKind>(g, a.act), n);
      continue;
    }
    if (up_bias != nullptr) {
      u = O::add(u, bias_step ? O::load(up_bias + j, n) : O::set1(*up_bias));
    }
    g = O::min(limit, g);
    u = O::min(limit, O::max(low, u));
    if constexpr (kKind == ActKind::swiglu_oai) u = O::add(u, O::set1(1.0f));
    O::store(out + j, O::mul(act_value<O, kKind>(g, a.act), u), n);
  }
}

template <class O, ActKind kKind>
static void act_tile(const ActArgs& a) {
  for (int64_t i = 0; i < a.lines; ++i) {
    float* out = a.out + i * a.out_stride;
    if (a.features_are_lines) {
      const float* gate = a.gate + (a.interleaved ? 2 * i : i) * a.in_stride;
      const float* up = a.interleaved ? gate + a.in_stride
                        : a.up        ? a.up + i * a.in_stride
                                      : nullptr;
      act_line<O, kKind>(a, gate, up, false, a.gate_bias ? a.gate_bias + i : nullptr,
                         a.up_bias ? a.up_bias + i : nullptr, 0, out);
    } else {
      act_line<O, kKind>(a, a.gate + i * a.in_stride, a.up ? a.up + i * a.in_stride : nullptr,
                         a.interleaved, a.gate_bias, a.up_bias, 1, out);
    }
  }
}

template <class O>
CPUMOE_INLINE void act_run(const ActArgs& a) {
  switch (a.act.kind) {
    case ActKind::identity:
      return act_tile<O, ActKind::identity>(a);
    case ActKind::silu:
      return act_tile<O, ActKind::silu>(a);
    case ActKind::gelu_erf:
      return act_tile<O, ActKind::gelu_erf>(a);
    case ActKind::gelu_tanh:
      return act_tile<O, ActKind::gelu_tanh>(a);
    case ActKind::relu:
      return act_tile<O, ActKind::relu>(a);
    case ActKind::relu2:
      return act_tile<O, ActKind::relu2>(a);
    case ActKind::swiglu_oai:
      return act_tile<O, ActKind::swiglu_oai>(a);
  }
}

}  // namespace cpumoe

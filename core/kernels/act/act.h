// Room `act`: the activation between the two products of an expert, on a tile.
//   gated:      out = f(gate + gate_bias) * (up + up_bias)          (silu, gelu, ...)
//   not gated:  out = f(gate + gate_bias)
//   swiglu_oai: g = min(gate, limit), u = clamp(up, -limit, limit),
//               out = (u + 1) * g * sigmoid(alpha g)   (gpt-oss)
//   limit with any other gated function: g = min(gate, limit), u = clamp(up, -limit, limit) first
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/types.h"
#include "machine/isa.h"

namespace cpumoe {

enum class ActKind : uint8_t { identity, silu, gelu_erf, gelu_tanh, relu, relu2, swiglu_oai };

struct Activation {
  ActKind kind = ActKind::silu;
  float alpha = 1.702f;                                  // swiglu_oai only
  float limit = std::numeric_limits<float>::infinity();  // no clamp by default
};

// Tile lines are contiguous. In an n_major tile a line is one feature over tokens, in an m_major
// tile one token over features; the bias follows the features.
struct ActArgs {
  Activation act;
  const float* gate;              // lines x len
  const float* up;                // null: not gated. May not be used with `interleaved`
  int64_t lines, len;             // of the output
  int64_t in_stride, out_stride;  // elements between lines
  bool interleaved;  // gate and up alternate in `gate`: along lines (features_are_lines) with
                     // line 2i gate, 2i+1 up; else along the line, element 2i gate, 2i+1 up
  bool features_are_lines;
  const float* gate_bias;  // nullable, one per feature
  const float* up_bias;    // nullable, one per feature
  float* out;              // may be == gate (same stride, not interleaved)
};

struct ActKernel {
  const char* name;
  Isa isa;
  void (*run)(const ActArgs&);
};
// Error of one application: at most 4 ulp (fp32) of f's float64 value, for all finite inputs; NaN
// in, NaN out; -inf gives f's limit there (-0 or 0; identity: -inf). With gating one more rounding.
const ActKernel* act_kernels(int* count);
const ActKernel* select_act(IsaSet isa);
// By name: "silu", "gelu", "gelu_tanh" ("gelu_pytorch_tanh"), ...
bool find_act(const char* name, ActKind* kind);

}  // namespace cpumoe

// E experts as views: data for the operator, never an owner.
#pragma once
#include <span>

#include "formats/format.h"
#include "kernels/act/act.h"

namespace cpumoe {

// Per-expert views, so that one stacked tensor and one tensor per expert look alike.
//   separate gate/up (also two halves of one fused tensor): gate[e], up[e] are [I, H]
//   interleaved fused:  gate[e] is [2I, H], feature 2i = gate i, 2i + 1 = up i; up is empty
//   not gated:          gate[e] is [I, H]; up is empty
// down[e] is [H, I]. Biases: one VectorView per expert, or an empty span. Every matrix may have a
// format and a layout of its own.
struct ExpertsView {
  int64_t experts = 0, hidden = 0, inter = 0;
  bool interleaved = false;
  std::span<const WeightView> gate, up, down;
  // interleaved: gate_bias holds 2I, up_bias is empty
  std::span<const VectorView> gate_bias, up_bias, down_bias;
  Activation act;
  bool gated() const { return interleaved || !up.empty(); }
};

// Throws Error naming the first view whose shape, format or count does not fit.
void check_experts(const ExpertsView& experts, const char* where);

}  // namespace cpumoe

// A layer's feed-forward blocks as ExpertsViews: dense, shared and routed blocks share one path.
#pragma once
#include "decoder/spec.h"

namespace cpumoe {

// The routed experts. Views into `f`, which must stay where it is.
inline ExpertsView experts_view(const FfnSpec& f, int64_t hidden) {
  ExpertsView e;
  e.experts = int64_t(f.expert_down.size());
  e.hidden = hidden;
  e.inter = f.expert_down.empty() ? 0 : f.expert_down[0].k;
  e.interleaved = f.interleaved;
  e.gate = f.expert_gate;
  e.up = f.expert_up;
  e.down = f.expert_down;
  e.gate_bias = f.expert_gate_bias;
  e.up_bias = f.expert_up_bias;
  e.down_bias = f.expert_down_bias;
  e.act = f.expert_act;
  return e;
}

// One block that every token visits: an expert of its own.
inline ExpertsView block_view(const Linear& gate, const Linear& up, const Linear& down,
                              const Activation& act) {
  ExpertsView e;
  e.experts = 1;
  e.hidden = down.w.n;
  e.inter = down.w.k;
  e.gate = {&gate.w, 1};
  if (up.present()) e.up = {&up.w, 1};
  e.down = {&down.w, 1};
  if (gate.bias.data != nullptr) e.gate_bias = {&gate.bias, 1};
  if (up.present() && up.bias.data != nullptr) e.up_bias = {&up.bias, 1};
  if (down.bias.data != nullptr) e.down_bias = {&down.bias, 1};
  e.act = act;
  return e;
}

}  // namespace cpumoe

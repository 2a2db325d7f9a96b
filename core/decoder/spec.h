// A decoder-only model as data. Made by Python's models/, run by decoder.h. Views only: whoever
// builds a ModelSpec keeps the weights alive.
#pragma once
#include <vector>

#include "formats/format.h"
#include "kernels/topk/topk.h"
#include "moe/experts.h"

namespace cpumoe {

struct Linear {
  WeightView w;            // data null: absent
  VectorView bias;
  bool present() const { return w.data != nullptr; }
};

// qwen3: each head; olmoe: the whole projection
enum class QkNorm : uint8_t { none, per_head, whole };

struct AttentionSpec {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0;                 // of the scores; usually head_dim^-0.5
  Linear q, k, v, o;
  QkNorm qk_norm = QkNorm::none;   // before rope
  VectorView q_norm, k_norm;
  float clip_qkv = 0;              // clamp q, k, v to +-clip when > 0 (OLMoE), after qk_norm
  int64_t window = 0;              // sliding window in tokens; 0: none
  int64_t rope_dims = 0;           // rotated leading dims of a head (half-split pairs), even; or 0
  std::vector<float> inv_freq;     // rope_dims / 2
  float rope_scale = 1;            // multiplies cos and sin (yarn "attention factor")
};

struct FfnSpec {
  bool routed = false;
  Linear gate, up, down;           // dense layer, when not routed
  Activation act;                  // of the dense layer and of the shared expert
  Router router;                   // when routed
  Linear router_w;                 // [E, H]
  VectorView correction;           // [E], absent: none; becomes router.correction
  std::vector<WeightView> expert_gate, expert_up, expert_down;  // as ExpertsView says
  bool interleaved = false;
  std::vector<VectorView> expert_gate_bias, expert_up_bias, expert_down_bias;
  Activation expert_act;
  Linear shared_gate, shared_up, shared_down;  // shared expert; absent: none
  Linear shared_score;             // [1, H]: its sigmoid weighs the shared expert (Qwen2-MoE)
};

struct LayerSpec {
  VectorView attn_norm, ffn_norm;
  AttentionSpec attn;
  FfnSpec ffn;
};

struct ModelSpec {
  int64_t vocab = 0, hidden = 0, max_tokens = 0;  // max_tokens: positions the model was made for
  float norm_eps = 1e-6f, embed_scale = 1;
  WeightView embed;                // [vocab, hidden], rows
  VectorView final_norm;
  Linear head;                     // [vocab, hidden]; may view the same bytes as embed
  std::vector<LayerSpec> layers;
};

// Throws Error: "layer 3 attention.q: shape must be [4096, 2048]; got [...]".
void check_model(const ModelSpec& model);

}  // namespace cpumoe

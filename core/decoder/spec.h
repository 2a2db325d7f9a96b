// A decoder-only model as data. Made by Python's models/, run by decoder.h. Views only: whoever
// builds a ModelSpec keeps the weights alive.
#pragma once
#include <optional>
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

// Multi-head latent attention (DeepSeek), evaluated in absorbed form: a token leaves one vector in
// the cache, its latent c of `rank` elements and one rotated key part of rope_dims for all heads.
//   head i: (nope, rope) = its rows of q, applied to x or, when q_a is present, to norm(q_a x)
//           score of a token = scale * ((k_up[i] nope) . c + rope . key part)
//           output = v_up[i] (sum of p c)
// AttentionSpec then says: head_dim = nope + rope_dims, kv_heads = 1, k is [rank + rope_dims,
// hidden] (latent first), v is absent, o takes heads * value_dim inputs; no qk_norm and no clip.
struct LatentSpec {
  int64_t rank = 0;                // 0: plain attention
  int64_t value_dim = 0;           // of a head, after v_up
  float norm_eps = 1e-6f;          // of both norms
  VectorView norm;                 // [rank], of c
  Linear q_a;                      // [q rank, hidden], or absent
  VectorView q_norm;               // [q rank], with q_a
  std::vector<WeightView> k_up;    // per head [rank, nope]; kv_b's rows, read as columns, are that
  std::vector<WeightView> v_up;    // per head [value_dim, rank]
};

struct AttentionSpec {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0;                 // of the scores; usually head_dim^-0.5
  Linear q, k, v, o;
  QkNorm qk_norm = QkNorm::none;   // before rope
  VectorView q_norm, k_norm;
  float clip_qkv = 0;              // clamp q, k, v to +-clip when > 0 (OLMoE), after qk_norm
  int64_t window = 0;              // sliding window in tokens; 0: none
  int64_t rope_dims = 0;           // rotated dims of a head, even or 0: the first (latent: last)
  bool rope_interleaved = false;   // pairs (2j, 2j + 1), not (j, j + rope_dims / 2)
  std::vector<float> inv_freq;     // rope_dims / 2
  float rope_scale = 1;            // multiplies cos and sin (yarn "attention factor")
  VectorView sinks;                // [heads], or absent: logits that join each softmax (gpt-oss)
  LatentSpec latent;

  bool is_latent() const { return latent.rank > 0; }
  // Elements of a key and of a value in the cache of one of kv_heads.
  int64_t key_dim() const { return is_latent() ? latent.rank + rope_dims : head_dim; }
  int64_t value_dim() const { return is_latent() ? latent.rank : head_dim; }
  // What o takes.
  int64_t mixed_dim() const { return heads * (is_latent() ? latent.value_dim : head_dim); }
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
  std::optional<ActClass> act_class;  // of every product that has it; absent: the formats' own
  WeightView embed;                // [vocab, hidden], rows
  VectorView final_norm;
  Linear head;                     // [vocab, hidden]; may view the same bytes as embed
  std::vector<LayerSpec> layers;
};

// Throws Error: "layer 3 attention.q: shape must be [4096, 2048]; got [...]".
void check_model(const ModelSpec& model);

}  // namespace cpumoe

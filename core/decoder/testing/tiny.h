// Tiny random models of every family's shape, for the decoder's tests. They own their weights.
#pragma once
#include <cmath>
#include <list>
#include <string>
#include <vector>

#include "decoder/spec.h"
#include "kernels/testing/random.h"

namespace cpumoe::testing {

struct TinyModel {
  std::string name;
  ModelSpec spec;
  std::list<std::vector<char>> storage;
  Rng rng{1};
  const char* format = "fp32";

  void* allocate(Code code, int64_t count) {
    storage.emplace_back(size_t(count) * code_bits(code) / 8);
    return storage.back().data();
  }
  // Rows of about unit gain, so that activations neither vanish nor explode.
  WeightView weight(int64_t n, int64_t k, Layout layout = Layout::rows) {
    WeightView w;
    w.format = find_format(format);
    w.layout = layout;
    w.n = n;
    w.k = k;
    w.stride = layout == Layout::rows ? k : n;
    void* data = allocate(w.format->code, n * k);
    fill_random(data, w.format->code, n * k, 1.7f / std::sqrt(float(k)), rng);
    w.data = data;
    return w;
  }
  VectorView vector(int64_t size, float offset, float scale) {
    const Code code = find_format(format)->code;
    void* data = allocate(code, size);
    for (int64_t i = 0; i < size; ++i) {
      store_from_float(data, code, i, offset + rng.uniform(-scale, scale));
    }
    return {data, code, size, 1};
  }
  VectorView norm(int64_t size) { return vector(size, 1, 0.3f); }
  Linear linear(int64_t n, int64_t k, bool bias = false) {
    Linear l{weight(n, k), {}};
    if (bias) l.bias = vector(n, 0, 0.2f);
    return l;
  }
};

struct TinyShape {
  const char* name;
  const char* format = "fp32";
  int64_t hidden = 48, heads = 4, kv_heads = 2, head_dim = 12, inter = 40, layers = 2;
  int64_t experts = 0, top_k = 0, dense_layers = 0, shared_inter = 0, window = 0, rope_dims = -1;
  int64_t rank = 0, q_rank = 0, value_dim = 0;  // latent attention
  bool renormalize = true, qkv_bias = false, shared_score = false, tied = false, biases = false;
  bool rope_interleaved = false, sinks = false, gpt_oss_experts = false;
  RouterKind router = RouterKind::softmax_topk;
  QkNorm qk_norm = QkNorm::none;
  float clip_qkv = 0;
};

inline void add_latent(TinyModel& m, const TinyShape& s, AttentionSpec& a) {
  LatentSpec& l = a.latent;
  l.rank = s.rank;
  l.value_dim = s.value_dim;
  l.norm_eps = 1e-3f;
  l.norm = m.norm(s.rank);
  if (s.q_rank > 0) {
    l.q_a = m.linear(s.q_rank, s.hidden, s.qkv_bias);
    l.q_norm = m.norm(s.q_rank);
  }
  a.k = m.linear(s.rank + a.rope_dims, s.hidden, s.qkv_bias);
  for (int64_t i = 0; i < s.heads; ++i) {
    const Layout layout = i % 2 == 0 ? Layout::columns : Layout::rows;
    l.k_up.push_back(m.weight(s.rank, s.head_dim - a.rope_dims, layout));
    l.v_up.push_back(m.weight(s.value_dim, s.rank));
  }
}

// Gate and up interleaved, columns layout, biases, the clamped activation.
inline void add_gpt_oss_experts(TinyModel& m, const TinyShape& s, FfnSpec& f) {
  f.interleaved = true;
  f.expert_act = {ActKind::swiglu_oai, 1.702f, 0.9f};
  for (int64_t e = 0; e < s.experts; ++e) {
    f.expert_gate.push_back(m.weight(2 * s.inter, s.hidden, Layout::columns));
    f.expert_down.push_back(m.weight(s.hidden, s.inter, Layout::columns));
    f.expert_gate_bias.push_back(m.vector(2 * s.inter, 0, 0.2f));
    f.expert_down_bias.push_back(m.vector(s.hidden, 0, 0.2f));
  }
}

inline TinyModel make_tiny(const TinyShape& s) {
  TinyModel m;
  m.name = s.name;
  m.format = s.format;
  m.spec.vocab = 67;
  m.spec.hidden = s.hidden;
  m.spec.max_tokens = 4096;
  m.spec.act_class = ActClass::fp32;  // the reference rounds no activations
  m.spec.norm_eps = 1e-5f;
  m.spec.embed = m.weight(m.spec.vocab, s.hidden);
  m.spec.final_norm = m.norm(s.hidden);
  m.spec.head = s.tied ? Linear{m.spec.embed, {}} : m.linear(m.spec.vocab, s.hidden);
  for (int64_t i = 0; i < s.layers; ++i) {
    LayerSpec layer;
    layer.attn_norm = m.norm(s.hidden);
    layer.ffn_norm = m.norm(s.hidden);
    AttentionSpec& a = layer.attn;
    a.heads = s.heads;
    a.kv_heads = s.kv_heads;
    a.head_dim = s.head_dim;
    a.scale = 1 / std::sqrt(float(s.head_dim));
    a.rope_dims = s.rope_dims < 0 ? s.head_dim : s.rope_dims;
    a.rope_interleaved = s.rope_interleaved;
    a.q = m.linear(s.heads * s.head_dim, s.q_rank > 0 ? s.q_rank : s.hidden, s.qkv_bias);
    if (s.rank > 0) {
      add_latent(m, s, a);
    } else {
      a.k = m.linear(s.kv_heads * s.head_dim, s.hidden, s.qkv_bias);
      a.v = m.linear(s.kv_heads * s.head_dim, s.hidden, s.qkv_bias);
    }
    a.o = m.linear(s.hidden, a.mixed_dim());
    if (s.sinks) a.sinks = m.vector(s.heads, 0.5f, 1.5f);
    a.qk_norm = s.qk_norm;
    if (s.qk_norm != QkNorm::none) {
      const bool whole = s.qk_norm == QkNorm::whole;
      a.q_norm = m.norm(whole ? s.heads * s.head_dim : s.head_dim);
      a.k_norm = m.norm(whole ? s.kv_heads * s.head_dim : s.head_dim);
    }
    a.clip_qkv = s.clip_qkv;
    a.window = i % 2 == 0 || !s.sinks ? s.window : 0;  // with sinks: every other layer, as gpt-oss
    for (int64_t j = 0; j < a.rope_dims / 2; ++j) {
      a.inv_freq.push_back(std::pow(10000.0f, -2 * float(j) / float(a.rope_dims)));
    }
    FfnSpec& f = layer.ffn;
    f.routed = s.experts > 0 && i >= s.dense_layers;
    if (!f.routed) {
      f.gate = m.linear(s.inter, s.hidden);
      f.up = m.linear(s.inter, s.hidden);
      f.down = m.linear(s.hidden, s.inter);
      m.spec.layers.push_back(std::move(layer));
      continue;
    }
    f.router.kind = s.router;
    f.router.experts = int32_t(s.experts);
    f.router.top_k = int32_t(s.top_k);
    f.router.renormalize = s.renormalize;
    f.router_w = m.linear(s.experts, s.hidden);
    if (s.router == RouterKind::sigmoid) f.correction = m.vector(s.experts, 0, 0.2f);
    if (s.gpt_oss_experts) add_gpt_oss_experts(m, s, f);
    for (int64_t e = 0; !s.gpt_oss_experts && e < s.experts; ++e) {
      f.expert_gate.push_back(m.weight(s.inter, s.hidden));
      f.expert_up.push_back(m.weight(s.inter, s.hidden));
      f.expert_down.push_back(m.weight(s.hidden, s.inter));
      if (!s.biases) continue;
      f.expert_gate_bias.push_back(m.vector(s.inter, 0, 0.2f));
      f.expert_up_bias.push_back(m.vector(s.inter, 0, 0.2f));
      f.expert_down_bias.push_back(m.vector(s.hidden, 0, 0.2f));
    }
    if (s.shared_inter > 0) {
      f.shared_gate = m.linear(s.shared_inter, s.hidden);
      f.shared_up = m.linear(s.shared_inter, s.hidden);
      f.shared_down = m.linear(s.hidden, s.shared_inter);
    }
    if (s.shared_score) f.shared_score = m.linear(1, s.hidden);
    m.spec.layers.push_back(std::move(layer));
  }
  return m;
}

// One of each family, with every optional part in some model and every code.
inline std::vector<TinyShape> tiny_shapes() {
  std::vector<TinyShape> all;
  TinyShape s{"mixtral"};
  s.experts = 4;
  s.top_k = 2;
  all.push_back(s);
  s = {"qwen2_moe", "bf16"};
  s.experts = 6;
  s.top_k = 3;
  s.renormalize = false;
  s.qkv_bias = s.shared_score = true;
  s.shared_inter = 56;
  s.dense_layers = 1;
  all.push_back(s);
  s = {"qwen3_moe", "fp16"};
  s.experts = 16;
  s.top_k = 4;
  s.head_dim = 20;
  s.heads = 6;
  s.qk_norm = QkNorm::per_head;
  s.tied = true;
  all.push_back(s);
  s = {"olmoe"};
  s.experts = 8;
  s.top_k = 3;
  s.kv_heads = 4;
  s.renormalize = false;
  s.qk_norm = QkNorm::whole;
  s.clip_qkv = 0.9f;
  all.push_back(s);
  s = {"deepseek_like"};
  s.experts = 8;
  s.top_k = 2;
  s.router = RouterKind::sigmoid;
  s.shared_inter = 24;
  s.rope_dims = 8;
  s.biases = true;
  all.push_back(s);
  s = {"window"};
  s.window = 7;
  s.heads = 3;
  s.kv_heads = 1;
  s.experts = 4;
  s.top_k = 1;
  all.push_back(s);
  s = {"pairs"};
  s.rope_interleaved = true;
  s.rope_dims = 10;
  s.heads = 70;  // of one KV head: more than a task takes
  s.kv_heads = 2;
  all.push_back(s);
  s = {"gpt_oss", "bf16"};
  s.sinks = s.gpt_oss_experts = s.qkv_bias = true;
  s.window = 5;
  s.experts = 6;
  s.top_k = 3;
  s.router = RouterKind::topk_softmax;
  all.push_back(s);
  s = {"latent"};
  s.rank = 20;
  s.head_dim = 14;
  s.rope_dims = 6;
  s.value_dim = 9;
  s.kv_heads = 1;
  s.rope_interleaved = true;
  all.push_back(s);
  s = {"latent_low", "bf16"};
  s.rank = 33;
  s.q_rank = 22;
  s.head_dim = 20;
  s.rope_dims = 8;
  s.value_dim = 16;
  s.kv_heads = 1;
  s.heads = 40;
  s.sinks = s.qkv_bias = true;
  s.experts = 8;
  s.top_k = 2;
  s.router = RouterKind::sigmoid;
  all.push_back(s);
  s = {"dense"};
  s.rope_dims = 0;
  all.push_back(s);
  return all;
}

}  // namespace cpumoe::testing

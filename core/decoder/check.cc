// Every shape of a ModelSpec against every other, before a byte of a weight is read.
#include <cmath>
#include <string>

#include "base/error.h"
#include "decoder/decoder.h"
#include "decoder/views.h"
#include "moe/checks.h"

namespace cpumoe {
namespace {

struct Place {  // "layer 3 attention.q"
  std::string layer, role;
  std::string text() const { return layer + role; }
};

void check_vector(const VectorView& v, int64_t size, bool needed, const Place& at) {
  if (v.data == nullptr) {
    require(!needed, at.text().c_str(), "a vector of ", size,
            " elements must be present; got none. Is the tensor missing in the checkpoint?");
    return;
  }
  require(vector_fits(v, size), at.text().c_str(), "shape must be [", size, "]; got [",
          v.size, "] with step ", v.step, ". Check the config against the tensors");
}

void check_weight(const WeightView& w, int64_t n, int64_t k, const Place& at) {
  require(w.data != nullptr && w.format != nullptr, at.text().c_str(), "a weight [", n, ", ", k,
          "] must be present; got none. Is the tensor missing in the checkpoint?");
  require(w.n == n && w.k == k, at.text().c_str(), "shape must be [", n, ", ", k, "]; got [", w.n,
          ", ", w.k, "]. Check the config against the tensors");
  const std::string fault = weight_fault(w);
  require(fault.empty(), at.text().c_str(), fault, ". Check the checkpoint");
  require(weight_fits(w, n, k), at.text().c_str(), "must fit in memory; got a stride of ", w.stride,
          " elements. Check the checkpoint");
}

void check_linear(const Linear& l, int64_t n, int64_t k, const Place& at) {
  check_weight(l.w, n, k, at);
  check_vector(l.bias, n, false, {at.text(), ".bias"});
}

void check_latent(const AttentionSpec& a, int64_t hidden, const std::string& where) {
  const LatentSpec& l = a.latent;
  const int64_t nope = a.head_dim - a.rope_dims, q = a.heads * a.head_dim;
  require(a.kv_heads == 1 && a.qk_norm == QkNorm::none && a.clip_qkv == 0, where.c_str(),
          "latent attention must have one KV head, no q/k norm and no clip; got ", a.kv_heads,
          " KV heads and clip ", a.clip_qkv, ". Check the config");
  require(nope >= 1 && l.value_dim >= 1, where.c_str(),
          "heads must have elements without rope, and values; got ", nope, " and ", l.value_dim,
          ". Check qk_nope_head_dim and v_head_dim");
  check_linear(a.q, q, l.q_a.present() ? l.q_a.w.n : hidden, {where, ".q"});
  if (l.q_a.present()) {
    check_linear(l.q_a, l.q_a.w.n, hidden, {where, ".q_a"});
    check_vector(l.q_norm, l.q_a.w.n, true, {where, ".q_norm"});
  }
  check_linear(a.k, a.key_dim(), hidden, {where, ".k"});
  check_vector(l.norm, l.rank, true, {where, ".latent_norm"});
  check_linear(a.o, hidden, a.mixed_dim(), {where, ".o"});
  require(int64_t(l.k_up.size()) == a.heads && int64_t(l.v_up.size()) == a.heads, where.c_str(),
          "k_up and v_up must hold one weight per head (", a.heads, "); got ", l.k_up.size(),
          " and ", l.v_up.size(), ". Check the config against the tensors");
  for (size_t i = 0; i < l.k_up.size(); ++i) {
    check_weight(l.k_up[i], l.rank, nope, {where, concat(".k_up[", i, "]")});
    check_weight(l.v_up[i], l.value_dim, l.rank, {where, concat(".v_up[", i, "]")});
  }
}

void check_attention(const AttentionSpec& a, int64_t hidden, const std::string& layer) {
  const std::string where = layer + "attention";
  require(a.heads >= 1 && a.kv_heads >= 1 && a.heads % a.kv_heads == 0, where.c_str(),
          "heads must be a positive multiple of kv_heads; got ", a.heads, " and ", a.kv_heads,
          ". Check num_attention_heads and num_key_value_heads");
  require(a.head_dim >= 1, where.c_str(), "head_dim must be positive; got ", a.head_dim,
          ". Check head_dim in the config");
  require(std::isfinite(a.scale) && a.clip_qkv >= 0 && a.window >= 0, where.c_str(),
          "scale must be finite, clip_qkv and window not negative; got ", a.scale, ", ", a.clip_qkv,
          " and ", a.window, ". Check the config");
  require(a.rope_dims >= 0 && a.rope_dims % 2 == 0 && a.rope_dims <= a.head_dim, where.c_str(),
          "rope_dims must be even and at most head_dim ", a.head_dim, "; got ", a.rope_dims,
          ". Check the rope parameters in the config");
  require(int64_t(a.inv_freq.size()) == a.rope_dims / 2, where.c_str(),
          "inv_freq must hold rope_dims / 2 = ", a.rope_dims / 2, " frequencies; got ",
          a.inv_freq.size(), ". Check the rope parameters in the config");
  check_vector(a.sinks, a.heads, false, {where, ".sinks"});
  if (a.is_latent()) {
    check_latent(a, hidden, where);
    return;
  }
  const int64_t q = a.heads * a.head_dim, kv = a.kv_heads * a.head_dim;
  check_linear(a.q, q, hidden, {where, ".q"});
  check_linear(a.k, kv, hidden, {where, ".k"});
  check_linear(a.v, kv, hidden, {where, ".v"});
  check_linear(a.o, hidden, q, {where, ".o"});
  if (a.qk_norm != QkNorm::none) {
    const bool whole = a.qk_norm == QkNorm::whole;
    check_vector(a.q_norm, whole ? q : a.head_dim, true, {where, ".q_norm"});
    check_vector(a.k_norm, whole ? kv : a.head_dim, true, {where, ".k_norm"});
  }
}

void check_block(const Linear& gate, const Linear& up, const Linear& down, int64_t hidden,
                 const std::string& where) {
  const int64_t inter = down.w.k;
  require(inter >= 1, where.c_str(), "the intermediate size must be positive; got ", inter,
          ". Is the tensor missing in the checkpoint?");
  check_linear(gate, inter, hidden, {where, "gate"});
  if (up.present()) check_linear(up, inter, hidden, {where, "up"});
  check_linear(down, hidden, inter, {where, "down"});
}

void check_ffn(const FfnSpec& f, int64_t hidden, const std::string& layer) {
  const std::string where = layer + "ffn.";
  if (!f.routed) {
    check_block(f.gate, f.up, f.down, hidden, where);
    return;
  }
  const int64_t experts = f.router.experts;
  const char* wrong = check_router(f.router);
  require(wrong == nullptr, (where + "router").c_str(), wrong == nullptr ? "" : wrong, "; got ",
          experts, " experts, top_k ", f.router.top_k, ", ", f.router.groups,
          " groups, top_groups ", f.router.top_groups, ". Check the config");
  check_linear(f.router_w, experts, hidden, {where, "router"});
  check_vector(f.correction, experts, false, {where, "correction"});
  require(int64_t(f.expert_down.size()) == experts, (where + "experts").c_str(), "there must be ",
          experts, " experts as the router says; got ", f.expert_down.size(),
          ". Check the config against the tensors");
  check_experts(experts_view(f, hidden), (where + "experts").c_str());
  if (f.shared_down.present()) {
    check_block(f.shared_gate, f.shared_up, f.shared_down, hidden, where + "shared_");
  }
  if (f.shared_score.present()) {
    require(f.shared_down.present(), (where + "shared_score").c_str(),
            "must come with a shared expert; got none. Is the tensor missing in the checkpoint?");
    check_linear(f.shared_score, 1, hidden, {where, "shared_score"});
  }
}

}  // namespace

void check_model(const ModelSpec& m) {
  require(m.vocab >= 1 && m.hidden >= 1, "model", "vocab and hidden must be positive; got ",
          m.vocab, " and ", m.hidden, ". Check the config");
  require(!m.layers.empty(), "model", "there must be at least one layer; got 0. Check the config");
  check_weight(m.embed, m.vocab, m.hidden, {"", "embed"});
  require(m.embed.layout == Layout::rows, "embed", "the embedding must be in rows layout; got ",
          "columns in format ", m.embed.format->name, ". Store it as [vocab, hidden]");
  check_vector(m.final_norm, m.hidden, true, {"", "final_norm"});
  check_linear(m.head, m.vocab, m.hidden, {"", "head"});
  for (size_t i = 0; i < m.layers.size(); ++i) {
    const LayerSpec& layer = m.layers[i];
    const std::string where = concat("layer ", i, " ");
    check_vector(layer.attn_norm, m.hidden, true, {where, "attn_norm"});
    check_vector(layer.ffn_norm, m.hidden, true, {where, "ffn_norm"});
    check_attention(layer.attn, m.hidden, where);
    check_ffn(layer.ffn, m.hidden, where);
  }
}

}  // namespace cpumoe

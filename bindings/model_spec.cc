// A Python ModelSpec (src/cpumoe/models/spec.py) becomes core's, weights in place.
#include "model_spec.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "weights.h"

namespace nb = nanobind;

namespace cpumoe_py {
namespace {

using cpumoe::require;
using cpumoe::VectorView;
using cpumoe::WeightView;

// Attribute `name` of a part of the spec, as a C++ value.
template <class T>
T get(nb::handle object, const char* name) {
  T value{};
  require(nb::try_cast<T>(object.attr(name), value), "ModelSpec", name,
          " must have the type that cpumoe.models.spec declares; got ",
          nb::cast<std::string>(nb::str(nb::type_name(object.attr(name).type()))),
          ". Build the spec with cpumoe.models");
  return value;
}

// A checkpoint.TensorRef. The view stays good while the TensorRef's array lives: the spec holds it.
struct Tensor {
  const void* data = nullptr;
  const cpumoe::Format* format = nullptr;
  std::vector<int64_t> shape;
};

Tensor take_tensor(nb::handle ref, size_t rank) {
  const std::string name = get<std::string>(ref, "name"), format = get<std::string>(ref, "format");
  Tensor t;
  t.format = cpumoe::find_format(format);
  require(t.format != nullptr, name.c_str(), "format must be a row of formats.inc; got ", format,
          ". Convert the tensor to fp32, fp16 or bf16");
  t.shape = get<std::vector<int64_t>>(ref, "shape");
  require(t.shape.size() == rank, name.c_str(), "must have ", rank, " dimensions; got ",
          t.shape.size(), ". Check the checkpoint");
  const Array bytes = take_line(ref.attr("data"), name.c_str(), "data", "uint8");
  int64_t elements = 1;
  for (int64_t s : t.shape) {
    require(s >= 1 && s < (int64_t(1) << 40) && elements < (int64_t(1) << 50) / s, name.c_str(),
            "extents must be from 1 to 2^40, their product below 2^50; got ", s,
            ". Check the checkpoint");
    elements *= s;
  }
  require(!t.format->scaled(), name.c_str(), "format ", format,
          " has scales, which a TensorRef has not; got one. Make it a cpumoe.Weight");
  const int64_t length = t.shape.empty() ? 1 : t.shape.back();
  const int64_t need = elements / length * cpumoe::line_bytes(t.format->code, length);
  require(bytes.shape[0] == need, name.c_str(), "shape and format take ", need, " bytes; got ",
          bytes.shape[0], ". Check the checkpoint");
  t.data = bytes.data;
  return t;
}

WeightView take_weight(nb::handle ref) {
  if (const PyWeight* weight = find_weight(ref)) {
    require(!weight->stacked, "ModelSpec", "a linear layer's weight must be [N, K]; got [E, N, K]");
    return weight->views[0];
  }
  const Tensor t = take_tensor(ref, 2);
  WeightView w;
  w.format = t.format;
  w.n = t.shape[0];
  w.k = w.stride = t.shape[1];
  w.data = t.data;
  return w;
}

VectorView take_vector(nb::handle ref) {
  if (ref.is_none()) return {};
  const Tensor t = take_tensor(ref, 1);
  require(cpumoe::is_float(t.format->code), "ModelSpec",
          "vectors must be fp32, fp16 or bf16; got ", t.format->name, ". Check the checkpoint");
  return {t.data, t.format->code, t.shape[0], 1};
}

cpumoe::Linear take_linear(nb::handle linear) {
  if (linear.is_none()) return {};
  return {take_weight(linear.attr("w")), take_vector(linear.attr("bias"))};
}

std::vector<WeightView> take_weights(nb::object refs) {
  std::vector<WeightView> views;
  for (nb::handle ref : refs) {
    if (const PyWeight* weight = find_weight(ref)) {  // one expert's, or a stack of them
      views.insert(views.end(), weight->views.begin(), weight->views.end());
    } else {
      views.push_back(take_weight(ref));
    }
  }
  return views;
}

cpumoe::Activation take_activation(const std::string& text) {
  cpumoe::Activation act;
  require(cpumoe::find_act(text.c_str(), &act.kind), "ffn",
          "activation must be one that act.h lists; got ", text,
          ". Check hidden_act in the config");
  return act;
}

cpumoe::QkNorm take_qk_norm(const std::string& kind) {
  if (kind == "none") return cpumoe::QkNorm::none;
  if (kind == "per_head") return cpumoe::QkNorm::per_head;
  require(kind == "whole", "attention", "qk_norm must be none, per_head or whole; got ", kind);
  return cpumoe::QkNorm::whole;
}

cpumoe::RouterKind take_router_kind(const std::string& kind) {
  if (kind == "softmax_topk") return cpumoe::RouterKind::softmax_topk;
  if (kind == "topk_softmax") return cpumoe::RouterKind::topk_softmax;
  require(kind == "sigmoid", "router", "kind must be softmax_topk, topk_softmax or sigmoid; got ",
          kind);
  return cpumoe::RouterKind::sigmoid;
}

std::vector<VectorView> take_vectors(nb::object refs) {
  std::vector<VectorView> views;
  for (nb::handle ref : refs) views.push_back(take_vector(ref));
  return views;
}

cpumoe::LatentSpec take_latent(nb::handle l) {
  cpumoe::LatentSpec s;
  if (l.is_none()) return s;
  s.rank = get<int64_t>(l, "rank");
  s.value_dim = get<int64_t>(l, "value_dim");
  s.norm_eps = get<float>(l, "norm_eps");
  s.norm = take_vector(l.attr("norm"));
  s.q_a = take_linear(l.attr("q_a"));
  s.q_norm = take_vector(l.attr("q_norm"));
  s.k_up = take_weights(l.attr("k_up"));
  s.v_up = take_weights(l.attr("v_up"));
  return s;
}

cpumoe::AttentionSpec take_attention(nb::handle a) {
  cpumoe::AttentionSpec s;
  s.heads = get<int64_t>(a, "heads");
  s.kv_heads = get<int64_t>(a, "kv_heads");
  s.head_dim = get<int64_t>(a, "head_dim");
  s.scale = get<float>(a, "scale");
  s.q = take_linear(a.attr("q"));
  s.k = take_linear(a.attr("k"));
  s.v = take_linear(a.attr("v"));
  s.o = take_linear(a.attr("o"));
  s.qk_norm = take_qk_norm(get<std::string>(a, "qk_norm"));
  s.q_norm = take_vector(a.attr("q_norm"));
  s.k_norm = take_vector(a.attr("k_norm"));
  s.clip_qkv = get<float>(a, "clip_qkv");
  s.window = get<int64_t>(a, "window");
  s.inv_freq = get<std::vector<float>>(a, "inv_freq");
  s.rope_dims = int64_t(s.inv_freq.size()) * 2;
  s.rope_scale = get<float>(a, "rope_scale");
  s.rope_interleaved = get<bool>(a, "rope_interleaved");
  s.sinks = take_vector(a.attr("sinks"));
  s.latent = take_latent(a.attr("latent"));
  return s;
}

cpumoe::FfnSpec take_ffn(nb::handle f) {
  cpumoe::FfnSpec s;
  s.act = take_activation(get<std::string>(f, "activation"));
  s.act.alpha = get<float>(f, "alpha");
  s.act.limit = get<float>(f, "limit");
  s.expert_act = s.act;
  const nb::object router = f.attr("router");
  s.routed = !router.is_none();
  s.gate = take_linear(f.attr("gate"));
  s.up = take_linear(f.attr("up"));
  s.down = take_linear(f.attr("down"));
  if (!s.routed) return s;
  s.router.kind = take_router_kind(get<std::string>(router, "kind"));
  s.router.experts = get<int32_t>(router, "experts");
  s.router.top_k = get<int32_t>(router, "top_k");
  s.router.renormalize = get<bool>(router, "renormalize");
  s.router.norm_eps = get<float>(router, "norm_eps");
  s.router.scale = get<float>(router, "scale");
  s.router.groups = get<int32_t>(router, "groups");
  s.router.top_groups = get<int32_t>(router, "top_groups");
  s.router.group_max = get<bool>(router, "group_max");
  s.router_w = take_linear(f.attr("router_w"));
  s.correction = take_vector(f.attr("correction"));
  s.interleaved = get<bool>(f, "interleaved");
  s.expert_gate = take_weights(f.attr("expert_gate"));
  s.expert_up = take_weights(f.attr("expert_up"));
  s.expert_down = take_weights(f.attr("expert_down"));
  s.expert_gate_bias = take_vectors(f.attr("expert_gate_bias"));
  s.expert_up_bias = take_vectors(f.attr("expert_up_bias"));
  s.expert_down_bias = take_vectors(f.attr("expert_down_bias"));
  s.shared_gate = take_linear(f.attr("shared_gate"));
  s.shared_up = take_linear(f.attr("shared_up"));
  s.shared_down = take_linear(f.attr("shared_down"));
  s.shared_score = take_linear(f.attr("shared_score"));
  return s;
}

}  // namespace

Array take_line(nb::handle source, const char* where, const std::string& name, const char* dtype) {
  Array a = take_array(source, where, name);
  require(a.dtype == dtype && a.ndim() == 1 && (a.shape[0] <= 1 || a.strides[0] == 1), where, name,
          " must be a contiguous ", dtype, " array of one dimension; got ", a.describe(),
          ". Convert it with numpy.ascontiguousarray");
  return a;
}

cpumoe::ModelSpec take_model(nb::handle m) {
  cpumoe::ModelSpec s;
  s.vocab = get<int64_t>(m, "vocab");
  s.hidden = get<int64_t>(m, "hidden");
  s.max_tokens = get<int64_t>(m, "max_tokens");
  s.norm_eps = get<float>(m, "norm_eps");
  s.act_class = take_act_class(get<std::string>(m, "act_class"), "load");
  s.embed = take_weight(m.attr("embed"));
  s.final_norm = take_vector(m.attr("final_norm"));
  s.head = take_linear(m.attr("head"));
  const nb::object layers = m.attr("layers");
  for (nb::handle layer : layers) {
    cpumoe::LayerSpec l;
    l.attn_norm = take_vector(layer.attr("attn_norm"));
    l.ffn_norm = take_vector(layer.attr("ffn_norm"));
    l.attn = take_attention(layer.attr("attn"));
    l.ffn = take_ffn(layer.attr("ffn"));
    s.layers.push_back(std::move(l));
  }
  return s;
}

}  // namespace cpumoe_py

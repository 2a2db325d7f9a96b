// The decoder: a Python ModelSpec (src/cpumoe/models/spec.py) becomes core's, weights in place.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "base/error.h"
#include "bindings.h"
#include "decoder/decoder.h"
#include "weights.h"

namespace nb = nanobind;
using namespace nb::literals;

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

// A contiguous array of one dimension and the given element type.
Array take_line(nb::handle source, const char* where, const std::string& name, const char* dtype) {
  Array a = take_array(source, where, name);
  require(a.dtype == dtype && a.ndim() == 1 && (a.shape[0] <= 1 || a.strides[0] == 1), where, name,
          " must be a contiguous ", dtype, " array of one dimension; got ", a.describe(),
          ". Convert it with numpy.ascontiguousarray");
  return a;
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

cpumoe::Code take_kv_code(const std::string& kv) {
  const cpumoe::Format* f = cpumoe::find_format(kv);
  require(f != nullptr && cpumoe::is_float(f->code), "kv", "must be fp16, bf16 or fp32; got ", kv);
  return f->code;
}

// core's Decoder, and references to what it views. One forward() at a time: it owns its buffers.
struct PyDecoder {
  nb::object spec, executor;
  std::unique_ptr<cpumoe::Decoder> decoder;
  std::mutex busy;

  PyDecoder(nb::object spec_, nb::object executor_)
      : spec(std::move(spec_)), executor(std::move(executor_)) {
    cpumoe::Executor& workers = nb::cast<cpumoe::Executor&>(executor);
    decoder = std::make_unique<cpumoe::Decoder>(take_model(spec), cpumoe::probe_machine().isa,
                                                workers);
  }
};

struct PyKvCache {
  cpumoe::KvCache cache;
  std::atomic<bool> busy{false};
  PyKvCache(const PyDecoder& d, int64_t capacity, const std::string& kv)
      : cache(d.decoder->model(), capacity, take_kv_code(kv)) {}
};

// Marks a cache as used for its own lifetime. A second user is refused, not made to wait: the
// tokens of two calls in one sequence would come in no order that either of them knows.
class CacheLease {
 public:
  explicit CacheLease(PyKvCache& cache) : cache_(&cache) {
    require(!cache.busy.exchange(true, std::memory_order_acquire), "KvCache",
            "must be used by one call at a time; got a second one while the first runs. ",
            "Give each thread its own cache");
  }
  CacheLease(CacheLease&& other) noexcept : cache_(std::exchange(other.cache_, nullptr)) {}
  CacheLease& operator=(CacheLease&&) = delete;
  ~CacheLease() {
    if (cache_ != nullptr) cache_->busy.store(false, std::memory_order_release);
  }

 private:
  PyKvCache* cache_;
};

// What a call of forward() keeps alive and unshared while others hold the interpreter lock: the
// list may be a generator's, or change. The ids are a copy, so that what was checked is what is
// read.
struct Held {
  nb::object owner;
  PyKvCache* cache;
  std::vector<int32_t> ids;
};

std::vector<Held> take_segments(nb::object segments) {
  std::vector<Held> held;
  for (nb::handle item : segments) {
    PyKvCache* cache = nullptr;
    require(nb::isinstance<nb::tuple>(item) && nb::len(item) == 2, "forward",
            "each segment must be a pair (KvCache, int32 ids); got something else. ",
            "Write [(cache, ids), ...]");
    nb::object owner(item[0]);
    require(nb::try_cast<PyKvCache*>(owner, cache) && cache != nullptr, "forward",
            "each segment must be a pair (KvCache, int32 ids); got something else. ",
            "Write [(cache, ids), ...]");
    const Array ids = take_line(nb::object(item[1]), "forward", "ids", "int32");
    require(!ids.empty(), "forward", "each segment must have at least one token; got none. ",
            "Leave the segment out");
    const int32_t* first = static_cast<const int32_t*>(ids.data);
    held.push_back({std::move(owner), cache, {first, first + ids.shape[0]}});
  }
  return held;
}

constexpr const char* kSites[] = {"attention", "output", "feed_forward"};

// Calls `tap` with a copy of what it is shown. The interpreter lock is taken for that.
cpumoe::Tap make_tap(const nb::object& tap) {
  if (tap.is_none()) return {};
  return [&tap](int64_t layer, cpumoe::Site site, const float* x, int64_t rows, int64_t width) {
    nb::gil_scoped_acquire locked;
    const size_t count = size_t(rows * width);
    float* copy = new float[count];
    std::copy(x, x + count, copy);
    nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    tap(layer, kSites[size_t(site)],
        nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(
            copy, {size_t(rows), size_t(width)}, owner)));
  };
}

nb::object forward(PyDecoder& self, nb::object segments, bool all, nb::object tap) {
  const cpumoe::Tap shown = make_tap(tap);
  const std::vector<Held> held = take_segments(std::move(segments));
  std::vector<cpumoe::Segment> parts;
  std::vector<CacheLease> leases;
  size_t rows = 0;
  for (const Held& h : held) {
    const auto same = [&](const cpumoe::Segment& s) { return s.cache == &h.cache->cache; };
    // core refuses a cache that occurs twice, in its own words
    if (std::none_of(parts.begin(), parts.end(), same)) leases.emplace_back(*h.cache);
    parts.push_back({&h.cache->cache, h.ids});
    rows += all ? h.ids.size() : 1;
  }
  require(!parts.empty(), "forward",
          "there must be at least one segment; got none. Pass [(cache, ids), ...]");
  const size_t vocab = size_t(self.decoder->model().vocab);
  std::unique_ptr<float[]> logits(new float[rows * vocab]);
  {
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(self.busy);
    self.decoder->forward(parts, all ? cpumoe::LogitsOf::all : cpumoe::LogitsOf::last,
                          logits.get(), shown);
  }
  float* data = logits.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, {rows, vocab}, owner));
}

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<PyDecoder>(m, "Decoder", "The whole forward pass of a model, weights in place.")
      .def(nb::init<nb::object, nb::object>(), "spec"_a, "executor"_a,
           "spec: a cpumoe.models.ModelSpec, kept alive. Raises Error when shapes do not fit.")
      .def("forward", &forward, "segments"_a, "all"_a = false, "tap"_a = nb::none(),
           nb::sig("def forward(self, segments: collections.abc.Sequence[tuple[KvCache, "
                   "numpy.typing.NDArray[numpy.int32]]], all: bool = False, tap: "
                   "collections.abc.Callable[[int, str, numpy.typing.NDArray[numpy.float32]], None]"
                   " | None = None) -> numpy.typing.NDArray[numpy.float32]"),
           "segments: [(KvCache, int32 ids [n]), ...]. Appends the tokens to the caches and gives\n"
           "fp32 logits [segments, vocab], or [tokens, vocab] with `all`. Releases the GIL.\n"
           "tap(layer, site, x): sees a copy of what linear maps are applied to, fp32\n"
           "[tokens, width]: site \"attention\" (q, k, v), \"output\" (o), \"feed_forward\"; it must\n"
           "not use this decoder. What it raises ends the call.\n"
           "Raises Error, with the caches as they were, also when another call uses one of them.")
      .def_prop_ro("last_weight_bytes",
                   [](const PyDecoder& d) { return d.decoder->last_weight_bytes(); },
                   "Bytes of weights that the last forward() read, each weight counted once.");

  nb::class_<PyKvCache>(m, "KvCache", "Keys and values of one sequence; memory grows with use.")
      .def(nb::init<const PyDecoder&, int64_t, const std::string&>(), "decoder"_a, "capacity"_a,
           "kv"_a = "fp16", "capacity: tokens. kv: fp16, bf16 or fp32. Raises Error.")
      .def_prop_ro("length", [](const PyKvCache& c) { return c.cache.length(); })
      .def_prop_ro("capacity", [](const PyKvCache& c) { return c.cache.capacity(); })
      .def_prop_ro("bytes_per_token", [](const PyKvCache& c) { return c.cache.bytes_per_token(); })
      .def("truncate", [](PyKvCache& c, int64_t n) {
             const CacheLease lease(c);
             c.cache.truncate(n);
           }, "length"_a,
           "Forget the tokens from `length` on. Raises Error while a forward() uses the cache.");
}

}  // namespace cpumoe_py

// Experts from arrays: stacked, separate, fused (halves or interleaved), or one array per expert.
#include "experts.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "weights.h"

namespace nb = nanobind;

namespace cpumoe_py {
namespace {

using cpumoe::Code;
using cpumoe::concat;
using cpumoe::Error;
using cpumoe::Layout;
using cpumoe::require;
using cpumoe::VectorView;
using cpumoe::WeightView;

constexpr const char* kExperts = "Experts";

// One weight or bias argument: an array with a leading expert dimension, or one array per expert;
// or the same of Weights, whose views are then all there is.
struct Source {
  std::string name;
  std::vector<Array> arrays;
  bool stacked = false;
  std::vector<WeightView> views;

  bool present() const { return !arrays.empty(); }
  int64_t experts() const {
    if (!views.empty()) return int64_t(views.size());
    return stacked ? arrays[0].shape[0] : int64_t(arrays.size());
  }
};

// Takes a Weight's views and owners; false when `h` is none.
bool take_native(Source& s, nb::handle h, bool stacked, Layout layout) {
  const PyWeight* w = find_weight(h);
  if (w == nullptr) return false;
  require(w->stacked == stacked, kExperts, s.name, " must be ",
          stacked ? "[E, N, K]" : "[N, K] for one expert", "; got a Weight of ",
          w->stacked ? 3 : 2, " dimensions. For one Weight per expert pass a list");
  require(w->views[0].layout == layout, kExperts, s.name,
          " must have the layout of the experts; got a Weight in the other one. Pass layout=");
  s.views.insert(s.views.end(), w->views.begin(), w->views.end());
  s.arrays.insert(s.arrays.end(), w->owners.begin(), w->owners.end());
  return true;
}

Source take_source(nb::handle h, const char* name, size_t dims, Layout layout) {
  Source s;
  s.name = name;
  if (h.is_none() || take_native(s, h, true, layout)) return s;
  if (nb::isinstance<nb::list>(h)) {
    for (nb::handle item : nb::cast<nb::list>(h)) {
      if (take_native(s, item, false, layout)) continue;
      require(s.views.empty(), kExperts, name,
              " must hold Weights only, or arrays only; got both. Wrap the arrays");
      s.arrays.push_back(take_array(item, kExperts, concat(name, "[", s.arrays.size(), "]")));
    }
    require(!s.arrays.empty(), kExperts, name,
            " must hold one array per expert; got none. Pass at least one");
    return s;
  }
  s.stacked = true;
  s.arrays.push_back(take_array(h, kExperts, name));
  const Array& a = s.arrays[0];
  if (a.ndim() != dims) {
    throw Error(concat(kExperts, ": ", name, " must have ", dims,
                       " dimensions, experts first; got ", a.describe(),
                       ". For one array per expert pass a list"));
  }
  require(a.shape[0] > 0, kExperts, name, " must hold at least one expert; got ", a.describe(),
          ". Pass a non-empty array");
  return s;
}

const void* advance(const void* p, Code code, int64_t elements) {
  return static_cast<const char*>(p) + elements * int64_t(cpumoe::code_bits(code)) / 8;
}

std::vector<WeightView> weights_of(const Source& s, Layout layout) {
  if (!s.views.empty()) return s.views;
  std::vector<WeightView> out;
  if (!s.stacked) {
    for (const Array& a : s.arrays)
      out.push_back(weight_view(a, layout, kExperts, concat(s.name, "[", out.size(), "]")));
    return out;
  }
  const Array& a = s.arrays[0];  // one check for all experts of a stack: they share its strides
  out.assign(size_t(s.experts()), weight_view(a, 0, layout, kExperts, s.name));
  for (size_t e = 1; e < out.size(); ++e)
    out[e].data = advance(a.data, a.format->code, int64_t(e) * a.strides[0]);
  return out;
}

std::vector<VectorView> vectors_of(const Source& s) {
  std::vector<VectorView> out;
  if (!s.present()) return out;
  if (!s.stacked) {
    for (const Array& a : s.arrays)
      out.push_back(vector_view(a, kExperts, concat(s.name, "[", out.size(), "]")));
    return out;
  }
  const Array& a = s.arrays[0];
  out.assign(size_t(s.experts()), vector_view(a, 0, kExperts, s.name));
  for (size_t e = 1; e < out.size(); ++e)
    out[e].data = advance(a.data, a.format->code, int64_t(e) * a.strides[0]);
  return out;
}

void require_even(int64_t n, const std::string& name) {
  require(n % 2 == 0, kExperts, name, " must have an even number of features, gate and up; got ", n,
          ". Use gate= and up= for separate arrays");
}

// Gate first, then up, in one array: two views of each half.
void split_halves(std::vector<WeightView>& gate, std::vector<WeightView>& up) {
  for (WeightView& w : gate) {
    const int64_t half = w.n / 2;
    up.push_back(take_features(w, half, half, kExperts, "up, features"));
    w = take_features(w, 0, half, kExperts, "gate, features");
  }
}

void split_halves(std::vector<VectorView>& gate, std::vector<VectorView>& up) {
  for (VectorView& b : gate) {
    VectorView u = b;
    u.size = b.size / 2;
    u.data = advance(b.data, b.code, u.size * b.step);
    up.push_back(u);
    b.size = u.size;
  }
}

void require_biases(const std::vector<VectorView>& biases, int64_t n, const Source& s) {
  for (const VectorView& b : biases) {
    require(b.size == n, kExperts, s.name, " must hold ", n, " values per expert; got ", b.size,
            ". Give one value per output feature");
  }
}

std::unique_ptr<PyExperts> make_experts(nb::object gate_up, nb::object gate, nb::object up,
                                        nb::object down, nb::object gate_up_bias,
                                        nb::object gate_bias, nb::object up_bias,
                                        nb::object down_bias, const std::string& activation,
                                        double alpha, double limit, const std::string& layout_name,
                                        bool interleaved) {
  auto x = std::make_unique<PyExperts>();
  const Layout layout = take_layout(layout_name, kExperts);
  x->layout = layout;
  const auto take = [&](nb::handle h, const char* name, size_t dims) {
    return take_source(h, name, dims, layout);
  };
  Source gu = take(gate_up, "gate_up", 3), g = take(gate, "gate", 3), u = take(up, "up", 3),
         d = take(down, "down", 3), gub = take(gate_up_bias, "gate_up_bias", 2),
         gb = take(gate_bias, "gate_bias", 2), ub = take(up_bias, "up_bias", 2),
         db = take(down_bias, "down_bias", 2);

  require(d.present(), kExperts,
          "down must be given; got None. Pass the weights of the second product");
  require(gu.present() != u.present(), kExperts,
          "the first product must be gate_up, or gate and up, or up alone; got ",
          gu.present() ? "gate_up and up" : "neither gate_up nor up",
          ". Pass exactly one of these");
  require(
      !(g.present() && gu.present()), kExperts,
      "gate must come with up, not with gate_up; got gate and gate_up. Pass exactly one of these");
  require(!interleaved || gu.present(), kExperts,
          "interleaved must go with gate_up; got separate arrays. Drop interleaved");
  require(!gub.present() || gu.present(), kExperts,
          "gate_up_bias must go with gate_up; got it without. Use gate_bias and up_bias");
  require(!gb.present() || g.present(), kExperts,
          "gate_bias must go with gate; got it without. Use gate_up_bias or up_bias");
  require(!ub.present() || u.present(), kExperts,
          "up_bias must go with up; got it without. Use gate_up_bias");
  if (gu.present()) {
    x->gate = weights_of(gu, layout);
    for (const WeightView& w : x->gate) require_even(w.n, gu.name);
    x->gate_bias = vectors_of(gub);
    require_biases(x->gate_bias, x->gate[0].n, gub);
    if (!interleaved) {
      split_halves(x->gate, x->up);
      split_halves(x->gate_bias, x->up_bias);
    }
  } else if (g.present()) {
    x->gate = weights_of(g, layout);
    x->up = weights_of(u, layout);
    x->gate_bias = vectors_of(gb);
    x->up_bias = vectors_of(ub);
    require_biases(x->gate_bias, x->gate[0].n, gb);
    require_biases(x->up_bias, x->up[0].n, ub);
  } else {  // not gated: core calls the only first product `gate`
    x->gate = weights_of(u, layout);
    x->gate_bias = vectors_of(ub);
    require_biases(x->gate_bias, x->gate[0].n, ub);
  }
  x->down = weights_of(d, layout);
  x->down_bias = vectors_of(db);

  const int64_t experts = int64_t(x->down.size());
  const WeightView& d0 = x->down[0];
  for (const Source* s : {&gu, &g, &u, &gub, &gb, &ub, &db}) {
    require(!s->present() || s->experts() == experts, kExperts, s->name,
            " must hold as many experts as down; got ", s->present() ? s->experts() : 0, " and ",
            experts, ". Pass matching arrays");
  }
  require_biases(x->down_bias, d0.n, db);
  for (const auto* group : {&x->gate, &x->up}) {
    const std::string& name = gu.present()                       ? gu.name
                              : group == &x->gate && g.present() ? g.name
                                                                 : u.name;
    for (size_t e = 0; e < group->size(); ++e) {
      const WeightView& w = (*group)[e];
      const int64_t n = interleaved ? w.n / 2 : w.n;
      require(n == d0.k && w.k == d0.n, kExperts, name, " of expert ", e, " must map the ", d0.n,
              " outputs of down[0] to its ", d0.k, " inputs; got ", w.k, " to ", n,
              ". Check the shapes and layout=\"", layout_name, "\"");
    }
  }
  for (size_t e = 0; e < x->down.size(); ++e) {
    require(x->down[e].n == d0.n && x->down[e].k == d0.k, kExperts, "down of expert ", e,
            " must have the size of expert 0, ", d0.n, " by ", d0.k, "; got ", x->down[e].n, " by ",
            x->down[e].k, ". All experts have one shape");
  }

  cpumoe::ExpertsView& v = x->view;
  v.experts = experts;
  v.hidden = d0.n;
  v.inter = d0.k;
  v.interleaved = interleaved;
  v.gate = x->gate;
  v.up = x->up;
  v.down = x->down;
  v.gate_bias = x->gate_bias;
  v.up_bias = x->up_bias;
  v.down_bias = x->down_bias;
  require(cpumoe::find_act(activation.c_str(), &v.act.kind), kExperts,
          "activation must be a known function; got \"", activation,
          "\". Known: identity silu gelu gelu_tanh relu relu2 swiglu_oai");
  v.act.alpha = float(alpha);
  v.act.limit = float(limit);
  require(limit > 0, kExperts, "limit must be positive; got ", limit, ". None means no clamp");
  require(v.gated() || std::isinf(limit), kExperts, "limit must go with a gate; got ", limit,
          " and up alone. Drop it, or pass gate_up, or gate and up");
  require(v.act.kind != cpumoe::ActKind::swiglu_oai || v.gated(), kExperts,
          "activation swiglu_oai must have a gate; got up alone. Pass gate_up, or gate and up");
  cpumoe::check_experts(v, kExperts);
  for (Source* s : {&gu, &g, &u, &d, &gub, &gb, &ub, &db})
    for (Array& a : s->arrays) x->owners.push_back(std::move(a));
  for (const Array& a : x->owners) x->extents.push_back(extent(a));
  return x;
}

int64_t experts_bytes(const PyExperts& x) {
  int64_t bytes = 0;
  for (const auto* group : {&x.gate, &x.up, &x.down})
    for (const WeightView& w : *group) bytes += cpumoe::weight_bytes(w);
  return bytes;
}

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<PyExperts>(m, "Experts")
      .def_prop_ro("experts", [](const PyExperts& x) { return x.view.experts; })
      .def_prop_ro("hidden", [](const PyExperts& x) { return x.view.hidden; })
      .def_prop_ro("inter", [](const PyExperts& x) { return x.view.inter; })
      .def_prop_ro("gated", [](const PyExperts& x) { return x.view.gated(); })
      .def_prop_ro("interleaved", [](const PyExperts& x) { return x.view.interleaved; })
      .def_prop_ro("layout",
                   [](const PyExperts& x) { return x.layout == Layout::rows ? "rows" : "columns"; })
      .def_prop_ro("format", [](const PyExperts& x) { return x.down[0].format->name; })
      .def_prop_ro("weight_bytes", &experts_bytes);
  m.def("make_experts", &make_experts, nb::kw_only(), nb::arg("gate_up").none(),
        nb::arg("gate").none(), nb::arg("up").none(), nb::arg("down").none(),
        nb::arg("gate_up_bias").none(), nb::arg("gate_bias").none(), nb::arg("up_bias").none(),
        nb::arg("down_bias").none(), nb::arg("activation"), nb::arg("alpha"), nb::arg("limit"),
        nb::arg("layout"), nb::arg("interleaved"));
}

}  // namespace cpumoe_py

// The operators: moe, route, linear (Experts: experts.cc). Arguments are checked and turned into
// views here; the arithmetic is core's.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "base/error.h"
#include "bindings.h"
#include "experts.h"
#include "kernels/topk/topk.h"
#include "moe/moe.h"
#include "weights.h"

namespace nb = nanobind;

namespace cpumoe_py {
namespace {

using cpumoe::Code;
using cpumoe::concat;
using cpumoe::Error;
using cpumoe::Layout;
using cpumoe::MatrixView;
using cpumoe::require;
using cpumoe::VectorView;
using cpumoe::WeightView;

// Buffers of finished calls, kept for the next ones: one per caller that was ever concurrent.
class WorkspacePool {
 public:
  std::unique_ptr<cpumoe::Workspace> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<cpumoe::Workspace>();
    auto w = std::move(free_.back());
    free_.pop_back();
    return w;
  }
  void give(std::unique_ptr<cpumoe::Workspace> w) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(w));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<cpumoe::Workspace>> free_;
};

WorkspacePool& workspaces() {
  static WorkspacePool* pool = new WorkspacePool;  // never destroyed: callers may outlive statics
  return *pool;
}

class Lease {
 public:
  Lease() : w_(workspaces().take()) {}
  ~Lease() { workspaces().give(std::move(w_)); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  cpumoe::Workspace& get() { return *w_; }

 private:
  std::unique_ptr<cpumoe::Workspace> w_;
};

int64_t elements(const Array& a) {
  int64_t n = 1;
  for (int64_t s : a.shape) n *= s;
  return n;
}

// Calls fn(i, offset) for every element in row-major order, offset in elements from a.data.
template <class F>
void for_each(const Array& a, F&& fn) {
  const int64_t n = elements(a);
  if (n == 0) return;
  const int64_t line = a.shape.back(), step = a.strides.back();
  for (int64_t i = 0; i < n; i += line) {
    int64_t base = 0, flat = i / line;
    for (size_t d = a.ndim() - 1; d-- > 0;) {
      base += (flat % a.shape[d]) * a.strides[d];
      flat /= a.shape[d];
    }
    for (int64_t j = 0; j < line; ++j) fn(i + j, base + j * step);
  }
}

std::vector<int32_t> take_ids(const Array& a, int64_t experts, bool allow_skip, const char* where) {
  const bool wide = a.dtype == "int64";
  require(wide || a.dtype == "int32", where, "ids must be int32 or int64; got ", a.dtype,
          ". Convert them to one of these");
  const int64_t end = experts + (allow_skip ? 1 : 0);
  std::vector<int32_t> ids(size_t(elements(a)));
  for_each(a, [&](int64_t i, int64_t o) {
    const int64_t id =
        wide ? static_cast<const int64_t*>(a.data)[o] : static_cast<const int32_t*>(a.data)[o];
    if (id < 0 || id >= end) {
      throw Error(concat(
          where, ": ids must be in [0, ", end, "); got ", id, " for token ", i / a.shape.back(),
          ", slot ", i % a.shape.back(), ". There are ", experts, " experts",
          !allow_skip && id == experts ? "; pass skip_sentinel=True to skip this id" : ""));
    }
    ids[size_t(i)] = int32_t(id);
  });
  return ids;
}

std::vector<float> take_floats(const Array& a, const char* where, const std::string& name) {
  require_float(a, where, name);
  std::vector<float> out(size_t(elements(a)));
  for_each(a, [&](int64_t i, int64_t o) {
    out[size_t(i)] = cpumoe::load_as_float(a.data, a.format->code, o);
  });
  return out;
}

void require_apart(const Array& out, const Extent& other, const char* where, const char* name) {
  const Extent a = extent(out);
  require(a.second <= other.first || other.second <= a.first || a.first == a.second ||
              other.first == other.second,
          where, "out must not share memory with ", name,
          "; got overlapping arrays. Pass another output array");
}

// x's leading dimensions followed by `last`.
std::vector<int64_t> like(const Array& x, int64_t last) {
  std::vector<int64_t> shape = x.shape;
  shape.back() = last;
  return shape;
}

void py_moe(nb::handle x_source, const PyExperts& experts, nb::handle ids_source,
            nb::handle weights_source, nb::handle out_source, cpumoe::Executor& executor,
            bool skip_sentinel, const std::string& act_class) {
  const char* where = "moe";
  const std::optional<cpumoe::ActClass> asked = take_act_class(act_class, where);
  const cpumoe::ExpertsView& view = experts.view;
  const Array x = take_array(x_source, where, "x"), ids = take_array(ids_source, where, "ids"),
              weights = take_array(weights_source, where, "weights"),
              out = take_array(out_source, where, "out", true);
  const MatrixView xm = matrix_view(x, where, "x");
  require(xm.cols == view.hidden, where, "x must have ", view.hidden,
          " features, as the experts do; got ", xm.cols, ". Pass [..., ", view.hidden, "]");
  require(ids.ndim() == x.ndim() && ids.shape.back() > 0, where,
          "ids must have shape [..., k] with k >= 1 beside x [..., H]; got ", ids.dtype, " with ",
          ids.ndim(), " dimensions beside ", x.ndim(), ". Give each token its expert ids");
  const int64_t top_k = ids.shape.back();
  require_shape(ids, like(x, top_k), where, "ids", "[..., k]");
  require_shape(weights, like(x, top_k), where, "weights", "[..., k]");
  require_shape(out, x.shape, where, "out", "[..., H]");
  const MatrixView om = matrix_view(out, where, "out");
  require_apart(out, extent(x), where, "x");
  for (const Extent& e : experts.extents) require_apart(out, e, where, "the experts");
  const std::vector<int32_t> id = take_ids(ids, view.experts, skip_sentinel, where);
  const std::vector<float> weight = take_floats(weights, where, "weights");

  nb::gil_scoped_release unlocked;
  if (xm.rows == 0) return;
  cpumoe::RoutingPlan plan;
  cpumoe::make_plan(plan, id.data(), weight.data(), xm.rows, top_k, view.experts, skip_sentinel);
  const cpumoe::MoeBlock block{&view, &plan};
  cpumoe::MoeArgs args;
  args.blocks = {&block, 1};
  args.x = xm;
  args.out = const_cast<void*>(om.data);
  args.out_code = om.code;
  args.out_stride = om.stride;
  args.accumulate = false;
  args.act_class = asked;
  Lease workspace;
  cpumoe::moe(args, process_isa(), workspace.get(), executor);
}

void py_linear(nb::handle x_source, nb::handle w_source, nb::handle bias_source,
               const std::string& layout, nb::handle out_source, cpumoe::Executor& executor,
               const std::string& act_class) {
  const char* where = "linear";
  const std::optional<cpumoe::ActClass> asked = take_act_class(act_class, where);
  const Array x = take_array(x_source, where, "x"), out = take_array(out_source, where, "out", true);
  Array bias;
  std::vector<Array> owners;
  WeightView wv;
  if (const PyWeight* weight = find_weight(w_source)) {
    require(!weight->stacked, where, "w must be one matrix [N, K]; got a stack [E, N, K]. ",
            "Pass one expert's Weight");
    owners = weight->owners;
    wv = weight->views[0];
  } else {
    owners.push_back(take_array(w_source, where, "w"));
    wv = weight_view(owners[0], take_layout(layout, where), where, "w");
  }
  const MatrixView xm = matrix_view(x, where, "x");
  require(xm.cols == wv.k, where, "x must have as many features as w has inputs, ", wv.k, "; got ",
          xm.cols, ". Check layout=\"", layout, "\"");
  require(wv.k > 0 && wv.n > 0, where, "w must not be empty; got [", wv.n, ", ", wv.k, "]",
          ". Pass at least one feature");
  require_shape(out, like(x, wv.n), where, "out", "[..., N]");
  const MatrixView om = matrix_view(out, where, "out");
  require_apart(out, extent(x), where, "x");
  for (const Array& owner : owners) require_apart(out, extent(owner), where, "w");
  cpumoe::LinearOp op{&wv, {}, nullptr, 0};
  if (!bias_source.is_none()) {
    bias = take_array(bias_source, where, "bias");
    require_shape(bias, {wv.n}, where, "bias", "[N]");
    require_apart(out, extent(bias), where, "bias");
    op.bias = vector_view(bias, where, "bias");
  }

  nb::gil_scoped_release unlocked;
  if (xm.rows == 0) return;
  std::vector<float> wide;  // core writes fp32; other outputs are rounded once from it
  if (om.code == Code::f32) {
    op.out = static_cast<float*>(const_cast<void*>(om.data));
    op.out_stride = om.stride;
  } else {
    wide.resize(size_t(xm.rows * wv.n));
    op.out = wide.data();
    op.out_stride = wv.n;
  }
  {
    Lease workspace;
    cpumoe::linear({&op, 1}, xm, asked, process_isa(), workspace.get(), executor);
  }
  if (om.code == Code::f32) return;
  for (int64_t t = 0; t < xm.rows; ++t)
    for (int64_t n = 0; n < wv.n; ++n)
      cpumoe::store_from_float(const_cast<void*>(om.data), om.code, t * om.stride + n,
                               wide[size_t(t * wv.n + n)]);
}

cpumoe::RouterKind router_kind(const std::string& kind) {
  if (kind == "softmax_topk") return cpumoe::RouterKind::softmax_topk;
  if (kind == "topk_softmax") return cpumoe::RouterKind::topk_softmax;
  if (kind == "sigmoid") return cpumoe::RouterKind::sigmoid;
  throw Error(
      concat("route: kind must be \"softmax_topk\", \"topk_softmax\" or \"sigmoid\"; got \"", kind,
             "\". See the docstring for their formulas"));
}

void py_route(nb::handle logits_source, int64_t k, const std::string& kind, bool renormalize,
              double norm_eps, double scale, nb::handle correction_source, int64_t groups,
              int64_t top_groups, bool group_max, nb::handle ids_source,
              nb::handle weights_source) {
  const char* where = "route";
  const Array logits = take_array(logits_source, where, "logits"),
              ids = take_array(ids_source, where, "ids", true),
              weights = take_array(weights_source, where, "weights", true);
  require_float(logits, where, "logits");
  require(logits.ndim() >= 1 && logits.shape.back() > 0, where,
          "logits must have shape [..., E] with E >= 1; got ", logits.describe(),
          ". Give each token one logit per expert");
  const int64_t experts = logits.shape.back();
  require(k >= 1 && k <= experts, where, "k must be in [1, ", experts,
          "], the number of experts; got ", k, ". Choose fewer experts");
  constexpr int64_t kMax = int64_t(1) << 30;
  require(experts < kMax && groups >= 1 && groups < kMax && top_groups >= 1 && top_groups < kMax,
          where, "groups and top_groups must be positive; got ", groups, " and ", top_groups,
          ". 1 means no groups");
  const std::vector<float> values = take_floats(logits, where, "logits");
  std::vector<float> correction;
  cpumoe::Router router;
  router.kind = router_kind(kind);
  router.experts = int32_t(experts);
  router.top_k = int32_t(k);
  router.renormalize = renormalize;
  router.norm_eps = float(norm_eps);
  router.scale = float(scale);
  router.groups = int32_t(groups);
  router.top_groups = int32_t(top_groups);
  router.group_max = group_max;
  if (!correction_source.is_none()) {
    const Array c = take_array(correction_source, where, "correction");
    require_shape(c, {experts}, where, "correction", "[E]");
    require(router.kind == cpumoe::RouterKind::sigmoid, where,
            "correction must go with kind=\"sigmoid\"; got kind=\"", kind, "\". Drop it");
    correction = take_floats(c, where, "correction");
    router.correction = correction.data();
  }
  const char* must = cpumoe::check_router(router);
  require(must == nullptr, where, must == nullptr ? "" : must, "; got experts=", experts, " k=", k,
          " groups=", groups, " top_groups=", top_groups, " scale=", scale,
          ". Check the router's settings");
  require_shape(ids, like(logits, k), where, "ids", "[..., k]");
  require_shape(weights, like(logits, k), where, "weights", "[..., k]");
  const int64_t tokens = int64_t(values.size()) / experts;
  int64_t bad;
  {
    nb::gil_scoped_release unlocked;
    // Both outputs were allocated by ops.py: contiguous int32 and fp32.
    bad = cpumoe::route(router, values.data(), experts, tokens,
                        static_cast<int32_t*>(const_cast<void*>(ids.data)),
                        static_cast<float*>(const_cast<void*>(weights.data)));
  }
  require(bad < 0, where, "logits must be finite; got a NaN or an infinity in token ", bad,
          ". Look at what the router was given");
}

// A new array with x's dtype for libraries that can only import: they take it over by DLPack.
nb::ndarray<nb::array_api> py_empty_like(nb::handle x_source, const std::vector<int64_t>& shape) {
  const Array x = take_array(x_source, "empty_like", "x");
  std::vector<size_t> extents(shape.begin(), shape.end());
  size_t bytes = x.owner.itemsize();
  for (size_t n : extents) bytes *= n;
  auto* buffer = new cpumoe::AlignedBuffer(bytes + 64);
  nb::capsule owner(buffer,
                    [](void* p) noexcept { delete static_cast<cpumoe::AlignedBuffer*>(p); });
  return nb::ndarray<nb::array_api>(buffer->data(), extents.size(), extents.data(), owner, nullptr,
                                    x.owner.dtype());
}

}  // namespace

cpumoe::IsaSet process_isa() {
  static const cpumoe::IsaSet isa = cpumoe::probe_machine().isa;
  return isa;
}

void bind_ops(nb::module_& m) {
  bind_weights(m);
  bind_experts(m);
  m.def("empty_like", &py_empty_like, nb::arg("x"), nb::arg("shape"));
  m.def("moe", &py_moe, nb::arg("x"), nb::arg("experts"), nb::arg("ids"), nb::arg("weights"),
        nb::arg("out"), nb::arg("executor"), nb::arg("skip_sentinel"), nb::arg("act_class"));
  m.def("linear", &py_linear, nb::arg("x"), nb::arg("w"), nb::arg("bias").none(), nb::arg("layout"),
        nb::arg("out"), nb::arg("executor"), nb::arg("act_class"));
  m.def("route", &py_route, nb::arg("logits"), nb::arg("k"), nb::arg("kind"),
        nb::arg("renormalize"), nb::arg("norm_eps"), nb::arg("scale"), nb::arg("correction").none(),
        nb::arg("groups"), nb::arg("top_groups"), nb::arg("group_max"), nb::arg("ids"),
        nb::arg("weights"));
}

}  // namespace cpumoe_py

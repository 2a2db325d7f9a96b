#include "moe/experts.h"

#include <cmath>
#include <string>

#include "base/error.h"
#include "moe/checks.h"

namespace cpumoe {
namespace {

std::string name_of(const char* part, int64_t e) { return concat(part, "[", e, "]"); }

void check_count(size_t got, int64_t experts, bool may_be_empty, const char* part,
                 const char* where) {
  if (may_be_empty && got == 0) return;
  require(int64_t(got) == experts, where, part, " must hold one view per expert (", experts,
          "); got ", got);
}

// Names are put together only for what does not fit: this runs on every call of the operator.
void check_bias(std::span<const VectorView> biases, int64_t e, int64_t size, const char* part,
                const char* where) {
  if (biases.empty() || vector_fits(biases[size_t(e)], size)) return;
  check_vector(biases[size_t(e)], size, name_of(part, e).c_str(), where);
}

void check_matrix(const WeightView& w, int64_t e, int64_t n, int64_t k, const char* part,
                  const char* where) {
  if (!weight_fits(w, n, k)) check_weight(w, n, k, name_of(part, e).c_str(), where);
}

}  // namespace

bool weight_fits(const WeightView& w, int64_t n, int64_t k) {
  const int64_t lines = w.layout == Layout::rows ? n : k;
  return w.n == n && w.k == k && w.stride <= kMaxElements / max64(1, lines) &&
         weight_fault(w).empty();
}

bool vector_fits(const VectorView& v, int64_t size) {
  return v.data == nullptr ||
         (v.size == size && v.step >= 1 && v.step <= kMaxElements / max64(1, size));
}

void check_weight(const WeightView& w, int64_t n, int64_t k, const char* name, const char* where) {
  if (weight_fits(w, n, k)) return;
  require(w.format != nullptr, where, name, " must have a format; got none");
  require(w.data != nullptr, where, name, " must have data; got a null pointer");
  require(w.n == n && w.k == k, where, name, " must be [", n, " features, ", k, " inputs]; got [",
          w.n, ", ", w.k, "]");
  const std::string fault = weight_fault(w);
  require(fault.empty(), where, name, " ", fault);
  throw Error(concat(where, ": ", name, " must fit in memory; got a stride of ", w.stride));
}

void check_vector(const VectorView& v, int64_t size, const char* name, const char* where) {
  if (vector_fits(v, size)) return;
  require(v.size == size, where, name, " must hold ", size, " values; got ", v.size);
  throw Error(concat(where, ": ", name, " must have a positive step; got ", v.step));
}

void check_experts_shape(const ExpertsView& x, const char* where) {
  require(x.experts >= 1 && x.experts < kMaxDim, where,
          "the number of experts must be from 1 to 2^31 - 1; got ", x.experts);
  const int64_t most_inter = x.interleaved ? kMaxDim / 2 : kMaxDim;  // 2 * inter features a row
  require(x.hidden >= 1 && x.hidden < kMaxDim && x.inter >= 1 && x.inter < most_inter, where,
          "hidden and intermediate sizes must be at least 1, and below ", kMaxDim, " and ",
          most_inter, "; got ", x.hidden, " and ", x.inter);
  check_count(x.gate.size(), x.experts, false, x.gated() ? "gate" : "the first projection", where);
  check_count(x.up.size(), x.experts, true, "up", where);
  check_count(x.down.size(), x.experts, false, "down", where);
  check_count(x.gate_bias.size(), x.experts, true, "gate_bias", where);
  check_count(x.up_bias.size(), x.experts, true, "up_bias", where);
  check_count(x.down_bias.size(), x.experts, true, "down_bias", where);
  require(!x.interleaved || x.up.empty(), where,
          "up must be empty when gate and up are interleaved; got ", x.up.size(), " views");
  require(!x.up.empty() || x.up_bias.empty(), where, "up_bias needs separate up projections; got ",
          x.up_bias.size(), " biases. Interleaved biases belong in gate_bias");
  require(x.act.kind != ActKind::swiglu_oai || x.gated(), where,
          "swiglu_oai must have gate and up projections; got one projection");
  require(std::isfinite(x.act.alpha) && x.act.limit > 0, where,
          "the activation must have a finite alpha and a positive limit; got ", x.act.alpha,
          " and ", x.act.limit);
}

void check_expert(const ExpertsView& x, int64_t e, const char* where) {
  const size_t i = size_t(e);
  const int64_t features = x.interleaved ? 2 * x.inter : x.inter;
  check_matrix(x.gate[i], e, features, x.hidden, "gate", where);
  if (!x.up.empty()) check_matrix(x.up[i], e, x.inter, x.hidden, "up", where);
  check_matrix(x.down[i], e, x.hidden, x.inter, "down", where);
  check_bias(x.gate_bias, e, features, "gate_bias", where);
  check_bias(x.up_bias, e, x.inter, "up_bias", where);
  check_bias(x.down_bias, e, x.hidden, "down_bias", where);
}

void check_experts(const ExpertsView& experts, const char* where) {
  check_experts_shape(experts, where);
  for (int64_t e = 0; e < experts.experts; ++e) check_expert(experts, e, where);
}

}  // namespace cpumoe

// What Python calls Experts: views of somebody's arrays, and references that keep them alive.
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

#include "arrays.h"
#include "moe/experts.h"

namespace cpumoe_py {

struct PyExperts {
  std::vector<cpumoe::WeightView> gate, up, down;
  std::vector<cpumoe::VectorView> gate_bias, up_bias, down_bias;
  cpumoe::ExpertsView view;  // spans of the vectors above
  std::vector<Array> owners;
  std::vector<Extent> extents;  // of the owners; no output may lie there
  cpumoe::Layout layout = cpumoe::Layout::rows;
};

void bind_experts(nanobind::module_& m);  // called by bind_ops

}  // namespace cpumoe_py

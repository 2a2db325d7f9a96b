// What Python calls a Weight: matrices in a format, as views of somebody's arrays.
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

#include "arrays.h"

namespace cpumoe_py {

// One matrix per expert (one when it is not stacked), all of one format, layout and shape.
struct PyWeight {
  std::vector<cpumoe::WeightView> views;
  bool stacked = false;
  std::vector<Array> owners;
};

// A cpumoe.Weight's or its native part's PyWeight; null for anything else.
const PyWeight* find_weight(nanobind::handle source);
// Features [n0, n0 + n) of w; Error when they do not begin where a block or a scale does.
cpumoe::WeightView take_features(const cpumoe::WeightView& w, int64_t n0, int64_t n,
                                 const char* where, const std::string& name);

void bind_weights(nanobind::module_& m);  // called by bind_ops

}  // namespace cpumoe_py

// A batch of routed tokens and one call of the operator. For tests only.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "moe/testing/layer.h"
#include "testing/test.h"

namespace cpumoe::testing {

inline const Machine& machine() {
  static const Machine m = probe_machine();
  return m;
}
inline Executor& executor() {
  static Executor e(machine(), {});
  return e;
}

inline constexpr Code kCodes[] = {Code::f32, Code::f16, Code::bf16};

// Tokens, their routing, and an output, all at their exact sizes.
struct Batch {
  int64_t tokens, hidden, top_k;
  Code code;
  std::vector<char> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  Batch(int64_t t, int64_t h, int64_t k, int64_t experts, Code c, uint64_t seed)
      : tokens(t), hidden(h), top_k(k), code(c), x(size_t(t * h) * code_bits(c) / 8) {
    Rng rng(seed);
    fill_random(x.data(), c, t * h, 2.0f, rng);
    for (int64_t i = 0; i < t; ++i) {
      std::vector<int32_t> order(static_cast<size_t>(experts));
      std::iota(order.begin(), order.end(), 0);
      for (int64_t j = 0; j < k; ++j) {  // k distinct experts in any order
        std::swap(order[size_t(j)], order[size_t(j + rng.below(experts - j))]);
        ids.push_back(order[size_t(j)]);
        weights.push_back(rng.uniform(-0.2f, 1.0f));
      }
    }
  }
  MatrixView view() const { return {x.data(), code, tokens, hidden, hidden}; }
  RoutingPlan plan(int64_t experts, bool skip = false) const {
    RoutingPlan p;
    make_plan(p, ids.data(), weights.data(), tokens, top_k, experts, skip);
    return p;
  }
};

inline std::vector<char> run(std::span<const MoeBlock> blocks, const MatrixView& x, Code out_code,
                             Executor& workers = executor(),
                             std::optional<ActClass> act_class = {}) {
  Workspace workspace;
  // 0xff is a NaN in every code: an element that is not written shows.
  std::vector<char> out(size_t(x.rows * x.cols) * code_bits(out_code) / 8, char(0xff));
  moe({blocks, x, out.data(), out_code, x.cols, false, act_class}, machine().isa, workspace,
      workers);
  return out;
}

inline std::vector<char> run(const Layer& layer, const Batch& b, Code out_code = Code::f32,
                             Executor& workers = executor()) {
  const ExpertsView view = layer.view();
  const RoutingPlan plan = b.plan(view.experts);
  const MoeBlock block{&view, &plan};
  return run({&block, 1}, b.view(), out_code, workers);
}

inline void check_within(const std::vector<char>& got, Code code, const std::vector<Bounded>& want,
                         const std::string& what) {
  for (size_t i = 0; i < want.size(); ++i) {
    const double v = double(load_as_float(got.data(), code, int64_t(i)));
    CHECK_MSG(std::fabs(v - want[i].value) <= want[i].error, what << " element " << i << ": " << v
                                                                  << " is not " << want[i].value
                                                                  << " +- " << want[i].error);
  }
}

}  // namespace cpumoe::testing

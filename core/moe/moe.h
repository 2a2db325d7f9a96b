// The fused MoE operator: route -> plan -> tasks -> run. No intrinsics, no threads of its own.
#pragma once
#include <memory>
#include <vector>

#include "base/buffer.h"
#include "kernels/dot/dot.h"
#include "machine/executor.h"
#include "moe/experts.h"

namespace cpumoe {

// Tokens by expert (CSR), from a counting sort of the (token, expert) pairs.
struct RoutingPlan {
  int64_t tokens = 0, top_k = 0, experts = 0;
  std::vector<int32_t> offsets;  // [experts + 1] into the arrays below
  std::vector<int32_t> token;    // [pairs] token of each pair, rising within an expert
  std::vector<int32_t> slot;     // [pairs] its place in the token's top_k
  std::vector<float> weight;     // [pairs]
};
// ids: [tokens, top_k]. An id == experts is skipped when `allow_skip` (expert-parallel sentinel);
// any other id outside [0, experts) throws Error. Ids need be neither sorted nor distinct.
void make_plan(RoutingPlan& plan, const int32_t* ids, const float* weights, int64_t tokens,
               int64_t top_k, int64_t experts, bool allow_skip);

// Buffers kept between calls; one per concurrent caller. Grow-only.
class Workspace {
 public:
  Workspace();
  ~Workspace();
  struct Impl;
  std::unique_ptr<Impl> impl;
};

// One experts block over one set of tokens; several blocks (routed, shared) share the phases.
struct MoeBlock {
  const ExpertsView* experts;
  const RoutingPlan* plan;
};

// out[t] = (base ? out[t] : 0) + sum over pairs of weight * expert(x[t]); x: [T, H] any code; out:
// [T, H]. out_code may differ from x's. The sum of a token runs over blocks in order and experts
// rising, so the result depends neither on the thread count nor on scheduling. T = 0 is allowed.
struct MoeArgs {
  std::span<const MoeBlock> blocks;
  MatrixView x;
  void* out;
  Code out_code;
  int64_t out_stride;  // elements
  bool accumulate;     // add to out
  std::optional<ActClass> act_class = {};  // of every product that has it (class_for)
  // check_experts, or what asks as much, has passed and nothing has changed since: in decode the views
  // of the touched experts come from memory, so that looking at all of each costs 4 us.
  bool checked = false;
};
void moe(const MoeArgs& args, IsaSet isa, Workspace& workspace, Executor& executor);

// Dense linear layers that share their input, or each take some columns of it:
// out_i = x W_i^T + bias_i in fp32, one batch of tasks.
struct LinearOp {
  const WeightView* w;
  VectorView bias;  // absent when data is null
  float* out;       // [T, w->n]
  int64_t out_stride;
  int64_t column = -1;  // x's columns [column, column + w->k) are the input; -1: all of them
};
void linear(std::span<const LinearOp> ops, MatrixView x, std::optional<ActClass> act_class,
            IsaSet isa, Workspace& workspace, Executor& executor);

}  // namespace cpumoe

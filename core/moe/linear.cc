#include "base/error.h"
#include "moe/checks.h"
#include "moe/workspace.h"

namespace cpumoe {
namespace {

void check(std::span<const LinearOp> ops, const MatrixView& x) {
  const char* where = "linear";
  require(x.rows >= 0 && x.rows < kMaxDim && x.cols >= 1 && x.cols < kMaxDim, where,
          "x must be [tokens, inputs]; got [", x.rows, ", ", x.cols, "]");
  require(
      x.rows == 0 || (x.data != nullptr && x.stride >= x.cols && x.stride <= kMaxElements / x.rows),
      where, "x must have data and a stride of at least ", x.cols, "; got a stride of ", x.stride);
  for (const LinearOp& op : ops) {
    require(op.w != nullptr, where, "every product must have a weight; got null");
    require(op.w->n >= 1 && op.w->n < kMaxDim, where, "a weight must have features; got ", op.w->n);
    check_weight(*op.w, op.w->n, op.column < 0 ? x.cols : op.w->k, "weight", where);
    require(op.column < 0 || (op.w->k >= 1 && op.w->k <= x.cols - op.column), where, "columns [",
            op.column, ", ", op.column + op.w->k, ") must be among the ", x.cols, " of x");
    check_vector(op.bias, op.w->n, "bias", where);
    require(x.rows == 0 || op.out != nullptr, where, "out must not be null");
    require(op.out_stride >= op.w->n && op.out_stride <= kMaxElements / max64(1, x.rows), where,
            "out must have a stride of at least ", op.w->n, "; got ", op.out_stride);
  }
}

MatrixView input_of(const LinearOp& op, const MatrixView& x) {
  if (op.column < 0) return x;
  const char* data = static_cast<const char*>(x.data) + op.column * int64_t(code_bits(x.code)) / 8;
  return {data, x.code, x.rows, op.w->k, x.stride};
}

bool is_operand(const PackJob& j, const DotKernel& k, const MatrixView& src) {
  return same_operand(*j.kernel, k) && j.args.src.data == src.data && j.args.src.cols == src.cols;
}

// Packs what the products read once for each activation layout that the kernels want.
void pack_operands(Workspace::Impl& ws, std::span<const LinearOp> ops, const MatrixView& x,
                   Executor& executor) {
  std::vector<PackJob>& jobs = ws.packs;
  jobs.clear();
  size_t bytes = 0;
  const auto add = [&](const DotKernel* k, const MatrixView& src) {
    for (const PackJob& j : jobs) {
      if (is_operand(j, *k, src)) return;
    }
    jobs.push_back({k, {src, nullptr, 0, src.rows, src.rows, nullptr}, bytes});
    bytes += aligned(k->act_bytes(src.rows, src.cols));
  };
  for (size_t i = 0; i < ops.size(); ++i) add(ws.products[i].kernel, input_of(ops[i], x));
  char* base = static_cast<char*>(ws.packed.reserve(bytes));
  for (PackJob& j : jobs) j.args.dst = base + j.offset;
  run_packs(jobs, ws.tasks.tasks, executor);
}

const void* operand(const Workspace::Impl& ws, const DotKernel& k, const MatrixView& src) {
  for (const PackJob& j : ws.packs) {
    if (is_operand(j, k, src)) return j.args.dst;
  }
  return nullptr;
}

}  // namespace

void linear(std::span<const LinearOp> ops, MatrixView x, std::optional<ActClass> act_class,
            IsaSet isa, Workspace& workspace, Executor& executor) {
  check(ops, x);
  if (x.rows == 0 || ops.empty()) return;
  Workspace::Impl& ws = *workspace.impl;
  ws.products.clear();
  for (const LinearOp& op : ops) {
    const DotKernel* k = ws.kernels.dot(request(*op.w, act_class, x.rows, isa), isa, "linear");
    ws.products.push_back(
        {k, op.w->n, op.w->k, x.rows, 1, weight_bytes(*op.w) / op.w->n, k->n_block, {0, 0}});
  }
  pack_operands(ws, ops, x, executor);
  make_tasks(ws.tasks, ws.products, executor.at_once());
  const Arena arena = make_arena(ws.workers, ws.products, false, executor.threads());
  ws.tasks.run(executor, [&](int64_t i, int worker) {
    const Task& t = ws.tasks.tasks[size_t(i)];
    const LinearOp& op = ops[size_t(t.item)];
    const DotKernel& k = *ws.products[size_t(t.item)].kernel;
    const TileShape shape = tile_shape(k, t.n1 - t.n0, t.m1 - t.m0);
    const Task* after = ws.tasks.next(i);
    const void* next =
        after == nullptr ? nullptr : feature_at(*ops[size_t(after->item)].w, after->n0);
    const void* packed = operand(ws, k, input_of(op, x));
    k.run({op.w, t.n0, t.n1, packed, x.rows, t.m0, t.m1, arena.tile(worker), shape.stride,
           arena.kernel_scratch(worker), next});
    k.store_out({arena.tile(worker), shape.stride, t.n0, t.n1, t.m0, t.m1,
                 vector_values(op.bias, t.n0, 1, t.n1 - t.n0, arena.bias_values(worker)), nullptr,
                 nullptr, op.out, op.out_stride, false});
  });
}

}  // namespace cpumoe

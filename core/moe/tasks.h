// How an operator is cut into tasks: slices of features, sized by the bytes of weights they read,
// times slices of tokens. Pure functions of shapes, kernels and the number of workers.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/dot/dot.h"
#include "machine/executor.h"

namespace cpumoe {

struct SliceSize {
  int64_t features, tokens;
};

// One product (or the pair gate and up) of one expert with its tokens.
struct Product {
  const DotKernel* kernel;
  int64_t features;  // of one matrix; interleaved: pairs of features
  int64_t inputs;
  int64_t tokens;
  int64_t rows_per_feature;  // matrix rows behind one feature: 2 for gate and up, else 1
  int64_t feature_bytes;     // of weights behind one feature
  int64_t step;              // slices are multiples of it: the kernel's n_block, or more
  SliceSize slice = {0, 0};  // the greatest of its tasks; set by make_tasks
  // Computes up on the same slices, where its format takes another kernel than gate's; else null.
  const DotKernel* up = nullptr;
};

// Feature slice [n0, n1) and token slice [m0, m1) of product `item`.
struct Task {
  int32_t item;
  int32_t n0, n1, m0, m1;
  int32_t next = -1;  // the task that its worker probably takes next, for prefetching; -1: none
};

// The tasks of one phase, for Executor::parallel.
struct TaskList {
  std::vector<Task> tasks;
  // Ends of the lanes; empty: none, tasks are taken in order.
  std::vector<int64_t> lanes;

  const Task* next(int64_t i) const {
    const int32_t n = tasks[size_t(i)].next;
    return n < 0 ? nullptr : &tasks[size_t(n)];
  }
  template <class F>
  void run(Executor& executor, F&& fn) const {
    lanes.empty() ? executor.parallel(int64_t(tasks.size()), fn) : executor.parallel(lanes, fn);
  }
};

// Size of the next slice of a product of which `features_left` remain, in a phase or lane of which
// `cost_left` (feature_bytes x features, more for many tokens) remains. Features: what the kernel
// prefers, else up to 1 MiB of weights; fewer towards its end, but at least a block
// and some 32 KiB. Tokens: as many as keep the tile in L2.
SliceSize slice_size(const Product& p, int64_t features_left, int64_t cost_left, int workers);

// The tasks of the products, in order: of one product the features rise, and the token slices of
// one feature slice follow each other, so that its weights are still in cache. Few tokens: a lane
// for each worker, so that it reads on where its last task has ended.
void make_tasks(TaskList& list, std::vector<Product>& products, int workers);

// Tile of a product's slice: elements between lines, and lines.
struct TileShape {
  int64_t stride, lines;
  int64_t floats() const { return stride * lines; }
};
TileShape tile_shape(const DotKernel& k, int64_t n, int64_t m);
// One that either kernel, of the same order, may fill; b may be null.
TileShape tile_shape(const DotKernel& a, const DotKernel* b, int64_t n, int64_t m);

}  // namespace cpumoe

// What a Workspace keeps between calls, and the steps that moe() and linear() share.
#pragma once
#include <array>
#include <vector>

#include "kernels/act/act.h"
#include "kernels/combine/combine.h"
#include "kernels/dot/dot.h"
#include "moe/moe.h"
#include "moe/tasks.h"

namespace cpumoe {

// Every operand and every worker's buffer starts on a cache line.
inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Remembers select_dot's answers: a request is met again on every call.
class KernelCache {
 public:
  // Throws Error with every candidate and its refusal.
  const DotKernel* dot(const DotRequest& request, IsaSet isa, const char* where);

 private:
  struct Entry {
    DotRequest request;
    uint32_t isa;
    const DotKernel* kernel = nullptr;
  };
  std::array<Entry, 64> entries_{};  // direct-mapped
};

inline DotRequest request(const WeightView& w, std::optional<ActClass> asked, int64_t tokens,
                          IsaSet isa) {
  return {w.format->code, w.layout, class_for(*w.format, w.layout, asked, isa), tokens};
}

// Tokens of one operand to be gathered into a kernel's activation layout.
struct PackJob {
  const DotKernel* kernel;
  PackArgs args;  // m0, m1: all tokens
  size_t offset;  // of args.dst in Impl::packed
};
// Kernels with the same pack function read the same operand.
inline bool same_operand(const DotKernel& a, const DotKernel& b) {
  return a.pack == b.pack && a.act_bytes == b.act_bytes;
}

// One expert with its tokens.
struct Unit {
  const ExpertsView* experts;
  int64_t e;
  const DotKernel* first;   // gate; also up, when interleaved
  const DotKernel* up;      // null without an up of its own
  const DotKernel* second;  // down
  int64_t tokens;
  const int32_t* token;  // of each pair
  const float* weight;   // of each pair
  int64_t first_pair;    // row of its first pair among the partial rows
  const void* x;         // packed for `first`
  const void* up_x;      // packed for `up`
  void* mid;             // packed for `second`
};

// Buffers of one worker, inside one allocation.
struct Arena {
  char* base = nullptr;
  // Bytes; offsets in a worker's part.
  size_t per_worker = 0, tile2 = 0, bias = 0, bias2 = 0, scratch = 0;
  float* tile(int worker) const { return at<float>(worker, 0); }
  float* second_tile(int worker) const { return at<float>(worker, tile2); }
  float* bias_values(int worker) const { return at<float>(worker, bias); }
  float* second_bias_values(int worker) const { return at<float>(worker, bias2); }
  void* kernel_scratch(int worker) const { return at<void>(worker, scratch); }

 private:
  template <class T>
  T* at(int worker, size_t offset) const {
    return reinterpret_cast<T*>(base + size_t(worker) * per_worker + offset);
  }
};

struct Workspace::Impl {
  KernelCache kernels;
  std::vector<Unit> units;
  std::vector<PackJob> packs;
  std::vector<Product> products;
  TaskList tasks;
  std::vector<size_t> mid_offsets, jobs, up_jobs;  // of each unit; jobs: indices of packs
  std::vector<int32_t> row_offsets, rows;        // partial rows of each token (CSR)
  AlignedBuffer packed, mid, sums, workers;
};

// What the tasks of products[0..count) need at once; one Arena for all workers. Two tiles and two
// biases when `pair`.
Arena make_arena(AlignedBuffer& buffer, const std::vector<Product>& products, bool pair,
                 int workers);

// Runs the jobs, on the calling thread when they are small.
void run_packs(const std::vector<PackJob>& jobs, std::vector<Task>& tasks, Executor& executor);

// Values start, start + step, ... (count of them) of v as fp32: v's own memory when it lies so,
// else `buffer`; null when v is absent.
const float* vector_values(const VectorView& v, int64_t start, int64_t step, int64_t count,
                           float* buffer);

}  // namespace cpumoe

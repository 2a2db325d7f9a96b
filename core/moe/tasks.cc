#include "moe/tasks.h"

#include <numeric>

namespace cpumoe {
namespace {

// Long streams are faster, up to about 1 MiB (`moe_moe_bench tokens=1` with other values here).
constexpr int64_t kMostBytes = 1 << 20;
// 2 us of one core: what starting a task may cost.
constexpr int64_t kLeastBytes = 32 << 10;
// A slice is at most this part of what is left for each worker, so the last ones are small and
// nobody waits for long at the end of a phase.
constexpr int64_t kShares = 4;
// Few tokens, columns: a core reads whole lines of memory, one after the other, much faster than
// parts of them, so that slices are as large as a lane allows, and not too narrow in the end
// (`moe_moe_bench layout=columns interleaved=1 hidden=2880 inter=2880 experts=32 top_k=4`).
constexpr int64_t kWideShares = 1;
constexpr int64_t kFinest = 32;  // part of the slice that the kernel prefers
// Up to about here a product costs what reading its weights costs.
constexpr int64_t kFreeTokens = 8;
// fp32 tile, beside a block of decoded weights and one of activations, in 512 KiB or more of L2.
constexpr int64_t kTileBytes = 256 << 10;
constexpr int64_t kMostTokens = 288;

// `total` in slices of equal size, multiples of `block`, at most `most` rounded up to one.
int64_t even(int64_t total, int64_t most, int64_t block) {
  const int64_t slices = max64(1, ceil_div(total, round_up(max64(most, 1), block)));
  return max64(block, round_up(ceil_div(total, slices), block));
}

// Cost of one feature, in bytes read or as much time.
int64_t feature_cost(const Product& p) {
  return max64(1, p.feature_bytes * max64(1, p.tokens / kFreeTokens));
}

}  // namespace

SliceSize slice_size(const Product& p, int64_t features_left, int64_t cost_left, int workers) {
  const DotKernel& k = *p.kernel;
  const int64_t cost = feature_cost(p);
  const bool wide = k.layout == Layout::columns && p.tokens < kFreeTokens;
  const int64_t shares = (wide ? kWideShares : kShares) * workers;
  const int64_t share = max64(kLeastBytes, cost_left / shares) / cost;
  const int64_t most = k.n_slice > 0 ? k.n_slice : kMostBytes / max64(1, p.feature_bytes);
  const int64_t least = k.n_slice / kFinest;
  const int64_t features = even(features_left, min64(max64(share, least), most), p.step);
  // Three blocks of tokens at least: kernels keep two or three of them in registers.
  const int64_t step = 3 * (p.up == nullptr ? k.m_block : std::lcm(k.m_block, p.up->m_block));
  if (p.tokens <= step) return {features, step};
  const int64_t tokens = min64(kMostTokens, kTileBytes / (4 * features * p.rows_per_feature));
  return {features, even(p.tokens, max64(step, tokens / step * step), step)};
}

void make_tasks(TaskList& list, std::vector<Product>& products, int workers) {
  std::vector<Task>& tasks = list.tasks;
  tasks.clear();
  list.lanes.clear();
  int64_t total = 0;
  bool few = true;
  for (const Product& p : products) {
    total += feature_cost(p) * p.features;
    few = few && p.tokens < kFreeTokens;
  }
  const int64_t lanes = few ? workers : 1;
  int64_t lane = 0, done = 0, lane_end = total / lanes;
  for (size_t i = 0; i < products.size(); ++i) {
    Product& p = products[i];
    const int64_t cost = feature_cost(p);
    for (int64_t n = 0; n < p.features;) {
      const int64_t left = lane_end - done;
      const int64_t in_lane = round_up(max64(1, ceil_div(left, cost)), p.step);
      const SliceSize s =
          slice_size(p, min64(p.features - n, in_lane), left, few ? 1 : workers);
      p.slice = {max64(p.slice.features, s.features), max64(p.slice.tokens, s.tokens)};
      const int64_t end = min64(n + s.features, p.features);
      for (int64_t m = 0; m < p.tokens; m += s.tokens) {
        tasks.push_back({int32_t(i), int32_t(n), int32_t(end), int32_t(m),
                         int32_t(min64(m + s.tokens, p.tokens))});
      }
      done += cost * (end - n);
      n = end;
      while (done >= lane_end && lane + 1 < lanes) {
        list.lanes.push_back(int64_t(tasks.size()));
        lane_end = ++lane + 1 < lanes ? total / lanes * (lane + 1) : total;
      }
    }
  }
  const int64_t count = int64_t(tasks.size()), step = few ? 1 : workers;
  for (int64_t i = 0; i + step < count; ++i) tasks[size_t(i)].next = int32_t(i + step);
  if (lanes == 1) return;
  list.lanes.resize(size_t(lanes), count);
  for (int64_t end : list.lanes) {
    if (end > 0) tasks[size_t(end) - 1].next = -1;
  }
}

TileShape tile_shape(const DotKernel& k, int64_t n, int64_t m) {
  const int64_t features = round_up(n, k.n_block), tokens = round_up(m, k.m_block);
  if (k.order == TileOrder::n_major) return {round_up(tokens, 16), features};
  return {round_up(features, 16), tokens};
}

TileShape tile_shape(const DotKernel& a, const DotKernel* b, int64_t n, int64_t m) {
  const TileShape s = tile_shape(a, n, m);
  if (b == nullptr) return s;
  const TileShape t = tile_shape(*b, n, m);
  return {max64(s.stride, t.stride), max64(s.lines, t.lines)};
}

}  // namespace cpumoe

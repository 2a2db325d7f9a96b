#include "moe/tasks.h"

namespace cpumoe {
namespace {

// A task of 256 KiB takes some 15 us of one core's share of the bus: long enough that its start (a
// cold stream) is under 3 %, short enough that the last one keeps nobody waiting for long.
constexpr int64_t kSliceBytes = 256 << 10;
constexpr int64_t kMinSliceBytes = 32 << 10;
constexpr int64_t kTasksPerWorker = 16;  // the last task of a phase is then about 3 % of it
// fp32 tile, beside a block of decoded weights and one of activations, in 512 KiB or more of L2.
constexpr int64_t kTileBytes = 256 << 10;
constexpr int64_t kMostTokens = 288;

int64_t even(int64_t total, int64_t most, int64_t block) {
  const int64_t slices = max64(1, ceil_div(total, max64(most, block)));
  return max64(block, round_up(ceil_div(total, slices), block));
}

}  // namespace

SliceSize slice_size(const Product& p, int64_t wanted) {
  const DotKernel& k = *p.kernel;
  int64_t features = k.n_slice;
  if (features == 0) features = kSliceBytes / max64(1, p.feature_bytes);
  const int64_t least =
      ceil_div(kMinSliceBytes, max64(1, p.feature_bytes * max64(1, p.tokens / 8)));
  features = min64(features, max64(least, p.features / max64(1, wanted)));
  features = even(p.features, round_up(max64(1, features), k.n_block), k.n_block);
  // Three blocks of tokens at least: kernels keep two or three of them in registers.
  const int64_t step = 3 * k.m_block;
  int64_t tokens = min64(kMostTokens, kTileBytes / (4 * features * p.rows_per_feature));
  tokens = even(p.tokens, max64(step, tokens / step * step), step);
  return {features, tokens};
}

void make_tasks(std::vector<Task>& tasks, std::vector<Product>& products, int workers) {
  const auto work = [](const Product& p) {
    return double(p.feature_bytes) * double(p.features) * double(p.tokens);
  };
  double total = 0;
  for (const Product& p : products) total += work(p);
  const double unit = total / double(kTasksPerWorker * workers);
  for (size_t i = 0; i < products.size(); ++i) {
    Product& p = products[i];
    p.slice = slice_size(p, unit > 0 ? int64_t(work(p) / unit) : 1);
    for (int64_t n = 0; n < p.features; n += p.slice.features) {
      for (int64_t m = 0; m < p.tokens; m += p.slice.tokens) {
        tasks.push_back({int32_t(i), int32_t(n), int32_t(min64(n + p.slice.features, p.features)),
                         int32_t(m), int32_t(min64(m + p.slice.tokens, p.tokens))});
      }
    }
  }
}

TileShape tile_shape(const DotKernel& k, int64_t n, int64_t m) {
  const int64_t features = round_up(n, k.n_block), tokens = round_up(m, k.m_block);
  if (k.order == TileOrder::n_major) return {round_up(tokens, 16), features};
  return {round_up(features, 16), tokens};
}

}  // namespace cpumoe

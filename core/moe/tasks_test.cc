#include "moe/tasks.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

Product product(const DotKernel& k, int64_t features, int64_t inputs, int64_t tokens) {
  return {&k,   features, inputs, tokens, 2, 2 * line_bytes(k.code, inputs),
          k.n_block, {0, 0}};
}

// Every feature of every token exactly once, on the blocks that the kernels ask for, within the
// slice that the arena is made for.
TEST(tasks_cover_each_product_once) {
  int count = 0;
  const DotKernel* kernels = dot_kernels(&count);
  for (int i = 0; i < count; ++i) {
    const DotKernel& k = kernels[i];
    for (int workers : {1, 2, 8, 64}) {
      std::vector<Product> products;
      for (auto [n, tokens] :
           {std::pair{1, 1}, {7, 3}, {48, 40}, {768, 1}, {2880, 700}, {100, 9}}) {
        products.push_back(product(k, n, 512, tokens));
      }
      TaskList list;
      make_tasks(list, products, workers);
      const std::vector<Task>& tasks = list.tasks;
      for (size_t p = 0; p < products.size(); ++p) {
        const int64_t n = products[p].features, m = products[p].tokens;
        std::vector<int> covered(size_t(n * m), 0);
        for (const Task& t : tasks) {
          if (size_t(t.item) != p) continue;
          CHECK(0 <= t.n0 && t.n0 < t.n1 && t.n1 <= n && 0 <= t.m0 && t.m0 < t.m1 && t.m1 <= m);
          CHECK(t.n0 % k.n_block == 0 && (t.n1 % k.n_block == 0 || t.n1 == n));
          CHECK(t.m0 % k.m_block == 0 && (t.m1 % k.m_block == 0 || t.m1 == m));
          CHECK(t.n1 - t.n0 <= products[p].slice.features);
          CHECK(t.m1 - t.m0 <= products[p].slice.tokens);
          for (int64_t f = t.n0; f < t.n1; ++f) {
            for (int64_t s = t.m0; s < t.m1; ++s) ++covered[size_t(f * m + s)];
          }
        }
        CHECK_MSG(std::all_of(covered.begin(), covered.end(), [](int c) { return c == 1; }),
                  k.name << " product " << p << " workers " << workers);
      }
      // items rise, and of one item the features rise
      CHECK(std::is_sorted(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
        return a.item != b.item ? a.item < b.item : a.n0 < b.n0;
      }));
    }
  }
}

// Decode of a real shape: no worker is left without several tasks, no task is absurdly small or
// large, and the end of the phase is cut finer than its beginning.
TEST(slices_have_a_sensible_size) {
  const DotKernel* k = select_dot({Code::bf16, Layout::rows, ActClass::fp32, 1}, IsaSet{1});
  for (int workers : {1, 2, 16, 64}) {
    std::vector<Product> products(8, product(*k, 768, 2048, 1));
    TaskList list;
    make_tasks(list, products, workers);
    const std::vector<Task>& tasks = list.tasks;
    CHECK_GE(int64_t(tasks.size()), int64_t(4 * workers));
    int64_t least = INT64_MAX, most = 0;
    for (const Task& t : tasks) {
      const int64_t bytes = (t.n1 - t.n0) * products[0].feature_bytes;
      least = std::min(least, bytes);
      most = std::max(most, bytes);
    }
    CHECK_LE(most, (1 << 20) + k->n_block * products[0].feature_bytes);
    CHECK_GE(least, 16 << 10);
    const Task &first = tasks.front(), &last = tasks.back();
    if (workers > 1) CHECK_LT(last.n1 - last.n0, first.n1 - first.n0);
  }
}

// Few tokens: a lane for each worker, of about equal bytes, in which the next task goes on where
// the last one has ended. Many tokens: no lanes.
TEST(lanes_are_equal_streams) {
  const DotKernel* k = select_dot({Code::bf16, Layout::rows, ActClass::fp32, 1}, IsaSet{1});
  for (int workers : {2, 3, 16, 64}) {
    std::vector<Product> products(8, product(*k, 768, 2048, 1));
    TaskList list;
    make_tasks(list, products, workers);
    CHECK_EQ(list.lanes.size(), size_t(workers));
    CHECK_EQ(list.lanes.back(), int64_t(list.tasks.size()));
    const int64_t all = 8 * 768 * products[0].feature_bytes;
    int64_t i = 0;
    for (int64_t end : list.lanes) {
      int64_t bytes = 0;
      for (; i < end; ++i) {
        const Task &t = list.tasks[size_t(i)], *next = list.next(i);
        bytes += (t.n1 - t.n0) * products[0].feature_bytes;
        CHECK_EQ(next == nullptr, i + 1 == end);
        if (next == nullptr) continue;
        CHECK(next == &t + 1 && (next->item == t.item ? next->n0 == t.n1 : next->n0 == 0));
      }
      CHECK_LE(std::abs(bytes - all / workers), 2 * k->n_block * products[0].feature_bytes);
    }
    CHECK_EQ(i, int64_t(list.tasks.size()));

    products.push_back(product(*k, 768, 2048, 100));
    make_tasks(list, products, workers);
    CHECK(list.lanes.empty());
    CHECK(list.next(0) == &list.tasks[size_t(workers)]);
  }
  std::vector<Product> one(1, product(*k, 1, 2048, 1));  // less than there are workers
  TaskList list;
  make_tasks(list, one, 4);
  CHECK_EQ(list.tasks.size(), size_t(1));
  CHECK_EQ(list.lanes.size(), size_t(4));
  CHECK_EQ(list.lanes.back(), int64_t(1));
}

TEST(tiles_have_room_for_whole_blocks) {
  int count = 0;
  const DotKernel* kernels = dot_kernels(&count);
  for (int i = 0; i < count; ++i) {
    const DotKernel& k = kernels[i];
    for (int64_t n : {1, 16, 17}) {
      for (int64_t m : {1, 8, 9}) {
        const TileShape s = tile_shape(k, n, m);
        const bool n_major = k.order == TileOrder::n_major;
        CHECK_EQ(s.stride % 16, 0);
        CHECK_GE(s.stride, n_major ? round_up(m, k.m_block) : round_up(n, k.n_block));
        CHECK_GE(s.lines, n_major ? round_up(n, k.n_block) : round_up(m, k.m_block));
      }
    }
  }
}

}  // namespace
}  // namespace cpumoe

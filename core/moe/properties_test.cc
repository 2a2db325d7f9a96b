// What must hold between calls of the operator: order, threads, splits, repeats, untouched experts.
#include <sys/mman.h>

#include "moe/testing/batch.h"

namespace cpumoe {
namespace {

using testing::Batch;
using testing::Bounded;
using testing::check_within;
using testing::executor;
using testing::kCodes;
using testing::Layer;
using testing::LayerShape;
using testing::machine;
using testing::Rng;
using testing::run;

TEST(permuted_tokens_permute_the_output) {
  LayerShape s;
  s.format = "bf16";
  const Layer layer(s, 1);
  for (int64_t tokens : {3, 17, 64}) {
    const Batch b(tokens, s.hidden, 3, s.experts, Code::f32, 5);
    Batch p = b;
    std::vector<int64_t> order(static_cast<size_t>(tokens));
    std::iota(order.begin(), order.end(), 0);
    Rng rng(8);
    for (int64_t i = tokens - 1; i > 0; --i) {
      std::swap(order[size_t(i)], order[size_t(rng.below(i + 1))]);
    }
    const int64_t row = s.hidden * 4;
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t from = order[size_t(i)];
      std::copy_n(b.x.begin() + from * row, row, p.x.begin() + i * row);
      std::copy_n(b.ids.begin() + from * 3, 3, p.ids.begin() + i * 3);
      std::copy_n(b.weights.begin() + from * 3, 3, p.weights.begin() + i * 3);
    }
    const std::vector<char> want = run(layer, b), got = run(layer, p);
    for (int64_t i = 0; i < tokens; ++i) {
      CHECK(std::equal(got.begin() + i * row, got.begin() + (i + 1) * row,
                       want.begin() + order[size_t(i)] * row));
    }
  }
}

TEST(the_number_of_threads_changes_no_bit) {
  for (Layout layout : {Layout::rows, Layout::columns}) {
    LayerShape s;
    s.hidden = 160;
    s.inter = 200;
    s.format = "bf16";
    s.layout = layout;
    const Layer layer(s, 2);
    for (int64_t tokens : {1, 5, 64, 200}) {
      const Batch b(tokens, s.hidden, 3, s.experts, Code::bf16, 6);
      Executor one(machine(), {1, false, -1});
      const std::vector<char> want = run(layer, b, Code::f32, one);
      for (int threads : {2, 3, 8}) {
        Executor several(machine(), {threads, false, -1});
        for (int repeat = 0; repeat < 3; ++repeat) {
          CHECK_MSG(run(layer, b, Code::f32, several) == want,
                    threads << " threads, " << tokens << " tokens");
        }
      }
    }
  }
}

TEST(a_split_batch_stays_within_the_bound) {
  LayerShape s;
  s.format = "fp16";
  const Layer layer(s, 3);
  const ExpertsView view = layer.view();
  const Batch b(40, s.hidden, 3, s.experts, Code::f32, 9);
  const RoutingPlan plan = b.plan(s.experts);
  const MoeBlock block{&view, &plan};
  const std::vector<Bounded> want = testing::reference({&block, 1}, b.view(), Code::f32);
  for (int64_t cut : {1, 7, 39}) {
    std::vector<char> joined;
    for (auto [from, to] : {std::pair{int64_t(0), cut}, {cut, int64_t(40)}}) {
      Batch part(to - from, s.hidden, 3, s.experts, Code::f32, 0);
      part.x.assign(b.x.begin() + from * s.hidden * 4, b.x.begin() + to * s.hidden * 4);
      part.ids.assign(b.ids.begin() + from * 3, b.ids.begin() + to * 3);
      part.weights.assign(b.weights.begin() + from * 3, b.weights.begin() + to * 3);
      const std::vector<char> out = run(layer, part);
      joined.insert(joined.end(), out.begin(), out.end());
    }
    check_within(joined, Code::f32, want, concat("cut at ", cut));
  }
}

TEST(duplicated_ids_add_up) {
  LayerShape s;
  const Layer layer(s, 4);
  const ExpertsView view = layer.view();
  for (int64_t tokens : {1, 4, 33}) {
    Batch b(tokens, s.hidden, 4, s.experts, Code::f32, 10);
    for (size_t i = 0; i < b.ids.size(); ++i) b.ids[i] = i % 4 == 3 ? 1 : 2;  // 2 2 2 1
    const RoutingPlan plan = b.plan(s.experts);
    CHECK_EQ(plan.offsets[3] - plan.offsets[2], 3 * tokens);
    const MoeBlock block{&view, &plan};
    check_within(run({&block, 1}, b.view(), Code::f32), Code::f32,
                 testing::reference({&block, 1}, b.view(), Code::f32), "duplicates");
  }
}

// As many pairs as tokens, but not one of each: no operand may be taken for the whole batch.
TEST(one_token_twice_is_not_the_batch) {
  LayerShape s;
  const Layer layer(s, 23);
  const ExpertsView view = layer.view();
  Batch b(3, s.hidden, 2, s.experts, Code::f32, 24);
  b.ids = {2, 2, 1, 1, 2, 1};  // expert 2: tokens 0 0 2, expert 1: tokens 1 1 2
  const RoutingPlan plan = b.plan(s.experts);
  const MoeBlock block{&view, &plan};
  check_within(run({&block, 1}, b.view(), Code::f32), Code::f32,
               testing::reference({&block, 1}, b.view(), Code::f32), "not the batch");
}

TEST(skipped_ids_add_nothing) {
  LayerShape s;
  const Layer layer(s, 5);
  const ExpertsView view = layer.view();
  Batch b(9, s.hidden, 2, s.experts, Code::f32, 11);
  for (size_t i = 0; i < b.ids.size(); i += 2) b.ids[i] = int32_t(s.experts);
  b.ids[3] = int32_t(s.experts);  // token 1 has no expert at all
  const RoutingPlan plan = b.plan(s.experts, true);
  const MoeBlock block{&view, &plan};
  const std::vector<char> got = run({&block, 1}, b.view(), Code::f32);
  check_within(got, Code::f32, testing::reference({&block, 1}, b.view(), Code::f32), "skip");
  for (int64_t i = 0; i < s.hidden; ++i) {
    CHECK_EQ(load_as_float(got.data(), Code::f32, s.hidden + i), 0.0f);
  }
  for (int32_t& id : b.ids) id = int32_t(s.experts);  // nobody has any
  const RoutingPlan none = b.plan(s.experts, true);
  const MoeBlock empty{&view, &none};
  for (Code code : kCodes) {
    for (char c : run({&empty, 1}, b.view(), code)) CHECK_EQ(c, 0);
  }
}

TEST(experts_without_tokens_are_not_touched) {
  for (Layout layout : {Layout::rows, Layout::columns}) {
    LayerShape s;
    s.biases = true;
    s.layout = layout;
    Layer layer(s, 6);
    for (size_t i = 0; i < layer.storage.size(); ++i) {
      if (layer.owner[i] == 1 || layer.owner[i] == 4) continue;
      testing::GuardedBuffer& buffer = layer.storage[i];
      const uintptr_t page = uintptr_t(machine().page),
                      start = uintptr_t(buffer.data()) / page * page;
      CHECK_EQ(mprotect(reinterpret_cast<void*>(start),
                        uintptr_t(buffer.data()) + buffer.size() - start, PROT_NONE),
               0);
    }
    for (int64_t tokens : {1, 30}) {
      Batch b(tokens, s.hidden, 2, s.experts, Code::f32, 12);
      for (size_t i = 0; i < b.ids.size(); ++i) b.ids[i] = i % 2 ? 4 : 1;
      run(layer, b);  // a touch is a crash
    }
  }
}

// Blocks (routed and shared experts) in one call, added to what out holds.
}  // namespace
}  // namespace cpumoe

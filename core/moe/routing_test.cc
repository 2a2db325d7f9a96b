#include <string>
#include <vector>

#include "moe/moe.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using Ids = std::vector<int32_t>;

TEST(pairs_are_sorted_by_expert_and_keep_their_order) {
  RoutingPlan p;
  const Ids ids = {2, 0, 2, 3, 0, 2};
  const std::vector<float> w = {1, 2, 3, 4, 5, 6};
  make_plan(p, ids.data(), w.data(), 3, 2, 5, false);
  CHECK_EQ(p.tokens, 3);
  CHECK_EQ(p.top_k, 2);
  CHECK(p.offsets == (Ids{0, 2, 2, 5, 6, 6}));
  CHECK(p.token == (Ids{0, 2, 0, 1, 2, 1}));
  CHECK(p.slot == (Ids{1, 0, 0, 0, 1, 1}));
  CHECK(p.weight == (std::vector<float>{2, 5, 1, 3, 6, 4}));
}

TEST(a_plan_may_be_used_again_and_may_be_empty) {
  RoutingPlan p;
  const Ids many(30, 1);
  const std::vector<float> w(30, 0.5f);
  make_plan(p, many.data(), w.data(), 10, 3, 2, false);
  CHECK_EQ(p.token.size(), 30);
  make_plan(p, many.data(), w.data(), 1, 1, 4, false);
  CHECK(p.offsets == (Ids{0, 0, 1, 1, 1}));
  CHECK_EQ(p.token.size(), 1);
  make_plan(p, nullptr, nullptr, 0, 3, 4, false);
  CHECK(p.offsets == (Ids{0, 0, 0, 0, 0}));
  CHECK_EQ(p.tokens, 0);
}

TEST(the_sentinel_is_skipped_only_when_allowed) {
  RoutingPlan p;
  const Ids ids = {4, 1, 4, 4};
  const std::vector<float> w = {1, 2, 3, 4};
  make_plan(p, ids.data(), w.data(), 2, 2, 4, true);
  CHECK(p.offsets == (Ids{0, 0, 1, 1, 1}));
  CHECK(p.token == (Ids{0}));
  CHECK(p.slot == (Ids{1}));
  CHECK_THROWS(make_plan(p, ids.data(), w.data(), 2, 2, 4, false),
               "must be in 0..3; got 4 for token 0");
  CHECK(p.token.empty());  // nothing half-made is left behind
  CHECK_EQ(p.tokens, 0);
}

TEST(bad_input_is_refused_with_a_reason) {
  RoutingPlan p;
  const std::vector<float> w(4);
  const auto plan = [&](const Ids& ids, int64_t experts, bool skip) {
    make_plan(p, ids.data(), w.data(), int64_t(ids.size()), 1, experts, skip);
  };
  CHECK_THROWS(plan({0, -1}, 4, true), "got -1 for token 1");
  CHECK_THROWS(plan({0, 5}, 4, true), "(or 4 to skip); got 5");
  CHECK_THROWS(plan({0}, 0, false), "experts at least 1");
  CHECK_THROWS(make_plan(p, nullptr, w.data(), 1, 1, 4, false), "must not be null");
  CHECK_THROWS(make_plan(p, nullptr, w.data(), -1, 1, 4, false), "at least 0");
  CHECK_THROWS(make_plan(p, nullptr, w.data(), 1 << 20, 1 << 20, 4, false), "below 2^31");
}

}  // namespace
}  // namespace cpumoe

#include "kernels/topk/topk.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/testing/random.h"
#include "kernels/testing/tolerance.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  int64_t bad;
};

Routed run(const Router& r, const std::vector<float>& logits) {
  const int64_t tokens = int64_t(logits.size()) / r.experts;
  Routed out{std::vector<int32_t>(size_t(tokens * r.top_k), -1),
             std::vector<float>(size_t(tokens * r.top_k), -1.0f), 0};
  CHECK_MSG(check_router(r) == nullptr, check_router(r));
  out.bad = route(r, logits.data(), r.experts, tokens, out.ids.data(), out.weights.data());
  return out;
}

// The formulas of topk.h in float64: values, choosing scores (experts outside the chosen groups at
// -infinity) and, for given ids, weights.
struct Reference {
  std::vector<double> value, choose;
  double group_gap = INFINITY;  // score between the last chosen and the first refused group

  Reference(const Router& r, const float* logits) : value(size_t(r.experts)) {
    double greatest = -INFINITY, total = 0;
    for (int32_t e = 0; e < r.experts; ++e) greatest = std::max(greatest, double(logits[e]));
    for (int32_t e = 0; e < r.experts; ++e) total += std::exp(logits[e] - greatest);
    for (size_t e = 0; e < value.size(); ++e) {
      value[e] = r.kind == RouterKind::sigmoid        ? 1 / (1 + std::exp(-double(logits[e])))
                 : r.kind == RouterKind::topk_softmax ? double(logits[e])
                                                      : std::exp(logits[e] - greatest) / total;
    }
    choose = value;
    for (size_t e = 0; r.correction && e < value.size(); ++e) choose[e] += r.correction[e];
    const size_t size = size_t(r.experts / r.groups);
    std::vector<std::pair<double, size_t>> groups;
    for (size_t g = 0; g < size_t(r.groups); ++g) {
      std::vector<double> s(choose.begin() + long(g * size), choose.begin() + long((g + 1) * size));
      std::sort(s.rbegin(), s.rend());
      groups.push_back({-(r.group_max || size < 2 ? s[0] : s[0] + s[1]), g});
    }
    std::sort(groups.begin(), groups.end());
    for (size_t i = size_t(r.top_groups); i < groups.size(); ++i) {
      group_gap = groups[size_t(r.top_groups)].first - groups[size_t(r.top_groups) - 1].first;
      for (size_t e = 0; e < size; ++e) choose[groups[i].second * size + e] = -INFINITY;
    }
  }

  std::vector<double> weights(const Router& r, const int32_t* ids) const {
    std::vector<double> w;
    double sum = 0;
    for (int32_t i = 0; i < r.top_k; ++i) {
      const double v = value[size_t(ids[i])];
      w.push_back(r.kind == RouterKind::topk_softmax ? std::exp(v - value[size_t(ids[0])]) : v);
      sum += w.back();
    }
    const bool divide = r.renormalize || r.kind == RouterKind::topk_softmax;
    const double eps = r.kind == RouterKind::topk_softmax ? 0 : double(r.norm_eps);
    for (double& v : w) v = (divide ? v / (sum + eps) : v) * double(r.scale);
    return w;
  }
};

// Roundings met by a weight: the subtraction of the greatest logit (its absolute error is the
// relative one of exp), exp or sigmoid (4), a sum over experts, and divisions and scale (5).
double relative_bound(const Router& r, double spread) {
  return testing::gamma(int64_t(spread) + 10 + r.experts);
}

void check_against_reference(const Router& r, const std::vector<float>& logits) {
  const Routed got = run(r, logits);
  CHECK_EQ(got.bad, -1);
  const int64_t tokens = int64_t(logits.size()) / r.experts, k = r.top_k;
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = &logits[size_t(t * r.experts)];
    const auto [low, high] = std::minmax_element(row, row + r.experts);
    const double bound = relative_bound(r, double(*high) - double(*low));
    const Reference ref(r, row);
    if (ref.group_gap < 8 * testing::kRoundoff) continue;  // fp32 may prefer another group
    const int32_t* ids = &got.ids[size_t(t * k)];
    std::vector<double> chosen;
    std::vector<double> rest = ref.choose;
    for (int64_t i = 0; i < k; ++i) {
      CHECK(ids[i] >= 0 && ids[i] < r.experts);
      double& score = rest[size_t(ids[i])];
      CHECK_MSG(score != -INFINITY, "expert " << ids[i] << " chosen twice or outside the groups");
      chosen.push_back(score);
      score = -INFINITY;
    }
    const double best_left = *std::max_element(rest.begin(), rest.end());
    chosen.push_back(best_left);
    for (size_t i = 1; i < chosen.size(); ++i) {  // falling, but for the rounding of the scores
      CHECK_MSG(chosen[i - 1] >= chosen[i] - bound * (1 + std::fabs(chosen[i])),
                "token " << t << " place " << i << ": " << chosen[i - 1] << " < " << chosen[i]);
    }
    const std::vector<double> want = ref.weights(r, ids);
    for (int64_t i = 0; i < k; ++i) {
      const double w = got.weights[size_t(t * k + i)];
      CHECK_MSG(std::fabs(w - want[size_t(i)]) <=
                    bound * std::fabs(want[size_t(i)]) + 2 * testing::kTiny * std::fabs(r.scale),
                "token " << t << " place " << i << ": " << w << " not " << want[size_t(i)]);
    }
  }
}

std::vector<float> random_logits(int64_t n, float scale, uint64_t seed) {
  testing::Rng rng(seed);
  std::vector<float> out(static_cast<size_t>(n));
  testing::fill_random(out.data(), Code::f32, n, scale, rng);
  return out;
}

TEST(every_router_follows_its_formula) {
  for (RouterKind kind :
       {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    for (auto [experts, k] :
         {std::pair{1, 1}, {2, 1}, {8, 2}, {32, 4}, {128, 8}, {60, 60}, {256, 8}}) {
      for (int mode = 0; mode < 8; ++mode) {
        for (float spread : {0.01f, 3.0f, 60.0f}) {
          Router r;
          r.kind = kind;
          r.experts = experts;
          r.top_k = k;
          r.renormalize = mode & 1;
          r.norm_eps = mode & 2 ? 1e-20f : 0.0f;
          r.scale = mode & 4 ? 2.5f : 1.0f;
          check_against_reference(r, random_logits(40 * experts, spread, uint64_t(mode + experts)));
        }
      }
    }
  }
}

TEST(groups_and_correction) {
  std::vector<float> correction = random_logits(256, 0.5f, 77);
  for (RouterKind kind :
       {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    for (int mode = 0; mode < 8; ++mode) {
      for (auto [groups, top] : {std::pair{8, 4}, {8, 1}, {4, 3}, {16, 16}, {1, 1}}) {
        Router r;
        r.kind = kind;
        r.experts = 256;
        r.top_k = 8;
        r.groups = groups;
        r.top_groups = top;
        r.group_max = mode & 1;
        r.renormalize = mode & 2;
        r.norm_eps = 1e-20f;
        r.scale = 2.5f;
        r.correction = mode & 4 ? correction.data() : nullptr;
        if (kind == RouterKind::topk_softmax && r.correction) continue;
        check_against_reference(r, random_logits(40 * 256, 4.0f, uint64_t(mode * 10 + groups)));
      }
    }
  }
}

// A group with better scores but all corrections very negative must not be chosen from, and experts
// of a chosen group are chosen even below experts of a refused one or below zero.
TEST(only_chosen_groups_are_chosen_from) {
  const std::vector<float> correction = {-9, -9, -9, -9, 0, 0, -3, -3};
  Router r;
  r.kind = RouterKind::sigmoid;
  r.experts = 8;
  r.top_k = 3;
  r.groups = 2;
  r.top_groups = 1;
  r.correction = correction.data();
  const Routed got = run(r, {5, 5, 5, 5, -1, -2, 3, 2});
  CHECK_EQ(got.ids[0], 4);
  CHECK_EQ(got.ids[1], 5);
  CHECK_EQ(got.ids[2], 6);
  CHECK_LE(std::fabs(got.weights[2] - 1 / (1 + std::exp(-3.0))), 4 * testing::kRoundoff);
}

TEST(ties_go_to_the_lower_id) {
  for (RouterKind kind :
       {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    Router r;
    r.kind = kind;
    r.experts = 8;
    r.top_k = 4;
    Routed got = run(r, {1, 2, 2, 1, 2, 0, 1, 2});
    CHECK(got.ids == (std::vector<int32_t>{1, 2, 4, 7}));
    got = run(r, std::vector<float>(8, 0.25f));
    CHECK(got.ids == (std::vector<int32_t>{0, 1, 2, 3}));
    r.groups = 4;
    r.top_groups = 2;
    got = run(r, std::vector<float>(8, 0.25f));
    CHECK(got.ids == (std::vector<int32_t>{0, 1, 2, 3}));
    got = run(r, {0, 0, 3, 1, 1, 3, 3, 1});  // three equal groups
    CHECK(got.ids == (std::vector<int32_t>{2, 5, 3, 4}));
  }
}

TEST(extreme_logits_stay_finite) {
  for (RouterKind kind :
       {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    Router r;
    r.kind = kind;
    r.experts = 4;
    r.top_k = 2;
    const Routed got = run(r, {3e38f, -3e38f, 0, 3e38f});
    CHECK_EQ(got.bad, -1);
    CHECK_EQ(got.ids[0], 0);
    CHECK_EQ(got.ids[1], 3);
    const float want = kind == RouterKind::sigmoid ? 1.0f : 0.5f;
    CHECK_EQ(got.weights[0], want);
    CHECK_EQ(got.weights[1], want);
  }
}

TEST(weights_whose_sum_underflows_are_equal) {
  Router r;
  r.kind = RouterKind::sigmoid;
  r.experts = 8;
  r.top_k = 4;
  r.renormalize = true;
  r.scale = 2;
  const std::vector<float> logits(8, -1e4f);
  Routed got = run(r, logits);
  CHECK_EQ(got.bad, -1);
  for (float w : got.weights) CHECK_EQ(w, 0.5f);
  r.norm_eps = 1e-20f;  // DeepSeek-V3: 0 / norm_eps
  for (float w : run(r, logits).weights) CHECK_EQ(w, 0.0f);
  r.norm_eps = 0;
  r.kind = RouterKind::softmax_topk;  // the chosen group's values underflow beside the other's
  r.groups = 2;
  const std::vector<float> correction = {0, 0, 0, 0, 9, 9, 9, 9};
  r.correction = correction.data();
  r.top_groups = 1;
  got = run(r, {0, 0, 0, 0, -1e4f, -1e4f, -1e4f, -1e4f});
  CHECK(got.ids == (std::vector<int32_t>{4, 5, 6, 7}));
  for (float w : got.weights) CHECK_EQ(w, 0.5f);
}

TEST(nan_and_infinity_are_reported) {
  for (RouterKind kind :
       {RouterKind::softmax_topk, RouterKind::topk_softmax, RouterKind::sigmoid}) {
    Router r;
    r.kind = kind;
    r.experts = 5;
    r.top_k = 2;
    for (float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
          -std::numeric_limits<float>::infinity()}) {
      for (size_t at : {size_t(10), size_t(12), size_t(14)}) {
        std::vector<float> logits = random_logits(25, 2.0f, 5);
        logits[at] = bad;
        logits[20] = bad;
        CHECK_EQ(run(r, logits).bad, 2);
      }
    }
    CHECK_EQ(run(r, {}).bad, -1);
  }
}

TEST(check_router_names_what_is_wrong) {
  Router good;
  good.kind = RouterKind::sigmoid;
  good.experts = 16;
  good.top_k = 4;
  good.groups = 4;
  good.top_groups = 2;
  CHECK(check_router(good) == nullptr);
  const std::vector<float> zeros(16), bad = {NAN, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  const auto says = [&](auto change, const char* part) {
    Router r = good;
    change(r);
    const char* text = check_router(r);
    CHECK_MSG(text != nullptr && std::string(text).find(part) != std::string::npos,
              "want " << part << ", got " << (text ? text : "null"));
  };
  says([](Router& r) { r.experts = 0; }, "experts must be");
  says([](Router& r) { r.experts = kMaxRouterExperts + 1; }, "experts must be");
  says([](Router& r) { r.top_k = 0; }, "top_k");
  says([](Router& r) { r.top_k = 17; }, "top_k");
  says([](Router& r) { r.groups = 0; }, "groups must divide");
  says([](Router& r) { r.groups = 3; }, "groups must divide");
  says([](Router& r) { r.top_groups = 0; }, "top_groups");
  says([](Router& r) { r.top_groups = 5; }, "top_groups");
  says([](Router& r) { r.groups = 16; }, "at least two");
  says([](Router& r) { r.top_groups = 1, r.top_k = 5; }, "chosen groups");
  says([](Router& r) { r.scale = INFINITY; }, "scale");
  says([](Router& r) { r.norm_eps = -1; }, "norm_eps");
  says([&](Router& r) { r.correction = bad.data(); }, "correction must be finite");
  says([&](Router& r) { r.correction = zeros.data(), r.kind = RouterKind::topk_softmax; },
       "no correction");
}

// The stride is honoured and nothing outside top_k places per token is written.
TEST(stride_and_canaries) {
  Router r;
  r.experts = 6;
  r.top_k = 2;
  const std::vector<float> logits = random_logits(5 * 11, 2.0f, 9);
  std::vector<int32_t> ids(12, -5);
  std::vector<float> weights(12, -5);
  CHECK_EQ(route(r, logits.data(), 11, 5, ids.data(), weights.data()), -1);
  for (int64_t t = 0; t < 5; ++t) {
    const std::vector<float> row(logits.begin() + t * 11, logits.begin() + t * 11 + 6);
    const Routed one = run(r, row);
    CHECK(std::equal(one.ids.begin(), one.ids.end(), ids.begin() + t * 2));
    CHECK(std::equal(one.weights.begin(), one.weights.end(), weights.begin() + t * 2));
  }
  CHECK(ids[10] == -5 && ids[11] == -5 && weights[10] == -5 && weights[11] == -5);
}

}  // namespace
}  // namespace cpumoe

#include "base/error.h"
#include "moe/checks.h"
#include "moe/moe.h"

namespace cpumoe {

void make_plan(RoutingPlan& plan, const int32_t* ids, const float* weights, int64_t tokens,
               int64_t top_k, int64_t experts, bool allow_skip) {
  const char* where = "make_plan";
  require(tokens >= 0 && tokens < kMaxDim && top_k >= 0 && experts >= 1 && experts < kMaxDim, where,
          "tokens and top_k must be at least 0 and experts at least 1; got ", tokens, ", ", top_k,
          " and ", experts);
  require(top_k == 0 || tokens < kMaxDim / top_k, where, "tokens x top_k must be below 2^31; got ",
          tokens, " x ", top_k);
  const int64_t given = tokens * top_k;
  require(given == 0 || (ids != nullptr && weights != nullptr), where,
          "ids and weights must not be null");

  plan.tokens = plan.top_k = 0;  // an exception below leaves an empty plan
  plan.experts = experts;
  plan.token.clear();
  plan.slot.clear();
  plan.weight.clear();
  plan.offsets.assign(size_t(experts) + 1, 0);
  int32_t* const count = plan.offsets.data() + 1;
  int64_t pairs = 0;
  for (int64_t i = 0; i < given; ++i) {
    const int32_t e = ids[i];
    if (e == experts && allow_skip) continue;
    if (e < 0 || e >= experts) {
      plan.offsets.assign(size_t(experts) + 1, 0);
      throw Error(concat(where, ": expert ids must be in 0..", experts - 1,
                         allow_skip ? concat(" (or ", experts, " to skip)") : std::string(),
                         "; got ", e, " for token ", i / top_k));
    }
    ++count[e];
    ++pairs;
  }
  for (int64_t e = 0; e < experts; ++e) plan.offsets[size_t(e) + 1] += plan.offsets[size_t(e)];
  plan.token.resize(size_t(pairs));
  plan.slot.resize(size_t(pairs));
  plan.weight.resize(size_t(pairs));
  // offsets[e] runs through the places of e; afterwards it is where e + 1 begins.
  for (int64_t i = 0; i < given; ++i) {
    if (ids[i] == experts) continue;
    const size_t at = size_t(plan.offsets[size_t(ids[i])]++);
    plan.token[at] = int32_t(i / top_k);
    plan.slot[at] = int32_t(i % top_k);
    plan.weight[at] = weights[i];
  }
  for (int64_t e = experts; e > 0; --e) plan.offsets[size_t(e)] = plan.offsets[size_t(e) - 1];
  plan.offsets[0] = 0;
  plan.tokens = tokens;
  plan.top_k = top_k;
}

}  // namespace cpumoe

#include "kernels/topk/topk.h"

#include <cmath>

#include "kernels/vec/math.h"
#include "kernels/vec/portable.h"

namespace cpumoe {
namespace {

using Lanes = portable::Vec;

// out[i] = exp(x[i] - shift) or sigmoid(x[i]), i < n; both arrays have room for whole vectors.
// Returns the sum, four interleaved partial sums first.
template <bool kSigmoid>
float map_values(const float* x, int64_t n, float shift, float* out) {
  Lanes::V sum = Lanes::set1(0);
  int64_t i = 0;
  for (; i < n; i += Lanes::kLanes) {
    Lanes::V v = Lanes::load(x + i);
    if constexpr (kSigmoid) {
      v = mul_sigmoid<Lanes>(Lanes::set1(1), v, Lanes::set1(0));
    } else {
      v = exp<Lanes>(Lanes::sub(v, Lanes::set1(shift)));
    }
    Lanes::store(out + i, v);
    if (i + Lanes::kLanes <= n) sum = Lanes::add(sum, v);
  }
  float total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  for (i = n / Lanes::kLanes * Lanes::kLanes; i < n; ++i) total += out[i];
  return total;
}

// The greatest logit, or NaN when one is not finite.
float greatest_finite(const float* logits, int64_t n) {
  float greatest = logits[0], check = 0;
  for (int64_t i = 0; i < n; ++i) {
    greatest = logits[i] > greatest ? logits[i] : greatest;
    check += logits[i] * 0.0f;  // NaN for NaN and infinities, and stays so
  }
  return check == 0.0f ? greatest : check;
}

// The k best of score[first, last) that are better than what [ids, scores) already holds of `held`
// entries, sorted in; equal scores keep their order of arrival. Returns the new number held, <= k.
int32_t keep_best(const float* score, int32_t first, int32_t last, int32_t k, int32_t held,
                  int32_t* ids, float* scores) {
  for (int32_t e = first; e < last; ++e) {
    const float s = score[e];
    if (held == k && !(s > scores[k - 1])) continue;
    int32_t at = held < k ? held++ : k - 1;
    for (; at > 0 && s > scores[at - 1]; --at) {
      scores[at] = scores[at - 1];
      ids[at] = ids[at - 1];
    }
    scores[at] = s;
    ids[at] = e;
  }
  return held;
}

// score[g] of each group from the choosing scores of its experts.
void score_groups(const Router& r, const float* choose, float* score) {
  const int32_t size = r.experts / r.groups;
  for (int32_t g = 0; g < r.groups; ++g) {
    int32_t ids[2];
    float best[2];
    keep_best(choose, g * size, (g + 1) * size, r.group_max ? 1 : 2, 0, ids, best);
    score[g] = r.group_max ? best[0] : best[0] + best[1];
  }
}

void choose_experts(const Router& r, const float* choose, int32_t* ids, float* scores) {
  if (r.groups == 1 || r.top_groups == r.groups) {
    keep_best(choose, 0, r.experts, r.top_k, 0, ids, scores);
    return;
  }
  float group_score[kMaxRouterExperts], best[kMaxRouterExperts];
  int32_t group[kMaxRouterExperts];
  score_groups(r, choose, group_score);
  keep_best(group_score, 0, r.groups, r.top_groups, 0, group, best);
  bool chosen[kMaxRouterExperts];
  for (int32_t g = 0; g < r.groups; ++g) chosen[g] = false;
  for (int32_t i = 0; i < r.top_groups; ++i) chosen[group[i]] = true;
  const int32_t size = r.experts / r.groups;
  int32_t held = 0;
  for (int32_t g = 0; g < r.groups; ++g) {  // rising ids, so that ties go to the lower one
    if (chosen[g]) held = keep_best(choose, g * size, (g + 1) * size, r.top_k, held, ids, scores);
  }
}

void route_token(const Router& r, const float* row, float greatest, int32_t* ids, float* weights) {
  alignas(16) float logits[kMaxRouterExperts], value[kMaxRouterExperts], choose[kMaxRouterExperts];
  const int64_t padded = round_up(r.experts, Lanes::kLanes);
  for (int64_t e = 0; e < r.experts; ++e) logits[e] = row[e];
  for (int64_t e = r.experts; e < padded; ++e) logits[e] = 0;
  const bool by_logit = r.kind == RouterKind::topk_softmax ||
                        (r.kind == RouterKind::softmax_topk && r.correction == nullptr &&
                         (r.groups == 1 || r.top_groups == r.groups || r.group_max));
  // Softmax over the chosen alone is the same as dividing by their sum: no pass over all experts.
  const bool chosen_only =
      r.kind == RouterKind::topk_softmax || (by_logit && r.renormalize && r.norm_eps == 0);
  if (r.kind == RouterKind::sigmoid) {
    map_values<true>(logits, r.experts, 0, value);
  } else if (!chosen_only) {
    const float total = map_values<false>(logits, r.experts, greatest, value);
    for (int64_t e = 0; e < r.experts; ++e) value[e] /= total;
  }
  const float* scores = by_logit ? logits : value;
  if (r.correction != nullptr) {
    for (int64_t e = 0; e < r.experts; ++e) choose[e] = value[e] + r.correction[e];
    scores = choose;
  }
  choose_experts(r, scores, ids, weights);

  float sum = 0;
  if (chosen_only) {
    for (int32_t i = 0; i < r.top_k; ++i) choose[i] = logits[ids[i]];
    for (int64_t i = r.top_k; i < round_up(r.top_k, Lanes::kLanes); ++i) choose[i] = 0;
    sum = map_values<false>(choose, r.top_k, logits[ids[0]], value);
  }
  for (int32_t i = 0; i < r.top_k; ++i) {
    weights[i] = value[chosen_only ? i : ids[i]];
    if (!chosen_only) sum += weights[i];
  }
  if (chosen_only || r.renormalize) {
    const float divisor = chosen_only ? sum : sum + r.norm_eps;
    for (int32_t i = 0; i < r.top_k; ++i) {
      weights[i] = divisor == 0 ? 1.0f / float(r.top_k) : weights[i] / divisor;
    }
  }
  if (r.scale != 1.0f) {
    for (int32_t i = 0; i < r.top_k; ++i) weights[i] *= r.scale;
  }
}

}  // namespace

int64_t route(const Router& router, const float* logits, int64_t stride, int64_t tokens,
              int32_t* ids, float* weights) {
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = logits + t * stride;
    const float greatest = greatest_finite(row, router.experts);
    if (!(greatest == greatest)) return t;
    route_token(router, row, greatest, ids + t * router.top_k, weights + t * router.top_k);
  }
  return -1;
}

const char* check_router(const Router& r) {
  if (r.experts < 1 || r.experts > kMaxRouterExperts) return "experts must be in 1..4096";
  if (r.top_k < 1 || r.top_k > r.experts) return "top_k must be in 1..experts";
  if (r.groups < 1 || r.experts % r.groups != 0) return "groups must divide the number of experts";
  if (r.top_groups < 1 || r.top_groups > r.groups) return "top_groups must be in 1..groups";
  const int32_t size = r.experts / r.groups;
  if (r.groups > 1 && !r.group_max && size < 2) {
    return "groups scored by their two best experts must hold at least two";
  }
  if (int64_t(r.top_groups) * size < r.top_k) return "the chosen groups must hold top_k experts";
  if (!std::isfinite(r.scale)) return "scale must be finite";
  if (!std::isfinite(r.norm_eps) || r.norm_eps < 0) return "norm_eps must be finite and at least 0";
  if (r.correction != nullptr) {
    if (r.kind == RouterKind::topk_softmax) return "topk_softmax takes no correction";
    for (int32_t e = 0; e < r.experts; ++e) {
      if (!std::isfinite(r.correction[e])) return "correction must be finite";
    }
  }
  return nullptr;
}

}  // namespace cpumoe

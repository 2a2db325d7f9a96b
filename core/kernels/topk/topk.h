// Room `topk`: router logits -> (expert ids, weights). Pure functions of one token's logits, fp32.
//
//   value v[e]    softmax_topk: softmax over all experts; topk_softmax: the logit;
//                 sigmoid: sigmoid of the logit
//   choosing      v[e] + correction[e]; softmax_topk without correction may compare logits instead,
//   score c[e]    which is the same order but tells apart what rounds to one value
//   groups        only experts of the top_groups best groups may be chosen, whatever their scores
//                 (Transformers' DeepSeek-V3 masks the others with -infinity)
//   weight        v[e] of the chosen (topk_softmax: softmax over the chosen logits), divided by
//                 (sum + norm_eps) when `renormalize`, times `scale`. Where sum + norm_eps is 0
//                 (every chosen value underflowed) the weights before `scale` are all 1 / top_k
#pragma once
#include <cstdint>

#include "base/types.h"

namespace cpumoe {

enum class RouterKind : uint8_t {
  softmax_topk,  // Mixtral, Qwen, OLMoE, DeepSeek-V2
  topk_softmax,  // gpt-oss
  sigmoid,       // DeepSeek-V3
};

struct Router {
  RouterKind kind = RouterKind::softmax_topk;
  int32_t experts = 0, top_k = 0;
  bool renormalize = false;  // topk_softmax sums to 1 anyway
  float norm_eps = 0;        // DeepSeek-V3: 1e-20
  float scale = 1;           // routed_scaling_factor
  // Group g holds experts [g, g + 1) * experts / groups; its score is the sum of its two best
  // choosing scores (DeepSeek-V3), or with group_max its best one (DeepSeek-V2).
  int32_t groups = 1, top_groups = 1;
  bool group_max = false;
  const float* correction = nullptr;  // [experts]; not with topk_softmax
};

inline constexpr int32_t kMaxRouterExperts = 4096;  // the scores of a token live on the stack

// Routes tokens [0, tokens). logits: [tokens, experts] fp32 with `stride` (elements). ids, weights:
// [tokens, top_k], ordered by falling choosing score; of equal scores (of experts or of groups) the
// lower id comes first. The router must be well-formed (check_router). Returns -1, or the first
// token whose logits hold a NaN or an infinity (its outputs are then undefined, and later tokens
// are not routed).
int64_t route(const Router& router, const float* logits, int64_t stride, int64_t tokens,
              int32_t* ids, float* weights);

// Null when the router is well-formed, else what must hold (static text): 1 <= experts <= 4096,
// 1 <= top_k <= experts, groups divide experts and hold two or more (unless group_max),
// 1 <= top_groups <= groups, top_k experts in the chosen groups, finite scale and correction,
// finite norm_eps >= 0.
const char* check_router(const Router& router);

}  // namespace cpumoe

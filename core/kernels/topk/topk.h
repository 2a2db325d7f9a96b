// Room `topk`: router logits -> (expert ids, weights). Pure functions of one token's logits.
#pragma once
#include <cstdint>

#include "base/types.h"

namespace cpumoe {

enum class RouterKind : uint8_t {
  softmax_topk,  // p = softmax(logits over all experts); the k largest p             (Mixtral, Qwen, OLMoE)
  topk_softmax,  // the k largest logits; softmax over those k                        (gpt-oss)
  sigmoid,       // s = sigmoid(logits); choose by s + correction, weigh by s         (DeepSeek-V3)
};

struct Router {
  RouterKind kind = RouterKind::softmax_topk;
  int32_t experts = 0, top_k = 0;
  bool renormalize = false;      // divide the chosen weights by their sum (+ norm_eps); topk_softmax sums to 1 anyway
  float norm_eps = 0;            // DeepSeek-V3: 1e-20
  float scale = 1;               // routed_scaling_factor, after renormalising
  int32_t groups = 1, top_groups = 1;  // choose top_groups of `groups` first, a group's score being the
                                       // sum of its two best choosing scores (DeepSeek-V3) ...
  bool group_max = false;              // ... or its best one (DeepSeek-V2 group_limited_greedy)
  const float* correction = nullptr;   // [experts] added for choosing only (sigmoid)
};

// Routes tokens [0, tokens). logits: [tokens, experts] fp32 with `stride`. ids, weights: [tokens, top_k],
// ordered by falling choosing score; of equal scores the lower expert id comes first.
// Returns -1, or the first token whose logits hold a NaN or an infinity (its outputs are then undefined).
int64_t route(const Router& router, const float* logits, int64_t stride, int64_t tokens, int32_t* ids, float* weights);

// Null when the router is well-formed, else what must hold (static text): experts >= 1, 1 <= top_k <= experts,
// groups divide experts, top_groups <= groups, enough experts in the chosen groups, finite scale.
const char* check_router(const Router& router);

}  // namespace cpumoe

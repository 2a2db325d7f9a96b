// What must hold before any memory is touched. Each throws Error and allocates only to do so.
#pragma once
#include "moe/experts.h"

namespace cpumoe {

inline constexpr int64_t kMaxDim = int64_t(1) << 31;       // features, inputs, tokens, experts
inline constexpr int64_t kMaxElements = int64_t(1) << 58;  // of one operand: its bytes fit in int64

bool weight_fits(const WeightView& w, int64_t n, int64_t k);
bool vector_fits(const VectorView& v, int64_t size);
// A weight is [n, k] with a format, data and a stride that holds a line.
void check_weight(const WeightView& w, int64_t n, int64_t k, const char* name, const char* where);
// An absent vector is fine.
void check_vector(const VectorView& v, int64_t size, const char* name, const char* where);
// check_experts in two steps: what all experts share, and the views of one expert. The operator
// does the second for the experts that are used.
void check_experts_shape(const ExpertsView& experts, const char* where);
void check_expert(const ExpertsView& experts, int64_t e, const char* where);

}  // namespace cpumoe

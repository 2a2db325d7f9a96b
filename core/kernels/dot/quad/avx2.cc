// Two to four tokens: bound by memory, with two-byte weights nearly by FMA as well.
#include "kernels/dot/avx2_rows.h"

namespace cpumoe::avx2 {

constexpr int64_t kSpan = 1024;  // inputs: 4 tokens x 4 KiB beside the stream of weights in L1

void dot_quad_rows_f32(const DotArgs& a) { rows_walk<F32>(a, kSpan); }
void dot_quad_rows_f16(const DotArgs& a) { rows_walk<F16>(a, kSpan); }
void dot_quad_rows_bf16(const DotArgs& a) { rows_walk<BF16>(a, kSpan); }

size_t scratch_quad(int64_t, int64_t, int64_t) { return 0; }

}  // namespace cpumoe::avx2

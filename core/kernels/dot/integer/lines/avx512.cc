// A few tokens, plain codes of which several share a byte.
#include "kernels/dot/integer/lines.h"

namespace cpumoe::avx512 {

#define CPUMOE_LINES(code, source, act_layout, act_lines) CPUMOE_INT_LINES(code, source)
#include "kernels/dot/integer/lines.inc"
#undef CPUMOE_LINES

size_t scratch_int_lines(int64_t, int64_t, int64_t) { return 0; }

}  // namespace cpumoe::avx512

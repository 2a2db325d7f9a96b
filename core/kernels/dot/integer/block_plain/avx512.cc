// Many tokens, plain codes.
#include "kernels/dot/integer/block.h"
#include "kernels/dot/integer/plain.h"

namespace cpumoe::avx512 {

#define CPUMOE_INTEGER(code, source, act_layout) CPUMOE_INT_BLOCK(code, source)
#include "kernels/dot/integer/plain.inc"
#undef CPUMOE_INTEGER
#define CPUMOE_LINES(code, source, act_layout, act_lines) CPUMOE_INT_BLOCK(code, source)
#include "kernels/dot/integer/lines.inc"
#undef CPUMOE_LINES

size_t scratch_int_block(int64_t, int64_t, int64_t) {
  return size_t(kBlockRows * kBlockSpans * kMostBytes);
}

}  // namespace cpumoe::avx512

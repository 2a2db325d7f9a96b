// A few tokens, plain codes.
#include "kernels/dot/integer/plain.h"
#include "kernels/dot/integer/stream.h"

namespace cpumoe::avx2 {

#define CPUMOE_INTEGER(code, source, act_layout) CPUMOE_INT_STREAM(code, source)
#include "kernels/dot/integer/plain.inc"
#undef CPUMOE_INTEGER
#define CPUMOE_LINES(code, source, act_layout, act_lines) CPUMOE_INT_STREAM(code, source)
#include "kernels/dot/integer/lines.inc"
#undef CPUMOE_LINES

size_t scratch_int_stream(int64_t, int64_t, int64_t) { return 0; }

}  // namespace cpumoe::avx2

// A few tokens, GGUF blocks of 256.
#include "kernels/dot/integer/gguf256.h"
#include "kernels/dot/integer/stream.h"

namespace cpumoe::avx2 {

#define CPUMOE_INTEGER(code, source, act_layout) CPUMOE_INT_STREAM(code, source)
#include "kernels/dot/integer/gguf256.inc"
#undef CPUMOE_INTEGER

}  // namespace cpumoe::avx2

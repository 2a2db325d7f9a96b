// A few tokens, GGUF blocks of 32.
#include "kernels/dot/integer/gguf32.h"
#include "kernels/dot/integer/stream.h"

namespace cpumoe::avx512 {

#define CPUMOE_INTEGER(code, source, act_layout) CPUMOE_INT_STREAM(code, source)
#include "kernels/dot/integer/gguf32.inc"
#undef CPUMOE_INTEGER

}  // namespace cpumoe::avx512

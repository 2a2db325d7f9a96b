// Many tokens, GGUF blocks.
#include "kernels/dot/integer/block.h"
#include "kernels/dot/integer/gguf256.h"

namespace cpumoe::avx2 {

#define CPUMOE_INTEGER(code, source, act_layout) CPUMOE_INT_BLOCK(code, source)
#include "kernels/dot/integer/gguf32.inc"
#include "kernels/dot/integer/gguf256.inc"
#undef CPUMOE_INTEGER

}  // namespace cpumoe::avx2

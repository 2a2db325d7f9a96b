// GGUF's blocks: scales and minima lie beside the codes. One scalar decoder per code.
#pragma once
#include "base/types.h"

namespace cpumoe {

inline constexpr int kMaxBlock = 256;  // elements

CPUMOE_INLINE bool is_gguf(Code c) { return c >= Code::q8_0; }

// All code_block(c).elements elements of one block, as the format's own reference computes them in
// fp32 (every product and sum rounded by itself), bit for bit.
void decode_gguf_block(Code c, const void* block, float* out);

}  // namespace cpumoe

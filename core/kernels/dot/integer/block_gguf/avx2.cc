// Many tokens, GGUF blocks.
#include "kernels/dot/integer/block.h"
#include "kernels/dot/integer/gguf256.h"

namespace cpumoe::avx2 {

void dot_int_block_rows_q8_0(const DotArgs& a) { block<Q8_0, Code::q8_0>(a); }
void dot_int_block_rows_q4_0(const DotArgs& a) { block<Q4_0, Code::q4_0>(a); }
void dot_int_block_rows_q4_1(const DotArgs& a) { block<Q4_1, Code::q4_1>(a); }
void dot_int_block_rows_q5_0(const DotArgs& a) { block<Q5_0, Code::q5_0>(a); }
void dot_int_block_rows_q5_1(const DotArgs& a) { block<Q5_1, Code::q5_1>(a); }
void dot_int_block_rows_iq4_nl(const DotArgs& a) { block<Iq4Nl, Code::iq4_nl>(a); }
void dot_int_block_rows_gguf_mxfp4(const DotArgs& a) { block<GgufMxfp4, Code::gguf_mxfp4>(a); }
void dot_int_block_rows_q2_k(const DotArgs& a) { block<Q2K, Code::q2_k>(a); }
void dot_int_block_rows_q3_k(const DotArgs& a) { block<Q3K, Code::q3_k>(a); }
void dot_int_block_rows_q4_k(const DotArgs& a) { block<Q4K, Code::q4_k>(a); }
void dot_int_block_rows_q5_k(const DotArgs& a) { block<Q5K, Code::q5_k>(a); }
void dot_int_block_rows_q6_k(const DotArgs& a) { block<Q6K, Code::q6_k>(a); }
void dot_int_block_rows_iq4_xs(const DotArgs& a) { block<Iq4Xs, Code::iq4_xs>(a); }

}  // namespace cpumoe::avx2

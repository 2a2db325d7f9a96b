// A few tokens, GGUF blocks of 256.
#include "kernels/dot/integer/gguf256.h"
#include "kernels/dot/integer/stream.h"

namespace cpumoe::avx2 {

void dot_int_stream_rows_q2_k(const DotArgs& a) { stream<Q2K, Code::q2_k>(a); }
void dot_int_stream_rows_q3_k(const DotArgs& a) { stream<Q3K, Code::q3_k>(a); }
void dot_int_stream_rows_q4_k(const DotArgs& a) { stream<Q4K, Code::q4_k>(a); }
void dot_int_stream_rows_q5_k(const DotArgs& a) { stream<Q5K, Code::q5_k>(a); }
void dot_int_stream_rows_q6_k(const DotArgs& a) { stream<Q6K, Code::q6_k>(a); }
void dot_int_stream_rows_iq4_xs(const DotArgs& a) { stream<Iq4Xs, Code::iq4_xs>(a); }

}  // namespace cpumoe::avx2

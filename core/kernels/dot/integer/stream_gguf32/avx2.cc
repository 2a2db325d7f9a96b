// A few tokens, GGUF blocks of 32.
#include "kernels/dot/integer/gguf32.h"
#include "kernels/dot/integer/stream.h"

namespace cpumoe::avx2 {

void dot_int_stream_rows_q8_0(const DotArgs& a) { stream<Q8_0, Code::q8_0>(a); }
void dot_int_stream_rows_q4_0(const DotArgs& a) { stream<Q4_0, Code::q4_0>(a); }
void dot_int_stream_rows_q4_1(const DotArgs& a) { stream<Q4_1, Code::q4_1>(a); }
void dot_int_stream_rows_q5_0(const DotArgs& a) { stream<Q5_0, Code::q5_0>(a); }
void dot_int_stream_rows_q5_1(const DotArgs& a) { stream<Q5_1, Code::q5_1>(a); }
void dot_int_stream_rows_iq4_nl(const DotArgs& a) { stream<Iq4Nl, Code::iq4_nl>(a); }
void dot_int_stream_rows_gguf_mxfp4(const DotArgs& a) { stream<GgufMxfp4, Code::gguf_mxfp4>(a); }

}  // namespace cpumoe::avx2

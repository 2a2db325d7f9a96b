// A few tokens, plain codes.
#include "kernels/dot/integer/plain.h"
#include "kernels/dot/integer/stream.h"

namespace cpumoe::avx2 {

void dot_int_stream_rows_u4(const DotArgs& a) { stream<U4, Code::u4>(a); }
void dot_int_stream_rows_e2m1(const DotArgs& a) { stream<E2m1, Code::e2m1>(a); }
void dot_int_stream_rows_s8(const DotArgs& a) { stream<S8, Code::s8>(a); }
void dot_int_stream_rows_u8(const DotArgs& a) { stream<U8, Code::u8>(a); }
void dot_int_stream_rows_u3(const DotArgs& a) { stream<U3, Code::u3>(a); }
void dot_int_stream_rows_u2(const DotArgs& a) { stream<U2, Code::u2>(a); }

size_t scratch_int_stream(int64_t, int64_t, int64_t) { return 0; }

}  // namespace cpumoe::avx2

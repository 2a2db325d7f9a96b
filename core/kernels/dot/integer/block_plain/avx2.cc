// Many tokens, plain codes.
#include "kernels/dot/integer/block.h"
#include "kernels/dot/integer/plain.h"

namespace cpumoe::avx2 {

void dot_int_block_rows_u4(const DotArgs& a) { block<U4, Code::u4>(a); }
void dot_int_block_rows_e2m1(const DotArgs& a) { block<E2m1, Code::e2m1>(a); }
void dot_int_block_rows_s8(const DotArgs& a) { block<S8, Code::s8>(a); }
void dot_int_block_rows_u8(const DotArgs& a) { block<U8, Code::u8>(a); }
void dot_int_block_rows_u3(const DotArgs& a) { block<U3, Code::u3>(a); }
void dot_int_block_rows_u2(const DotArgs& a) { block<U2, Code::u2>(a); }

size_t scratch_int_block(int64_t, int64_t, int64_t) {
  return size_t(kBlockRows * kBlockSpans * kMostBytes);
}

}  // namespace cpumoe::avx2

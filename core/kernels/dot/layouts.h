// Packed activation layouts of the fp32 class: where input k of token m lies. K16 is K rounded up
// to a multiple of 16.
//
//   rows            token after token, K16 floats each; inputs K..K16-1 are zero
//   rows_even_odd   the same, but of every 16 inputs the 8 even ones come first:
//                     0 2 4 6 8 10 12 14 | 1 3 5 7 9 11 13 15 | 16 18 ...
//                   (two bf16 weights share 32 bits: a shift yields the even one, a mask the odd)
//   panels8         8 tokens side by side, one line of 8 floats per input:
//                     input 0: t0 t1 .. t7 | input 1: t0 t1 .. t7 | ...
//                   panel p starts at p * K * 8; tokens past the last are zero
#pragma once
#include "base/types.h"

namespace cpumoe {

struct Rows {
  static constexpr bool kEvenOdd = false;
  CPUMOE_INLINE int64_t pos(int64_t m, int64_t k, int64_t inputs) {
    return m * round_up(inputs, 16) + k;
  }
  CPUMOE_INLINE int64_t floats(int64_t tokens, int64_t inputs) {
    return tokens * round_up(inputs, 16);
  }
};
struct RowsEvenOdd {
  static constexpr bool kEvenOdd = true;
  CPUMOE_INLINE int64_t pos(int64_t m, int64_t k, int64_t inputs) {
    return m * round_up(inputs, 16) + (k & ~int64_t(15)) + ((k & 1) << 3) + ((k & 15) >> 1);
  }
  CPUMOE_INLINE int64_t floats(int64_t tokens, int64_t inputs) {
    return tokens * round_up(inputs, 16);
  }
};
struct Panels8 {
  CPUMOE_INLINE int64_t pos(int64_t m, int64_t k, int64_t inputs) {
    return (m >> 3) * inputs * 8 + k * 8 + (m & 7);
  }
  CPUMOE_INLINE int64_t floats(int64_t tokens, int64_t inputs) {
    return ceil_div(tokens, 8) * 8 * inputs;
  }
};

}  // namespace cpumoe

// Sources of words (words.h): GPTQ and AWQ. Included by one file per ISA.
#pragma once
#ifdef __AVX512VNNI__
#include "kernels/dot/integer/words512.h"
#else
#include "kernels/dot/integer/words256.h"
#endif

namespace cpumoe::CPUMOE_NS {

#define CPUMOE_WORDS(code, source, act_layout, n_block, n_slice)            \
  void dot_int_words_columns_##code(const DotArgs& a) { words<source>(a); } \
  void dot_int_words_many_columns_##code(const DotArgs& a) { words<source>(a); }
#include "kernels/dot/integer/words.inc"
#undef CPUMOE_WORDS

size_t scratch_int_words(int64_t n, int64_t, int64_t) {
  using S = Gptq<Nibbles>;
  return size_t(2 * S::kDepth / kLeastGroup * S::pitch(n)) * 4;
}
size_t scratch_int_words_many(int64_t n, int64_t m, int64_t k) {
  return scratch_int_words(n, m, k);
}

}  // namespace cpumoe::CPUMOE_NS

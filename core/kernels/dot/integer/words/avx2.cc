// Words of GPTQ and AWQ.
#include "kernels/dot/integer/word_codes.h"

namespace cpumoe::avx2 {

#define CPUMOE_WORDS(code, source, act_layout, n_block) \
  void dot_int_words_columns_##code(const DotArgs& a) { words<source>(a); }
#include "kernels/dot/integer/words.inc"
#undef CPUMOE_WORDS

size_t scratch_int_words(int64_t, int64_t, int64_t) {
  return size_t(2 * kMostGroups * kFeatures) * 4;
}

}  // namespace cpumoe::avx2

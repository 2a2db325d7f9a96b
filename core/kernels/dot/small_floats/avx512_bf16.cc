// Rows of e4m3 with one to four tokens, class bf16: pairs of inputs in every lane.
#include "kernels/dot/small_floats/pairs512.h"
#include "kernels/dot/small_floats/rows.h"

namespace cpumoe::avx512_bf16 {
namespace {

struct Vec : Pairs16 {
  template <int N>
  CPUMOE_INLINE F spread(const float* p) {
    static_assert(N == 1);
    return _mm512_set1_ps(*p);
  }
};

// bf16_rows as floats.
struct Act {
  static constexpr int64_t kGroup = 128, kChunk = 64, kStep = 2;
  CPUMOE_INLINE int64_t line(int64_t inputs) { return Bf16Rows::line(inputs) / 2; }
};

struct E4m3 : small_floats::E4m3Pairs<true> {
  using V = Vec;
  using Act = avx512_bf16::Act;
  static constexpr int64_t kBytes = 64, kRun = 128, kScale = 128, kNear = 256, kPerFloat = 2;
  static constexpr bool kFactors = false;
  static constexpr float kFactor = 1;
  static constexpr int rows(int tokens) { return tokens <= 2 ? 4 : 2; }
  struct Nan {};
  CPUMOE_INLINE Bits load(const char* p, Nan&) { return bits(_mm512_loadu_si512(p)); }
  CPUMOE_INLINE bool is_nan(Nan) { return false; }
};

}  // namespace

void dot_small_floats_rows_e4m3(const DotArgs& a) { small_floats::tokens<E4m3>(a); }
size_t scratch_small_floats(int64_t, int64_t, int64_t) { return 0; }

}  // namespace cpumoe::avx512_bf16

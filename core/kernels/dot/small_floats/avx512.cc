// e4m3 and e2m1 in vectors of 16. rows_scaled64 and rows_scaled128 take the power of two of
// codes512.h back.
#include "kernels/dot/small_floats/codes512.h"
#include "kernels/dot/small_floats/rows.h"

namespace cpumoe::avx512 {
namespace {

struct Vec16 : Floats16 {
  // One value for all lanes, four of them each for four lanes, or eight each for two.
  template <int N>
  CPUMOE_INLINE F spread(const float* p) {
    if constexpr (N == 1) return _mm512_set1_ps(*p);
    const __m512i four = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i eight = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    if constexpr (N == 4) {
      return _mm512_permutexvar_ps(four, _mm512_castps128_ps512(_mm_loadu_ps(p)));
    } else {
      return _mm512_permutexvar_ps(eight, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
    }
  }
};

struct E4m3 : small_floats::E4m3Codes {
  using V = Vec16;
  using Act = RowsScaled64;
  static constexpr int64_t kBytes = 64, kRun = 128, kScale = 128, kNear = 256;
  static constexpr int64_t kPerFloat = 1;
  static constexpr bool kFactors = true;
  static constexpr float kFactor = 1;
  static constexpr int rows(int tokens) { return tokens <= 2 ? 4 : 2; }
  CPUMOE_INLINE Bits load(const char* p, Nan& nan) {
    const __m512i v = _mm512_loadu_si512(p);
    look(v, nan);
    return bits(v);
  }
  CPUMOE_INLINE bool is_nan(const Nan& nan) { return lanes(nan) != 0; }
};

template <int64_t kInputsOfScale>
struct E2m1 : small_floats::E2m1Codes {
  using V = Vec16;
  using Act = RowsScaled128;
  static constexpr int64_t kBytes = 64, kRun = 128, kScale = kInputsOfScale,
                          kNear = 256;
  static constexpr int64_t kPerFloat = 1;
  static constexpr bool kFactors = true;
  static constexpr float kFactor = 1;
  static constexpr int rows(int) { return 2; }
  CPUMOE_INLINE Bits load(const char* p, Nan&) { return _mm512_loadu_si512(p); }
  CPUMOE_INLINE bool is_nan(Nan) { return false; }
};

}  // namespace

CPUMOE_SMALL_FLOATS

}  // namespace cpumoe::avx512

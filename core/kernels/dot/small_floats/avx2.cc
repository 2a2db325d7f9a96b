// e4m3 and e2m1 in vectors of 8. The fields of a code are moved to those of an fp32: 2^-120 (e4m3)
// or 2^-126 (e2m1) of its value, exactly, with subnormals; rows_scaled takes the power of two back.
// Converting by F16C instead took a third longer from L1 (Zen 4).
#include "kernels/dot/small_floats/rows.h"

namespace cpumoe::avx2 {
namespace {

struct Vec8 : Floats8 {
  // One value for all lanes, or two, each for a half of them.
  template <int N>
  CPUMOE_INLINE F spread(const float* p) {
    if constexpr (N == 1) return _mm256_broadcast_ss(p);
    return _mm256_set_m128(_mm_broadcast_ss(p + 1), _mm_broadcast_ss(p));
  }
};

CPUMOE_INLINE __m256 fields(__m256i bits, uint32_t mask) {
  return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(mask))));
}

struct E4m3 {
  using V = Vec8;
  using Act = RowsScaled;
  static constexpr Code kCode = Code::e4m3;
  static constexpr int64_t kBytes = 32, kRun = 64, kScale = 64, kNear = 0;
  static constexpr int64_t kPerFloat = 1;
  static constexpr bool kFactors = true;
  static constexpr float kFactor = 1;
  static constexpr int rows(int tokens) { return tokens == 1 ? 1 : 2; }
  struct Nan {
    __m256i largest = _mm256_setzero_si256();
  };
  struct Bits {
    __m256i even, odd;
  };
  CPUMOE_INLINE Bits load(const char* p, Nan& nan) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i magnitude = _mm256_and_si256(v, _mm256_set1_epi8(0x7f));
    nan.largest = _mm256_max_epu8(nan.largest, magnitude);
    return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 4), _mm256_srai_epi16(v, 4)};
  }
  template <int J>
  CPUMOE_INLINE __m256 vector(const Bits& b) {
    const __m256i v = J % 2 == 0 ? b.even : b.odd;
    return fields(J < 2 ? _mm256_slli_epi32(v, 16) : v, 0x87f00000u);
  }
  CPUMOE_INLINE bool is_nan(const Nan& nan) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(nan.largest, _mm256_set1_epi8(0x7f))) != 0;
  }
};

template <int64_t kInputsOfScale>
struct E2m1 {
  using V = Vec8;
  using Act = RowsScaled;
  static constexpr Code kCode = Code::e2m1;
  static constexpr int64_t kBytes = 16, kRun = 32, kScale = kInputsOfScale,
                          kNear = 0;
  static constexpr int64_t kPerFloat = 1;
  static constexpr bool kFactors = true;
  static constexpr float kFactor = 64;
  static constexpr int rows(int tokens) { return tokens == 1 ? 1 : 2; }
  struct Nan {};
  using Bits = __m256i;
  CPUMOE_INLINE Bits load(const char* p, Nan&) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <int J>
  CPUMOE_INLINE __m256 vector(Bits b) {
    return fields(_mm256_srai_epi32(_mm256_slli_epi32(b, 28 - 4 * J), 6), 0x81c00000u);
  }
  CPUMOE_INLINE bool is_nan(Nan) { return false; }
};

}  // namespace

CPUMOE_SMALL_FLOATS

}  // namespace cpumoe::avx2

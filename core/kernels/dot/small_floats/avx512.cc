// e4m3 and e2m1 in vectors of 16, as 2^-120 of their values: the fields of an e4m3 moved to those of
// an fp32, exactly, with subnormals; an e2m1 looked up. rows_scaled64 and rows_scaled128 take the
// power of two back.
#include "kernels/dot/small_floats/rows.h"

namespace cpumoe::avx512 {
namespace {

struct Vec16 {
  using F = __m512;
  static constexpr int64_t kLanes = 16;
  CPUMOE_INLINE F zero() { return _mm512_setzero_ps(); }
  CPUMOE_INLINE F broadcast(float v) { return _mm512_set1_ps(v); }
  CPUMOE_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  CPUMOE_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  CPUMOE_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  CPUMOE_INLINE float sum(F v) {
    return sum8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
  }
  CPUMOE_INLINE void keep(F& v) { __asm__("" : "+v"(v)); }  // as in avx2.cc
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

struct E4m3 {
  using V = Vec16;
  using Act = RowsScaled64;
  static constexpr Code kCode = Code::e4m3;
  static constexpr int64_t kBytes = 64, kRun = 128, kScale = 128, kNear = 256;
  static constexpr float kFactor = 1;
  static constexpr int rows(int tokens) { return tokens <= 2 ? 4 : 2; }
  struct Nan {
    __m512i largest = _mm512_setzero_si512();
  };
  struct Bits {
    __m512i even, odd;
  };
  CPUMOE_INLINE Bits load(const char* p, Nan& nan) {
    const __m512i v = _mm512_loadu_si512(p);
    const __m512i magnitude = _mm512_and_si512(v, _mm512_set1_epi8(0x7f));
    nan.largest = _mm512_max_epu8(nan.largest, magnitude);
    return {_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 4), _mm512_srai_epi16(v, 4)};
  }
  template <int J>
  CPUMOE_INLINE __m512 vector(const Bits& b) {
    const __m512i v = J % 2 == 0 ? b.even : b.odd;
    const __m512i bits = J < 2 ? _mm512_slli_epi32(v, 16) : v;
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0x87f00000u))));
  }
  CPUMOE_INLINE bool is_nan(const Nan& nan) {
    return _mm512_cmpeq_epi8_mask(nan.largest, _mm512_set1_epi8(0x7f)) != 0;
  }
};

template <int64_t kInputsOfScale>
struct E2m1 {
  using V = Vec16;
  using Act = RowsScaled128;
  static constexpr Code kCode = Code::e2m1;
  static constexpr int64_t kBytes = 64, kRun = 128, kScale = kInputsOfScale,
                          kNear = 256;
  static constexpr float kFactor = 1;
  static constexpr int rows(int) { return 2; }
  struct Nan {};
  using Bits = __m512i;
  CPUMOE_INLINE Bits load(const char* p, Nan&) { return _mm512_loadu_si512(p); }
  template <int J>
  CPUMOE_INLINE __m512 vector(Bits b) {
    constexpr float kUnit = 0x1p-120f;
    const __m512 values = _mm512_mul_ps(
        _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6),
        _mm512_set1_ps(kUnit));
    return _mm512_permutexvar_ps(_mm512_srli_epi32(b, 4 * J), values);  // takes four bits of each
  }
  CPUMOE_INLINE bool is_nan(Nan) { return false; }
};

}  // namespace

CPUMOE_SMALL_FLOATS

}  // namespace cpumoe::avx512

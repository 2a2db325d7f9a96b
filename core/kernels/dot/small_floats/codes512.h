// e4m3 and e2m1 in vectors of 16, as 2^-120 of their values: the fields of an e4m3 moved to those
// of an fp32, exactly, with subnormals; an e2m1 looked up. Included by ISA files only.
//
//   kInputs          of a register of codes
//   bits(v)          a register of codes, ready for
//   vector<J>(bits)  code J of every 32 bits
//   Nan              what was met of codes that are none
#pragma once
#include <immintrin.h>

#include "base/types.h"

namespace cpumoe::CPUMOE_NS::small_floats {

struct E4m3Codes {
  static constexpr Code kCode = Code::e4m3;
  static constexpr int64_t kInputs = 64;
  struct Nan {
    __m512i largest = _mm512_setzero_si512();
  };
  struct Bits {
    __m512i even, odd;
  };
  CPUMOE_INLINE Bits bits(__m512i v) {
    return {_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 4), _mm512_srai_epi16(v, 4)};
  }
  template <int J>
  CPUMOE_INLINE __m512 vector(const Bits& b) {
    const __m512i v = J % 2 == 0 ? b.even : b.odd;
    const __m512i bits = J < 2 ? _mm512_slli_epi32(v, 16) : v;
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0x87f00000u))));
  }
  CPUMOE_INLINE void look(__m512i v, Nan& nan) {
    nan.largest =
        _mm512_max_epu8(nan.largest, _mm512_and_si512(v, _mm512_set1_epi8(0x7f)));
  }
  // The lanes that met one.
  CPUMOE_INLINE __mmask16 lanes(const Nan& nan) {
    const __mmask64 bytes = _mm512_cmpeq_epi8_mask(nan.largest, _mm512_set1_epi8(0x7f));
    const __m512i found = _mm512_movm_epi8(bytes);
    return _mm512_test_epi32_mask(found, found);
  }
};

struct E2m1Codes {
  static constexpr Code kCode = Code::e2m1;
  static constexpr int64_t kInputs = 128;
  struct Nan {};
  using Bits = __m512i;
  CPUMOE_INLINE Bits bits(__m512i v) { return v; }
  template <int J>
  CPUMOE_INLINE __m512 vector(Bits b) {
    const __m512 values = _mm512_mul_ps(
        _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6),
        _mm512_set1_ps(0x1p-120f));
    return _mm512_permutexvar_ps(_mm512_srli_epi32(b, 4 * J), values);  // takes four bits of each
  }
  CPUMOE_INLINE void look(__m512i, Nan&) {}
  CPUMOE_INLINE __mmask16 lanes(Nan) { return 0; }
};

}  // namespace cpumoe::CPUMOE_NS::small_floats

// e4m3 as pairs of bf16, exactly: both bytes of a magnitude are looked up, so that its subnormals,
// which VDPBF16PS takes as zeros, become normal numbers, and its NaN a NaN. Included by ISA files
// with VBMI.
#pragma once
#include <immintrin.h>

#include "base/types.h"

namespace cpumoe::CPUMOE_NS::small_floats {

struct Bytes {
  alignas(64) uint8_t of[128];
};
// Bits of a magnitude as bf16.
constexpr uint32_t bf16_of_e4m3(uint32_t code) {
  uint32_t e = code >> 3, m = code & 7;
  if (code == 127) return 0x7fc0;
  if (code == 0) return 0;
  if (e == 0) {
    for (e = 1; m < 8; --e) m *= 2;  // wraps: e + 120 is what counts
  }
  return (e + 120) << 7 | (m & 7) << 4;
}
constexpr Bytes bf16_bytes(int shift) {
  Bytes b{};
  for (uint32_t i = 0; i < 128; ++i) b.of[i] = uint8_t(bf16_of_e4m3(i) >> shift);
  return b;
}
constexpr Bytes kLowBytes = bf16_bytes(0), kHighBytes = bf16_bytes(8);

// Of 64 low and 64 high bytes those of codes 4 i + 2 J and the next one, in lane i of part J.
constexpr Bytes pair_places() {
  Bytes b{};
  for (int i = 0; i < 128; ++i) {
    const int byte = i % 64;
    b.of[i] = uint8_t(byte / 4 * 4 + i / 64 * 2 + byte % 4 / 2 + byte % 2 * 64);
  }
  return b;
}
constexpr Bytes kPairPlaces = pair_places();

// Part J of 64 codes: codes 32 J to 32 J + 31 in order, or of every four in a lane pair J of them.
template <bool kInOrder>
struct E4m3Pairs {
  static constexpr Code kCode = Code::e4m3;
  static constexpr int64_t kInputs = 64;
  struct Bits {
    __m512i low, high;
  };
  CPUMOE_INLINE __m512i table(const Bytes& b, int half) {
    return _mm512_load_si512(b.of + 64 * half);
  }
  CPUMOE_INLINE Bits bits(__m512i v) {
    if constexpr (kInOrder) {  // for the unpacking of halves of 16 bytes
      v = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), v);
    }
    const __m512i low = _mm512_permutex2var_epi8(table(kLowBytes, 0), v, table(kLowBytes, 1));
    const __m512i high = _mm512_permutex2var_epi8(table(kHighBytes, 0), v, table(kHighBytes, 1));
    // high | (v & 0x80)
    return {low, _mm512_ternarylogic_epi32(high, v, _mm512_set1_epi8(int8_t(0x80)), 0xf8)};
  }
  template <int J>
  CPUMOE_INLINE __m512 vector(const Bits& b) {
    if constexpr (kInOrder) {
      return _mm512_castsi512_ps(J == 0 ? _mm512_unpacklo_epi8(b.low, b.high)
                                        : _mm512_unpackhi_epi8(b.low, b.high));
    }
    return _mm512_castsi512_ps(_mm512_permutex2var_epi8(b.low, table(kPairPlaces, J), b.high));
  }
};

}  // namespace cpumoe::CPUMOE_NS::small_floats

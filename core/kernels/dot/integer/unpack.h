// Bits to codes in the lanes of a span. Included by ISA files only.
#pragma once
#include "kernels/vec/avx2_gguf.h"
#ifdef __AVX512VNNI__
#include "kernels/dot/integer/unpack512.h"
#else
#include "kernels/dot/integer/unpack256.h"
#endif

namespace cpumoe::CPUMOE_NS {

CPUMOE_INLINE uint32_t word(const char* p) { return codes::load_bits<uint32_t>(p); }
CPUMOE_INLINE __m256 half_everywhere(const char* p) { return _mm256_set1_ps(codes::half_at(p)); }
CPUMOE_INLINE __m256i dword_everywhere(const char* p) { return _mm256_set1_epi32(int(word(p))); }
// One dword a lane.
CPUMOE_INLINE __m256i by_lane(int a, int b, int c, int d, int e, int f, int g, int h) {
  return _mm256_setr_epi32(a, b, c, d, e, f, g, h);
}

// Doubled e2m1 plus 12, so that they are unsigned.
constexpr int8_t kE2m1Plus12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// iq4_nl's values.
constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                             1,    13,   25,  38,  53,  69,  89,  113};
CPUMOE_INLINE void look_up_all(const int8_t table[16], Codes w[kRegisters]) {
#pragma GCC unroll 8
  for (int i = 0; i < kRegisters; ++i) w[i] = look_up(table, w[i]);
}
CPUMOE_INLINE void flip_all(int bits, Codes w[kRegisters]) {
#pragma GCC unroll 8
  for (int i = 0; i < kRegisters; ++i) w[i] = flip(w[i], bits);
}

}  // namespace cpumoe::CPUMOE_NS

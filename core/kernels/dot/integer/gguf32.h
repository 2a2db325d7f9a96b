// GGUF blocks of 32: a span is eight of them. Byte positions: formats/gguf.cc. Included by ISA
// files only.
#pragma once
#include "kernels/dot/integer/unpack.h"

namespace cpumoe::CPUMOE_NS {

// fp16 at p + j * step for block j, in the lanes of Quads.
CPUMOE_INLINE __m256 halves_of_blocks(const char* p, int64_t step) {
  const auto at = [=](int j) __attribute__((always_inline)) {
    uint16_t u;
    memcpy(&u, p + j * step, 2);
    return int(u);
  };
  __m128i v = _mm_cvtsi32_si128(at(0));
  v = _mm_insert_epi16(v, at(2), 1);
  v = _mm_insert_epi16(v, at(4), 2);
  v = _mm_insert_epi16(v, at(6), 3);
  v = _mm_insert_epi16(v, at(1), 4);
  v = _mm_insert_epi16(v, at(3), 5);
  v = _mm_insert_epi16(v, at(5), 6);
  v = _mm_insert_epi16(v, at(7), 7);
  return _mm256_cvtph_ps(v);
}

// Ors the fifth bits, 32 of every block at p + j * step, into the codes: bit e of a block to bit 4
// of input e.
CPUMOE_INLINE void or_fifth_bits(const char* p, int64_t step, __m256i w[8]) {
  const auto at = [=](int j) __attribute__((always_inline)) {
    int32_t u;
    memcpy(&u, p + j * step, 4);
    return u;
  };
  const auto four = [=](int j) __attribute__((always_inline)) {
    const __m128i low = _mm_insert_epi32(_mm_cvtsi32_si128(at(j)), at(j + 2), 1);
    const __m128i high = _mm_insert_epi32(_mm_cvtsi32_si128(at(j + 4)), at(j + 6), 1);
    return _mm_unpacklo_epi64(low, high);
  };
  const __m256i bits = _mm256_inserti128_si256(_mm256_castsi128_si256(four(0)), four(1), 1);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // byte i of a block: vectors 2i and 2i + 1
    const __m256i from = _mm256_setr_epi32(0x00000000, 0x04040404, 0x08080808, 0x0c0c0c0c,
                                           0x00000000, 0x04040404, 0x08080808, 0x0c0c0c0c);
    const __m256i byte =
        _mm256_shuffle_epi8(bits, _mm256_add_epi8(from, _mm256_set1_epi8(char(i))));
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i mask = _mm256_set1_epi32(h == 0 ? 0x08040201 : int(0x80402010));
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(byte, mask), mask);
      w[2 * i + h] = _mm256_or_si256(w[2 * i + h], _mm256_and_si256(set, _mm256_set1_epi8(16)));
    }
  }
}

struct Q8_0 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 34, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.bytes = true}; }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) { bytes_of_groups(p + 2, kBlock, w); }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { f.s0 = halves_of_blocks(p, kBlock); }
};

struct Q4_0 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 18, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.middle = 8}; }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) { nibbles_of_groups(p + 2, kBlock, w); }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { f.s0 = halves_of_blocks(p, kBlock); }
};

struct Q4_1 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 20, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.offset = Math::group}; }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) { nibbles_of_groups(p + 4, kBlock, w); }
  CPUMOE_INLINE void factors(const char* p, Factors& f) {
    f.s0 = halves_of_blocks(p, kBlock);
    f.o0 = halves_of_blocks(p + 2, kBlock);
  }
};

struct Q5_0 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 22, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.middle = 16}; }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    nibbles_of_groups(p + 6, kBlock, w);
    or_fifth_bits(p + 2, kBlock, w);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { f.s0 = halves_of_blocks(p, kBlock); }
};

struct Q5_1 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 24, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.parts = Math::ints, .offset = Math::group}; }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    nibbles_of_groups(p + 8, kBlock, w);
    or_fifth_bits(p + 4, kBlock, w);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) {
    f.s0 = halves_of_blocks(p, kBlock);
    f.o0 = halves_of_blocks(p + 2, kBlock);
  }
};

struct Iq4Nl {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 18, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.bytes = true}; }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    nibbles_of_groups(p + 2, kBlock, w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) w[i] = codes::iq4_values(w[i]);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { f.s0 = halves_of_blocks(p, kBlock); }
};

struct GgufMxfp4 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 17, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.middle = 12}; }
  CPUMOE_INLINE void decode(const char* p, __m256i w[8]) {
    nibbles_of_groups(p + 1, kBlock, w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) w[i] = look_up(kE2m1Plus12, w[i]);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) {  // 2^(exponent - 128)
    const auto at = [=](int j) __attribute__((always_inline)) { return p[j * kBlock]; };
    __m128i bytes = _mm_cvtsi32_si128(at(0));
    bytes = _mm_insert_epi8(bytes, at(2), 1);
    bytes = _mm_insert_epi8(bytes, at(4), 2);
    bytes = _mm_insert_epi8(bytes, at(6), 3);
    bytes = _mm_insert_epi8(bytes, at(1), 4);
    bytes = _mm_insert_epi8(bytes, at(3), 5);
    bytes = _mm_insert_epi8(bytes, at(5), 6);
    bytes = _mm_insert_epi8(bytes, at(7), 7);
    const __m256i e = _mm256_cvtepu8_epi32(bytes);
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    f.s0 = _mm256_castsi256_ps(_mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(e, one)));
  }
};

}  // namespace cpumoe::CPUMOE_NS

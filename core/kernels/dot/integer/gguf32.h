// GGUF blocks of 32: a span is eight of them. Byte positions: formats/gguf.cc. Included by ISA
// files only.
#pragma once
#include "kernels/dot/integer/unpack.h"

namespace cpumoe::CPUMOE_NS {

struct Q8_0 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 34, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.bytes = true}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) { bytes_of_groups<kBlock, 2>(p, w); }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { f.s0 = halves_of_blocks<kBlock, 0>(p); }
};

struct Q4_0 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 18, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.middle = 8}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) { nibbles_of_groups<kBlock, 2>(p, w); }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { f.s0 = halves_of_blocks<kBlock, 0>(p); }
};

struct Q4_1 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 20, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.offset = Math::group}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) { nibbles_of_groups<kBlock, 4>(p, w); }
  CPUMOE_INLINE void factors(const char* p, Factors& f) {
    f.s0 = halves_of_blocks<kBlock, 0>(p);
    f.o0 = halves_of_blocks<kBlock, 2>(p);
  }
};

struct Q5_0 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 22, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.middle = 16}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) {
    nibbles_of_groups<kBlock, 6>(p, w);
    or_fifth_bits<kBlock, 2>(p, w);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { f.s0 = halves_of_blocks<kBlock, 0>(p); }
};

struct Q5_1 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 24, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.parts = Math::ints, .offset = Math::group}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) {
    nibbles_of_groups<kBlock, 8>(p, w);
    or_fifth_bits<kBlock, 4>(p, w);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) {
    f.s0 = halves_of_blocks<kBlock, 0>(p);
    f.o0 = halves_of_blocks<kBlock, 2>(p);
  }
};

struct Iq4Nl {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 18, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.bytes = true}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) {
    nibbles_of_groups<kBlock, 2>(p, w);
    look_up_all(kIq4, w);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) { f.s0 = halves_of_blocks<kBlock, 0>(p); }
};

struct GgufMxfp4 {
  using Order = Quads;
  static constexpr bool kPlain = false;
  static constexpr int64_t kBlock = 17, kSpanBytes = 8 * kBlock;
  static constexpr Math math(bool) { return {.middle = 12}; }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) {
    nibbles_of_groups<kBlock, 1>(p, w);
    look_up_all(kE2m1Plus12, w);
  }
  CPUMOE_INLINE void factors(const char* p, Factors& f) {  // 2^(exponent - 128)
    const __m256i e = first_bytes<kBlock>(p);
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    f.s0 = _mm256_castsi256_ps(_mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(e, one)));
  }
};

}  // namespace cpumoe::CPUMOE_NS

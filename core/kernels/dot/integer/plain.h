// Plain codes: 256 inputs of one line without gaps; scales and zero points in arrays of their own.
// Included by ISA files only.
#pragma once
#include "kernels/dot/integer/scales.h"
#include "kernels/dot/integer/unpack.h"

namespace cpumoe::CPUMOE_NS {

struct U4 {
  using Order = Pairs;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 128;
  static constexpr float kCountedFrom = 0, kMiddle = 8, kFactor = 1;
  static constexpr Math math(bool halves) {
    return {.parts = halves ? Math::floats : Math::whole,
            .offset = halves ? Math::halves : Math::group};
  }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) { nibbles_in_order(p, w); }
};

struct E2m1 {
  using Order = Pairs;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 128;
  static constexpr float kCountedFrom = 0, kMiddle = 0, kFactor = 0.5f;
  static constexpr Math math(bool halves) {
    return {.middle = 12, .parts = halves ? Math::floats : Math::whole};
  }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) {
    nibbles_in_order(p, w);
    look_up_all(kE2m1Plus12, w);
  }
};

struct S8 {
  using Order = Quads;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 256;
  static constexpr float kCountedFrom = 0, kMiddle = 0, kFactor = 1;
  static constexpr Math math(bool halves) {
    return {.bytes = true, .parts = halves ? Math::floats : Math::whole};
  }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) { bytes_of_groups<32, 0>(p, w); }
};

struct U8 {
  using Order = Quads;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 256;
  static constexpr float kCountedFrom = 128, kMiddle = 128, kFactor = 1;
  static constexpr Math math(bool halves) {
    return {.bytes = true,
            .parts = halves ? Math::floats : Math::whole,
            .offset = halves ? Math::halves : Math::group};
  }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) {
    bytes_of_groups<32, 0>(p, w);
    flip_all(0x80, w);
  }
};

struct U3 {
  using Order = Pairs;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 96;
  static constexpr float kCountedFrom = 0, kMiddle = 4, kFactor = 1;
  static constexpr Math math(bool halves) { return U4::math(halves); }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) { three_bits_in_order(p, w); }
};

struct U2 {
  using Order = Fours;
  static constexpr bool kPlain = true;
  static constexpr int64_t kSpanBytes = 64;
  static constexpr float kCountedFrom = 0, kMiddle = 2, kFactor = 1;
  static constexpr Math math(bool halves) { return U4::math(halves); }
  CPUMOE_INLINE void decode(const char* p, Codes w[]) { two_bits_in_order(p, w); }
};

}  // namespace cpumoe::CPUMOE_NS

// How class int8 rounds activations: the only definition, which every pack and store_mid follows bit
// for bit.
//
//   amax = max |x| over kActGroup inputs of one token (the last group of a token may be shorter)
//   scale = amax / 127,  code = x * (127 / amax) to the nearest integer, ties to even
//
// each operation in fp32. amax below 2^-100: scale and codes are 0. A NaN or an infinity in the
// group: scale is NaN and the codes are 0, so that every output of the token is NaN.
#pragma once
#include "base/types.h"

namespace cpumoe {

inline constexpr int64_t kActGroup = 32;
inline constexpr float kActTiny = 7.888609052210118e-31f;  // 2^-100

// Scale and reciprocal of a group with this amax (NaN or infinity: amax is one, too).
CPUMOE_INLINE float act_scale(float amax) {
  if (!(amax <= 3.4028234663852886e38f)) return bits_to_float(0x7fc00000u);
  return amax < kActTiny ? 0.0f : amax / 127.0f;
}
CPUMOE_INLINE float act_inverse(float amax) {
  return amax >= kActTiny && amax <= 3.4028234663852886e38f ? 127.0f / amax : 0.0f;
}
// Nearest integer, ties to even, of |v| <= 2^22, without the floating-point environment.
CPUMOE_INLINE int32_t round_to_even(float v) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: the sum's last bit is one
  return int32_t(float_to_bits(v + magic) & 0x7fffffu) - 0x400000;
}
// Group of `count` inputs; codes past them up to kActGroup become 0. Returns the scale.
CPUMOE_INLINE float quantize_group(const float* x, int64_t count, int8_t* codes) {
  float amax = 0;
  bool bad = false;
  for (int64_t i = 0; i < count; ++i) {
    const float a = bits_to_float(float_to_bits(x[i]) & 0x7fffffffu);
    bad = bad || !(a <= 3.4028234663852886e38f);
    amax = a > amax ? a : amax;
  }
  const float inverse = bad ? 0.0f : act_inverse(amax);
  for (int64_t i = 0; i < count; ++i)
    codes[i] = inverse == 0 ? int8_t(0) : int8_t(round_to_even(x[i] * inverse));
  for (int64_t i = count; i < kActGroup; ++i) codes[i] = 0;
  return bad ? bits_to_float(0x7fc00000u) : act_scale(amax);
}

}  // namespace cpumoe

// Scalar types and element codes. Everything here is always inlined, so that a file compiled for a
// newer ISA emits no weak copy of it that the linker could hand to an older CPU.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#define CPUMOE_INLINE static inline __attribute__((always_inline, unused))

namespace cpumoe {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// How stored elements are read (codes.inc).
enum class Code : uint8_t {
#define CPUMOE_CODE(code, name, elements, lines, bytes) code,
#include "base/codes.inc"
#undef CPUMOE_CODE
};

// Elements of a line and lines in a block, and its bytes.
struct CodeBlock {
  int32_t elements, lines, bytes;
};
CPUMOE_INLINE constexpr CodeBlock code_block(Code c) {
  switch (c) {
#define CPUMOE_CODE(code, name, elements, lines, bytes) \
  case Code::code:                                      \
    return {elements, lines, bytes};
#include "base/codes.inc"
#undef CPUMOE_CODE
  }
  return {1, 1, 0};
}
CPUMOE_INLINE const char* code_name(Code c) {
  switch (c) {
#define CPUMOE_CODE(code, name, elements, lines, bytes) \
  case Code::code:                                      \
    return name;
#include "base/codes.inc"
#undef CPUMOE_CODE
  }
  return "";
}
// fp32, fp16, bf16: what activations, biases and norms may be.
CPUMOE_INLINE constexpr bool is_float(Code c) {
  return c == Code::f32 || c == Code::f16 || c == Code::bf16;
}
// Of a code with one element to a block.
CPUMOE_INLINE size_t code_bits(Code c) { return size_t(code_block(c).bytes) * 8; }

CPUMOE_INLINE float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
CPUMOE_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
CPUMOE_INLINE float to_float(bf16 v) { return bits_to_float(uint32_t(v.bits) << 16); }
// Round to nearest even; a NaN stays a (quiet) NaN.
CPUMOE_INLINE bf16 to_bf16(float f) {
  const uint32_t u = float_to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40u)};
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
CPUMOE_INLINE float to_float(fp16 v) {
  const uint32_t sign = uint32_t(v.bits & 0x8000u) << 16, exp = (v.bits >> 10) & 31u;
  const uint32_t man = v.bits & 0x3ffu;
  if (exp == 31) return bits_to_float(sign | 0x7f800000u | (man << 13));
  if (exp == 0) {  // zero and subnormals: man * 2^-24, exact in fp32
    const float f = float(man) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  return bits_to_float(sign | ((exp + 112u) << 23) | (man << 13));
}
// Round to nearest even, overflow to infinity, as VCVTPS2PH does.
CPUMOE_INLINE fp16 to_fp16(float f) {
  const uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {uint16_t(sign | 0x7e00u | ((a >> 13) & 0x3ffu))};
  if (a >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};
  if (a < 0x38800000u) {  // subnormal half: let the fp32 adder round at 2^-24
    const float r = bits_to_float(a) + 0.5f;
    return {uint16_t(sign | (float_to_bits(r) - 0x3f000000u))};
  }
  return {uint16_t(sign | ((a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13))};
}
// NaN = 0x7f, 0xff. Through fp16, which holds every e4m3 value times 2^-8.
CPUMOE_INLINE float e4m3_to_float(uint8_t u) {
  if ((u & 0x7fu) == 0x7fu) return bits_to_float(0x7fc00000u);
  return to_float(fp16{uint16_t((u & 0x80u) << 8 | (u & 0x7fu) << 7)}) * 256.0f;
}
// 2^(u - 127); 255: NaN.
CPUMOE_INLINE float e8m0_to_float(uint8_t u) {
  return bits_to_float(u == 255 ? 0x7fc00000u : u == 0 ? 0x00400000u : uint32_t(u) << 23);
}
// 0 .5 1 1.5 2 3 4 6 and their negatives. fp16 has the same fields, wider.
CPUMOE_INLINE float e2m1_to_float(uint32_t u) {
  const float f = to_float(fp16{uint16_t((u & 7u) << 9)}) * 16384.0f;
  return (u & 8u) != 0 ? -f : f;
}
// Element i of an array of `c`, one of the float codes.
CPUMOE_INLINE float load_as_float(const void* p, Code c, int64_t i) {
  if (c == Code::f32) {
    float f;
    memcpy(&f, static_cast<const char*>(p) + i * 4, 4);
    return f;
  }
  uint16_t u;
  memcpy(&u, static_cast<const char*>(p) + i * 2, 2);
  return c == Code::bf16 ? to_float(bf16{u}) : to_float(fp16{u});
}
CPUMOE_INLINE void store_from_float(void* p, Code c, int64_t i, float f) {
  if (c == Code::f32) {
    memcpy(static_cast<char*>(p) + i * 4, &f, 4);
    return;
  }
  const uint16_t u = c == Code::bf16 ? to_bf16(f).bits : to_fp16(f).bits;
  memcpy(static_cast<char*>(p) + i * 2, &u, 2);
}

CPUMOE_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
CPUMOE_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
CPUMOE_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
CPUMOE_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// A row-major matrix that somebody else owns. `stride`: elements between rows; rows have unit step.
struct MatrixView {
  const void* data = nullptr;
  Code code = Code::f32;
  int64_t rows = 0, cols = 0, stride = 0;
};
// A vector that somebody else owns (bias, norm weight), absent when data is null. `step`: elements.
struct VectorView {
  const void* data = nullptr;
  Code code = Code::f32;
  int64_t size = 0, step = 1;
};

}  // namespace cpumoe

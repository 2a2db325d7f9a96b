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

// How one stored element is read. Kernels are written per code, never per named format.
enum class Code : uint8_t { f32, f16, bf16 };

CPUMOE_INLINE size_t code_bits(Code c) { return c == Code::f32 ? 32 : 16; }
CPUMOE_INLINE const char* code_name(Code c) {
  return c == Code::f32 ? "fp32" : c == Code::f16 ? "fp16" : "bf16";
}

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
// Element i of an array of `c`.
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

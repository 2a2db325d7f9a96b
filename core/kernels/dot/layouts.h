// Packed activation layouts: where input k of token m lies. K16 is K rounded up to a multiple of
// 16, K32 to one of 32.
//
// Class fp32:
//
//   rows            token after token, K16 floats each; inputs K..K16-1 are zero
//   rows_even_odd   the same, but of every 16 inputs the 8 even ones come first:
//                     0 2 4 6 8 10 12 14 | 1 3 5 7 9 11 13 15 | 16 18 ...
//                   (two bf16 weights share 32 bits: a shift yields the even one, a mask the odd)
//   rows_scaled     token after token; of every 32 inputs 0 4 8 .. 28 come first, then 1 5 .. 29,
//                   2 6 .. 30, 3 7 .. 31, each 128 inputs times a power of two; zeros behind K up to
//                   K32. Behind them a factor for every 128, lines padded to 64 bytes (RowsScaled).
//   rows_scaled64   likewise 0 4 8 .. 60, 1 5 .. 61 and so on of every 64 inputs
//   rows_scaled128  likewise 0 8 16 .. 120, 1 9 .. 121 and so on of every 128 inputs
//   panels8         8 tokens side by side, one line of 8 floats per input:
//                     input 0: t0 t1 .. t7 | input 1: t0 t1 .. t7 | ...
//                   panel p starts at p * K * 8; tokens past the last are zero
//
// Class bf16:
//   bf16_rows       token after token, K32 bf16 each; inputs K..K32-1 are zero
//
// Class int8 (rounding: quantize.h):
//   int8_rows       token after token: K32 codes, zeros behind K, then K32 / 32 fp32 scales; lines
//                   padded to 64 bytes
//   int8_quads, int8_quads_high, int8_pairs, int8_fours
//                   token after token, spans of 256 inputs, 448 bytes each (Spans); zeros behind K.
//                   A span's 8 groups lie side by side in 8 lanes of 4 codes, so that a register
//                   never holds two scales for one lane and nothing is summed across lanes:
//                     8 vectors of [lane][4 codes] | fp32 [8] scales | fp32 [8] scale * sum of the
//                     codes, of the first 16 and of the last 16 | s16 [8][2] minus the sums of each
//                     lane's codes 0, 1 and 2, 3: of all vectors and of the first four
//                   Vectors 0..3 hold the first 16 inputs of a group. Which lane a group takes and
//                   where its inputs lie is what unpacking a code's bits yields for free (Quads ..
//                   Fours).
//   int8_lines2, int8_lines4
//                   token after token, chunks of 128 or 256 inputs, as many as 64 bytes hold of two
//                   or four codes a byte; zeros behind K (Lines):
//                     per code of a byte 64 codes: input kCodes * b + j in byte b of plane j |
//                     fp32 [16] scales of 4 bytes each | s32 [16] minus the sums of their codes
#pragma once
#include "base/types.h"
#include "kernels/dot/quantize.h"

namespace cpumoe {

struct Rows {
  static constexpr bool kEvenOdd = false;
  CPUMOE_INLINE int64_t pos(int64_t m, int64_t k, int64_t inputs) {
    return m * round_up(inputs, 16) + k;
  }
  CPUMOE_INLINE int64_t floats(int64_t tokens, int64_t inputs) {
    return tokens * round_up(inputs, 16);
  }
};
struct RowsEvenOdd {
  static constexpr bool kEvenOdd = true;
  CPUMOE_INLINE int64_t pos(int64_t m, int64_t k, int64_t inputs) {
    return m * round_up(inputs, 16) + (k & ~int64_t(15)) + ((k & 1) << 3) + ((k & 15) >> 1);
  }
  CPUMOE_INLINE int64_t floats(int64_t tokens, int64_t inputs) {
    return tokens * round_up(inputs, 16);
  }
};
// Weights of 4 and 8 bits moved to the exponent and mantissa of an fp32 are 2^-120 of their value,
// down to its subnormals. With activations just below overflow the products are normal numbers, and
// the factor 2^(120 - e) of a group takes both powers of two back.
// Lane i of vector j of a chunk holds its input kStep * i + j.
template <int64_t kInputs, int64_t kWidth>
struct RowsScaledBy {
  static constexpr int64_t kGroup = 128, kChunk = kInputs, kLanes = kWidth,
                           kStep = kChunk / kLanes;
  CPUMOE_INLINE int64_t line(int64_t inputs) {
    return round_up(round_up(inputs, kChunk) + ceil_div(inputs, kGroup), 16);
  }
  CPUMOE_INLINE int64_t pos(int64_t m, int64_t k, int64_t inputs) {
    const int64_t i = k % kChunk;
    return m * line(inputs) + (k - i) + i % kStep * kLanes + i / kStep;
  }
  CPUMOE_INLINE int64_t factor(int64_t m, int64_t group, int64_t inputs) {
    return m * line(inputs) + round_up(inputs, kChunk) + group;
  }
  // e of a group: the largest magnitude (bits without sign) comes just below 2^127, or is taken
  // times 2^126.
  CPUMOE_INLINE int32_t exponent(uint32_t amax_bits) {
    const int32_t e = 253 - int32_t(amax_bits >> 23);
    return e > 126 ? 126 : e < -1 ? -1 : e;
  }
  CPUMOE_INLINE float power(int32_t e) { return bits_to_float(uint32_t(e + 127) << 23); }
};
using RowsScaled = RowsScaledBy<32, 8>;
using RowsScaled64 = RowsScaledBy<64, 16>;
using RowsScaled128 = RowsScaledBy<128, 16>;
struct Panels8 {
  CPUMOE_INLINE int64_t pos(int64_t m, int64_t k, int64_t inputs) {
    return (m >> 3) * inputs * 8 + k * 8 + (m & 7);
  }
  CPUMOE_INLINE int64_t floats(int64_t tokens, int64_t inputs) {
    return ceil_div(tokens, 8) * 8 * inputs;
  }
};

struct Bf16Rows {
  CPUMOE_INLINE int64_t line(int64_t inputs) { return round_up(inputs, 32); }
};

struct Int8Rows {
  CPUMOE_INLINE int64_t line_bytes(int64_t inputs) {
    return round_up(ceil_div(inputs, kActGroup) * (kActGroup + 4), 64);
  }
  CPUMOE_INLINE int64_t code(int64_t m, int64_t k, int64_t inputs) {
    return m * line_bytes(inputs) + k;
  }
  // Byte of the scale of group g.
  CPUMOE_INLINE int64_t scale(int64_t m, int64_t g, int64_t inputs) {
    return m * line_bytes(inputs) + round_up(inputs, kActGroup) + g * 4;
  }
};

struct Spans {
  static constexpr int64_t kInputs = 256, kGroups = 8;
  static constexpr int64_t kScale = 256, kSum = 288, kFirstSum = 320, kLastSum = 352,
                           kMinusAll = 384, kMinusFirst = 416, kBytes = 448;
  CPUMOE_INLINE int64_t line_bytes(int64_t inputs) { return ceil_div(inputs, kInputs) * kBytes; }
};
// lane(g): of group g of a span. Input e of a group: code byte(e) of its lane in vector(e).
struct Quads {
  static constexpr int lane(int g) { return g / 2 + g % 2 * 4; }
  static constexpr int vector(int e) { return e / 4; }
  static constexpr int byte(int e) { return e % 4; }
};
struct QuadsHigh {  // q6_k: groups 2, 3, 6, 7 come from high nibbles
  static constexpr int lane(int g) { return g % 2 + g / 4 * 2 + g / 2 % 2 * 4; }
  static constexpr int vector(int e) { return e / 4; }
  static constexpr int byte(int e) { return e % 4; }
};
struct Pairs {  // even inputs, then odd ones
  static constexpr int lane(int g) { return g / 2 + g % 2 * 4; }
  static constexpr int vector(int e) { return e / 16 * 4 + e % 2 * 2 + e / 8 % 2; }
  static constexpr int byte(int e) { return e % 8 / 2; }
};
struct Fours {  // every fourth input
  static constexpr int lane(int g) { return QuadsHigh::lane(g); }
  static constexpr int vector(int e) { return e / 16 * 4 + e % 4; }
  static constexpr int byte(int e) { return e % 16 / 4; }
};

// kCodes: of a byte of weights.
template <int kCodes>
struct Lines {
  static constexpr int64_t kInputs = 64 * kCodes, kScale = 64 * kCodes, kMinus = kScale + 64,
                           kBytes = kMinus + 64;
  static constexpr int64_t kLanes = 8 / kCodes;  // of a group of 32 inputs
  CPUMOE_INLINE int64_t line_bytes(int64_t inputs) { return ceil_div(inputs, kInputs) * kBytes; }
};
using Lines2 = Lines<2>;
using Lines4 = Lines<4>;

}  // namespace cpumoe

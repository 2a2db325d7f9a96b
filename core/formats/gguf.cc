// Bytes of a block in the order they are listed; all numbers little-endian, d and m fp16.
//
//   q8_0        0 d, 2 codes s8[32]                              w = q d
//   q4_0        0 d, 2 nibbles[16]                               w = d (q - 8)
//   q4_1        0 d, 2 m, 4 nibbles[16]                          w = d q + m
//   q5_0        0 d, 2 fifth bits u32, 6 nibbles[16]             w = d (q - 16)
//   q5_1        0 d, 2 m, 4 fifth bits u32, 8 nibbles[16]        w = d q + m
//   iq4_nl      0 d, 2 nibbles[16]                               w = d table[q]
//   gguf_mxfp4  0 exponent u8, 1 nibbles[16]                     w = 2^(exponent - 128) doubled[q]
//     nibbles[16]: elements 0..15 in the low halves, 16..31 in the high ones; bit i of the fifth
//     bits belongs to element i.
//
//   q2_k        0 scale and minimum nibbles u8[16], 16 codes[64], 80 d, 82 dmin
//                                                                w = (d scale) q - (dmin minimum)
//   q3_k        0 third bits[32], 32 codes[64], 96 scales[12], 108 d
//                                                                w = (d (scale - 32)) (q - 4)
//     groups of 16 elements. codes[64]: element 128 h + 32 s + j is bits 2s, 2s + 1 of byte
//     32 h + j; bit s of byte j of the third bits belongs to element 32 s + j.
//   q4_k        0 d, 2 dmin, 4 scales[12], 16 nibbles[128]       w = (d scale) q - (dmin minimum)
//   q5_k        0 d, 2 dmin, 4 scales[12], 16 fifth bits[32], 48 nibbles[128]
//   iq4_xs      0 d, 2 high scale bits u16, 4 low scale nibbles[4], 8 nibbles[128]
//                                                                w = (d (scale - 32)) table[q]
//     groups of 32 elements. q4_k, q5_k: groups 2p and 2p + 1 are the low and the high halves of
//     bytes 32 p .. 32 p + 31; fifth bits as q3_k's third ones. iq4_xs: groups as iq4_nl's blocks.
//   q6_k        0 low nibbles[128], 128 high bits[64], 192 scales s8[16], 208 d
//                                                                w = (d scale) (q - 32)
//     groups of 16. Element 128 h + 64 p + j is half p of byte 64 h + j; its bits 4 and 5 lie in
//     the high bits as q2_k's codes.
#include "formats/gguf.h"

namespace cpumoe {
namespace {

constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                             1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

uint32_t little16(const uint8_t* p) { return uint32_t(p[0]) | uint32_t(p[1]) << 8; }
uint32_t little32(const uint8_t* p) { return little16(p) | little16(p + 2) << 16; }
float half_at(const uint8_t* p) { return to_float(fp16{uint16_t(little16(p))}); }
uint32_t bits(uint32_t u, int shift, int count) { return u >> shift & ((1u << count) - 1); }
int nibble(const uint8_t* p, int half) { return int(bits(*p, 4 * half, 4)); }

// Element i of nibbles[16].
int nibble_of_32(const uint8_t* p, int i) { return nibble(p + i % 16, i / 16); }
// Element i of codes[64].
int code_of_64(const uint8_t* p, int i) {
  return int(bits(p[i / 128 * 32 + i % 32], i % 128 / 32 * 2, 2));
}
// Bit of element i in 32 bytes.
int bit_of_256(const uint8_t* p, int i) { return int(bits(p[i % 32], i / 32, 1)); }

// Six-bit scale and minimum of group g of q4_k and q5_k: those of groups 0..3 lie in the low six
// bits of bytes 0..3 and 4..7; groups 4..7 have their low nibbles in bytes 8..11 and their high
// bits in bits 6 and 7 of the bytes before.
struct ScaleMin {
  float scale, minimum;
};
ScaleMin scale_min(const uint8_t* p, int g) {
  if (g < 4) return {float(p[g] & 63), float(p[g + 4] & 63)};
  return {float(bits(p[g + 4], 0, 4) | bits(p[g - 4], 6, 2) << 4),
          float(bits(p[g + 4], 4, 4) | bits(p[g], 6, 2) << 4)};
}
// Of q3_k: low nibbles in bytes 0..7 (groups 0..7 the low halves), high bits in bytes 8..11.
int scale_q3(const uint8_t* p, int g) {
  return int(bits(p[g % 8], g / 8 * 4, 4) | bits(p[8 + g % 4], g / 4 * 2, 2) << 4) - 32;
}
int scale_iq4(const uint8_t* p, int g) {
  return int(bits(p[4 + g / 2], g % 2 * 4, 4) | bits(little16(p + 2), g * 2, 2) << 4) - 32;
}

}  // namespace

void decode_gguf_block(Code c, const void* block, float* out) {
  const uint8_t* p = static_cast<const uint8_t*>(block);
  const int count = code_block(c).elements;
  const auto fill = [&](auto value) {
    for (int i = 0; i < count; ++i) out[i] = value(i);
  };
  switch (c) {
    case Code::q8_0:
      return fill([&, d = half_at(p)](int i) { return float(int8_t(p[2 + i])) * d; });
    case Code::q4_0:
      return fill([&, d = half_at(p)](int i) { return d * float(nibble_of_32(p + 2, i) - 8); });
    case Code::q4_1:
      return fill([&, d = half_at(p), m = half_at(p + 2)](int i) {
        const float scaled = d * float(nibble_of_32(p + 4, i));
        return scaled + m;
      });
    case Code::q5_0:
      return fill([&, d = half_at(p), high = little32(p + 2)](int i) {
        return d * float((nibble_of_32(p + 6, i) | int(bits(high, i, 1) << 4)) - 16);
      });
    case Code::q5_1:
      return fill([&, d = half_at(p), m = half_at(p + 2), high = little32(p + 4)](int i) {
        const float scaled = d * float(nibble_of_32(p + 8, i) | int(bits(high, i, 1) << 4));
        return scaled + m;
      });
    case Code::iq4_nl:
      return fill([&, d = half_at(p)](int i) { return d * float(kIq4[nibble_of_32(p + 2, i)]); });
    case Code::gguf_mxfp4: {
      // 2^(exponent - 128); 255 is an exponent like any other.
      const float d = bits_to_float(p[0] < 2 ? 0x00200000u << p[0] : uint32_t(p[0] - 1) << 23);
      return fill([&](int i) { return d * float(kE2m1Doubled[nibble_of_32(p + 1, i)]); });
    }
    case Code::q2_k:
      return fill([&, d = half_at(p + 80), dmin = half_at(p + 82)](int i) {
        const float scale = d * float(nibble(p + i / 16, 0));
        const float minimum = dmin * float(nibble(p + i / 16, 1));
        const float scaled = scale * float(code_of_64(p + 16, i));
        return scaled - minimum;
      });
    case Code::q3_k:
      return fill([&, d = half_at(p + 108)](int i) {
        const float scale = d * float(scale_q3(p + 96, i / 16));
        return scale * float((code_of_64(p + 32, i) | bit_of_256(p, i) << 2) - 4);
      });
    case Code::q4_k:
    case Code::q5_k: {
      const float d = half_at(p), dmin = half_at(p + 2);
      const bool five = c == Code::q5_k;
      const uint8_t* q = p + (five ? 48 : 16);
      return fill([&](int i) {
        const ScaleMin s = scale_min(p + 4, i / 32);
        const int low = nibble(q + i / 64 * 32 + i % 32, i / 32 % 2);
        const float scale = d * s.scale, minimum = dmin * s.minimum;
        const float scaled = scale * float(five ? low | bit_of_256(p + 16, i) << 4 : low);
        return scaled - minimum;
      });
    }
    case Code::q6_k:
      return fill([&, d = half_at(p + 208)](int i) {
        const float scale = d * float(int8_t(p[192 + i / 16]));
        const int low = nibble(p + i / 128 * 64 + i % 64, i / 64 % 2);
        return scale * float((low | code_of_64(p + 128, i) << 4) - 32);
      });
    case Code::iq4_xs:
      return fill([&, d = half_at(p)](int i) {
        const float scale = d * float(scale_iq4(p, i / 32));
        return scale * float(kIq4[nibble_of_32(p + 8 + i / 32 * 16, i % 32)]);
      });
    default:
      return;
  }
}

}  // namespace cpumoe

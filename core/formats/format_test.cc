#include "formats/format.h"

#include <bit>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "testing/test.h"

namespace cpumoe {
namespace {

TEST(formats_are_found_by_name) {
  int count = 0;
  const Format* all = formats(&count);
  std::set<std::string> names;
  for (int i = 0; i < count; ++i) {
    CHECK(find_format(all[i].name) == &all[i]);
    CHECK(names.insert(all[i].name).second);
  }
  CHECK_EQ(std::string(find_format("bf16")->name), std::string("bf16"));
  CHECK(find_format("bf16")->code == Code::bf16);
  CHECK(find_format("fp32")->code == Code::f32);
  CHECK(find_format("") == nullptr);
  CHECK(find_format("bf1") == nullptr);
  CHECK(find_format("BF16") == nullptr);
}

// The value of a 16-bit float from the definition of its fields.
double value_of(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = int(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double fraction = std::ldexp(double(bits & ((1u << mantissa_bits) - 1)), -mantissa_bits);
  const double sign = (bits >> (exponent_bits + mantissa_bits)) & 1 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1 + fraction, exponent - bias);
}

TEST(every_code_decodes_to_its_definition) {
  for (const char* name : {"fp16", "bf16"}) {
    const bool half = std::string(name) == "fp16";
    std::vector<uint16_t> codes(65536);
    for (uint32_t i = 0; i < 65536; ++i) codes[i] = uint16_t(i);
    const WeightView w{find_format(name), Layout::rows, 256, 256, 256, codes.data()};
    for (int64_t i = 0; i < 65536; ++i) {
      const float got = decode_weight(w, i / 256, i % 256);
      const double want = half ? value_of(uint32_t(i), 5, 10) : value_of(uint32_t(i), 8, 7);
      CHECK_MSG(std::isnan(want) ? std::isnan(got) : got == float(want), name << " code " << i);
      CHECK_EQ(std::signbit(got), i >= 32768);
      // Back: rounding an exact value returns its code.
      const uint16_t back = half ? to_fp16(got).bits : to_bf16(got).bits;
      CHECK_MSG(std::isnan(want) ? std::isnan(half ? to_float(fp16{back}) : to_float(bf16{back}))
                                 : back == uint16_t(i),
                name << " code " << i << " came back as " << back);
    }
  }
}

TEST(rounding_goes_to_the_nearest_code_and_to_even) {
  for (const bool half : {true, false}) {
    const int exponent_bits = half ? 5 : 8, mantissa_bits = half ? 10 : 7;
    const auto round = [&](float f) { return half ? to_fp16(f).bits : to_bf16(f).bits; };
    for (uint32_t i = 0; i + 1 < (half ? 0x7c00u : 0x7f80u); ++i) {
      const double a = value_of(i, exponent_bits, mantissa_bits);
      const double b = value_of(i + 1, exponent_bits, mantissa_bits);
      if (std::isinf(b)) continue;
      const float middle = float((a + b) / 2);
      CHECK_EQ(round(middle), uint16_t(i + (i & 1)));
      CHECK_EQ(round(std::nextafter(middle, 0.0f)), uint16_t(middle == 0 ? 0 : i));
      CHECK_EQ(round(std::nextafter(middle, INFINITY)), uint16_t(i + 1));
      CHECK_EQ(round(-middle), uint16_t((i + (i & 1)) | 0x8000u));
    }
    CHECK_EQ(round(3.4e38f), uint16_t(half ? 0x7c00 : 0x7f80));
    CHECK_EQ(round(INFINITY), uint16_t(half ? 0x7c00 : 0x7f80));
    CHECK(round(65519.0f) == 0x7bff || !half);
    CHECK(round(65520.0f) == 0x7c00 || !half);
  }
}

TEST(layouts_and_strides_address_elements) {
  const float data[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  const WeightView rows{find_format("fp32"), Layout::rows, 3, 2, 4, data};
  CHECK_EQ(decode_weight(rows, 2, 1), 9.0f);
  const WeightView columns{find_format("fp32"), Layout::columns, 3, 2, 4, data};
  CHECK_EQ(decode_weight(columns, 2, 1), 6.0f);
  CHECK_EQ(weight_bytes(columns), 24);
}

}  // namespace
}  // namespace cpumoe

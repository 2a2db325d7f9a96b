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

// ---- codes, one exhaustive table each

WeightView view_of(const char* name, Layout layout, int64_t n, int64_t k, const void* data) {
  WeightView w{find_format(name), layout, n, k, 0, data};
  w.stride = round_up(layout == Layout::rows ? k : n, code_block(w.format->code).elements);
  return w;
}

TEST(e4m3_has_448_subnormals_and_two_nans) {
  std::vector<uint8_t> codes(256);
  for (int i = 0; i < 256; ++i) codes[size_t(i)] = uint8_t(i);
  const float one = 1;
  WeightView w = view_of("fp8_tensor", Layout::rows, 1, 256, codes.data());
  w.scales = {&one, Code::f32, 1, 1, 1};
  for (int i = 0; i < 256; ++i) {
    const int exponent = i >> 3 & 15, mantissa = i & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    const float got = decode_weight(w, 0, i);
    if ((i & 127) == 127) {
      CHECK(std::isnan(got));
    } else {
      CHECK_EQ(double(std::fabs(got)), magnitude);
      CHECK_EQ(std::signbit(got), i >= 128);
    }
  }
  CHECK_EQ(decode_weight(w, 0, 0x7e), 448.0f);
}

TEST(e8m0_is_a_power_of_two) {
  for (int i = 0; i < 255; ++i) CHECK_EQ(double(e8m0_to_float(uint8_t(i))), std::ldexp(1, i - 127));
  CHECK(std::isnan(e8m0_to_float(255)));
}

TEST(e2m1_has_eight_magnitudes) {
  const float magnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const uint8_t codes[] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
  const float one = 1;
  WeightView w = view_of("mxfp4", Layout::rows, 1, 16, codes);
  w.scales = {&one, Code::f32, 1, 1, 1};
  for (int i = 0; i < 16; ++i) {
    const float got = decode_weight(w, 0, i);
    CHECK_EQ(std::fabs(got), magnitudes[i % 8]);
    CHECK_EQ(std::signbit(got), i >= 8);
  }
}

// Every code of an integer format, in order; the last bytes hold what fits.
void check_integers(const char* name, int bits, int bytes, int zero) {
  const int64_t count = int64_t(bytes) * 8 / bits;
  std::vector<uint8_t> data(static_cast<size_t>(bytes));
  for (int64_t i = 0; i < count; ++i) {
    for (int b = 0; b < bits; ++b) {
      const int64_t at = i * bits + b;
      data[size_t(at / 8)] |= uint8_t((i >> b & 1) << (at % 8));
    }
  }
  const float scale = 0.75f;
  WeightView w = view_of(name, Layout::rows, 1, count, data.data());
  w.scales = {&scale, Code::f32, 1, 1, 1};
  CHECK_EQ(weight_fault(w), std::string());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t code = i & ((int64_t(1) << bits) - 1);
    CHECK_EQ(decode_weight(w, 0, i), float(code - zero) * scale);
  }
}

TEST(unsigned_codes_have_the_middle_zero_point) {
  check_integers("u8_row", 8, 256, 128);
  check_integers("int4_row", 4, 8, 8);
  check_integers("u3_row", 3, 9, 4);  // codes that cross bytes, three times over
  check_integers("u2_row", 2, 3, 2);
}

TEST(s8_is_signed) {
  std::vector<uint8_t> codes(256);
  for (int i = 0; i < 256; ++i) codes[size_t(i)] = uint8_t(i);
  const uint16_t half = 0x3800;  // 0.5
  WeightView w = view_of("int8_row", Layout::rows, 1, 256, codes.data());
  w.scales = {&half, Code::f16, 1, 1, 1};
  for (int i = 0; i < 256; ++i) CHECK_EQ(decode_weight(w, 0, i), float(int8_t(i)) / 2);
}

TEST(words_of_gptq_run_down_inputs_and_of_awq_along_features) {
  const uint32_t words[] = {0x76543210, 0xfedcba98};
  const float scales[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  const uint8_t zeros[8] = {0, 1, 0, 0, 0, 0, 0, 0};
  WeightView w = view_of("gptq4_v2_row", Layout::columns, 2, 8, words);
  w.scales = {scales, Code::f32, 1, 2, 2};
  w.zeros = {zeros, Code::u8, 1, 2, 2};
  CHECK_EQ(weight_fault(w), std::string());
  for (int64_t i = 0; i < 8; ++i) {
    CHECK_EQ(decode_weight(w, 0, i), float(i));
    CHECK_EQ(decode_weight(w, 1, i), float(8 + i - 1));
  }
  w.format = find_format("gptq4_row");  // stored less one
  for (int64_t i = 0; i < 8; ++i) CHECK_EQ(decode_weight(w, 1, i), float(8 + i - 2));

  WeightView bytes = view_of("gptq8_v2_row", Layout::columns, 2, 4, words);
  bytes.scales = w.scales;
  bytes.zeros = w.zeros;
  for (int64_t i = 0; i < 4; ++i) {
    CHECK_EQ(decode_weight(bytes, 0, i), float(words[0] >> (8 * i) & 255));
    CHECK_EQ(decode_weight(bytes, 1, i), float(words[1] >> (8 * i) & 255) - 1);
  }

  const int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // nibble j holds this feature
  const uint8_t none[8] = {};
  WeightView awq = view_of("awq4_row", Layout::columns, 8, 1, words);
  awq.scales = {scales, Code::f32, 1, 8, 8};
  awq.zeros = {none, Code::u8, 1, 8, 8};
  for (int j = 0; j < 8; ++j) CHECK_EQ(decode_weight(awq, order[j], 0), float(j));
  awq.zeros = {&words[1], Code::u4_awq, 1, 8, 8};
  for (int j = 0; j < 8; ++j) CHECK_EQ(decode_weight(awq, order[j], 0), float(j - (8 + j)));
}

// ---- grids

TEST(grids_may_be_ragged_at_both_edges) {
  const int64_t n = 130, k = 257;
  std::vector<uint8_t> codes(size_t(n * k), 0x38);  // 1.0
  float scales[6];
  for (int i = 0; i < 6; ++i) scales[i] = float(i + 1);
  WeightView w = view_of("fp8_block", Layout::rows, n, k, codes.data());
  w.scales = {scales, Code::f32, 2, 3, 3};
  w.global_scale = 0.5f;
  CHECK_EQ(weight_fault(w), std::string());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      CHECK_EQ(decode_weight(w, i, j), float(1 + i / 128 * 3 + j / 128) / 2);
    }
  }
  // The same in columns: scales transposed.
  WeightView t = view_of("fp8_block", Layout::columns, k, n, codes.data());
  t.scales = {scales, Code::f32, 2, 3, 3};
  CHECK_EQ(weight_fault(t), std::string());
  CHECK_EQ(decode_weight(t, 256, 129), 6.0f);
  CHECK_EQ(decode_weight(t, 128, 127), 2.0f);
}

TEST(lines_decode_as_their_elements) {
  std::vector<uint8_t> codes(4096);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = uint8_t(i * 37 + i / 251);
  std::vector<float> scales(4096);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = float(i % 13) - 6.5f;
  std::vector<uint8_t> zeros(4096);
  for (size_t i = 0; i < zeros.size(); ++i) zeros[i] = uint8_t(i * 5);
  int count = 0;
  const Format* all = formats(&count);
  for (int f = 0; f < count; ++f) {
    const CodeBlock b = code_block(all[f].code);
    for (const Layout layout : {Layout::rows, Layout::columns}) {
      const int64_t n = layout == Layout::rows ? 2 : 24, k = layout == Layout::rows ? 256 : 8;
      WeightView w = view_of(all[f].name, layout, n, k, codes.data());
      if (int64_t(codes.size()) < weight_bytes(w)) w.n = n / 2;
      if (all[f].scaled()) {
        const int64_t along = ceil_div(n, all[f].scale_rows),
                      across = ceil_div(k, all[f].scale_cols);
        const bool rows = layout == Layout::rows;
        w.scales = {scales.data(), Code::f32, rows ? along : across, rows ? across : along,
                    round_up(max64(along, across), 8)};
        if (all[f].stored_zeros()) {
          w.zeros = w.scales;
          w.zeros.data = zeros.data();
          w.zeros.code = Code::u8;
        }
      }
      if (!weight_fault(w).empty()) continue;  // not in this layout
      const int64_t lines = layout == Layout::rows ? w.n : w.k,
                    length = layout == Layout::rows ? w.k : w.n;
      std::vector<float> line(static_cast<size_t>(length));
      for (int64_t l = 0; l < lines; ++l) {
        decode_line(w, l, 0, length, line.data());
        for (int64_t i = 0; i < length; ++i) {
          const bool rows = layout == Layout::rows;
          const float one = decode_weight(w, rows ? l : i, rows ? i : l);
          CHECK(float_to_bits(one) == float_to_bits(line[size_t(i)]));
        }
        float part[5];
        decode_line(w, l, 3, 8, part);
        for (int i = 0; i < 5; ++i) {
          CHECK(float_to_bits(part[i]) == float_to_bits(line[size_t(i + 3)]));
        }
      }
      // Parts of features keep their scales and zero points.
      const int64_t step = feature_step(w);
      if (step >= w.n || step < b.elements / (layout == Layout::rows ? b.elements : 1)) continue;
      const WeightView part = features_of(w, step, w.n - step);
      CHECK_EQ(weight_fault(part), std::string());
      for (int64_t i = 0; i < part.n; ++i) {
        for (int64_t j = 0; j < part.k; ++j) {
          CHECK(float_to_bits(decode_weight(part, i, j)) ==
                float_to_bits(decode_weight(w, i + step, j)));
        }
      }
    }
  }
}

TEST(features_are_told_apart_in_whole_blocks) {
  const char data[64] = {};
  CHECK_EQ(feature_step(view_of("bf16", Layout::rows, 4, 8, data)), 1);
  CHECK_EQ(feature_step(view_of("fp8_block", Layout::rows, 256, 8, data)), 128);
  CHECK_EQ(feature_step(view_of("fp8_tensor", Layout::rows, 4, 8, data)), 1);
  CHECK_EQ(feature_step(view_of("int4_g32", Layout::columns, 8, 8, data)), 2);
  CHECK_EQ(feature_step(view_of("awq4_g32", Layout::columns, 8, 8, data)), 8);
  WeightView w = view_of("gptq4_g32", Layout::columns, 8, 8, data);
  w.zeros.code = Code::u4;
  CHECK_EQ(feature_step(w), 2);
}

// ---- refusals

TEST(faults_say_what_must_hold) {
  const char data[4096] = {};
  const auto has = [](const WeightView& w, const char* part) {
    const std::string fault = weight_fault(w);
    CHECK_MSG(fault.find(part) != std::string::npos, fault << " lacks " << part);
  };
  has({}, "must have a format");
  has(view_of("bf16", Layout::rows, 4, 8, nullptr), "must have data");
  has(view_of("gptq4_g32", Layout::rows, 8, 8, data), "gptq4_g32 must be in columns layout");
  has(view_of("awq4_g32", Layout::rows, 8, 8, data), "must be in columns layout; got rows");
  has(view_of("q4_k", Layout::columns, 256, 8, data), "q4_k must be in rows layout");
  has(view_of("u3_row", Layout::columns, 8, 8, data), "must be in rows layout");
  has(view_of("q4_k", Layout::rows, 1, 300, data), "whole blocks of 256 inputs; got 300");
  has(view_of("gptq4_g32", Layout::columns, 8, 12, data), "whole blocks of 8 inputs; got 12");
  WeightView w = view_of("int4_g32", Layout::rows, 2, 40, data);
  has(w, "scales must be present, [2, 2]; got none");
  w.stride = 38;
  has(w, "stride of at least 40 elements in whole blocks of 2; got 38");
  w.stride = 41;
  has(w, "whole blocks of 2; got 41");
  w.stride = 40;
  w.scales = {data, Code::f32, 2, 3, 3};
  has(w, "scales must be [2, 2]; got [2, 3]");
  w.scales = {data, Code::f32, 2, 2, 1};
  has(w, "scales must have a stride of at least 2 elements");
  w.scales = {data, Code::u8, 2, 2, 2};
  has(w, "scales must be fp32, fp16, bf16, e8m0 or e4m3; got u8");
  w.scales = {data, Code::e8m0, 2, 2, 2};
  CHECK_EQ(weight_fault(w), std::string());
  w.format = find_format("u4_zp_g32");
  has(w, "zeros must be present, [2, 2]; got none");
  w.zeros = {data, Code::s8, 2, 2, 2};
  has(w, "zeros must be u8, u4, u2 or u4_awq; got s8");
  w.zeros = {data, Code::u4, 2, 2, 3};
  has(w, "whole blocks of 2; got 3");
  w.zeros = {data, Code::u4, 2, 2, 2};
  CHECK_EQ(weight_fault(w), std::string());
}

}  // namespace
}  // namespace cpumoe

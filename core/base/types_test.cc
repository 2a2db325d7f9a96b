#include "base/types.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

// What the bits say, by the definition of the format (1 sign, `exponent` and `mantissa` bits).
double value_of(uint16_t bits, int exponent, int mantissa) {
  const int e = (bits >> mantissa) & ((1 << exponent) - 1), m = bits & ((1 << mantissa) - 1);
  const int bias = (1 << (exponent - 1)) - 1;
  double v = 0;
  if (e == (1 << exponent) - 1) {
    v = m == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
  } else if (e == 0) {
    v = std::ldexp(m, 1 - bias - mantissa);
  } else {
    v = std::ldexp((1 << mantissa) + m, e - bias - mantissa);
  }
  return bits >> 15 ? -v : v;
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

template <class To>
void check_rounding(int exponent, int mantissa, To to_bits) {
  const uint16_t infinity = uint16_t(((1 << exponent) - 1) << mantissa);
  for (uint32_t b = 0; b < 65536; ++b) {  // every value is its own nearest
    const double v = value_of(uint16_t(b), exponent, mantissa);
    if (std::isnan(v)) {
      CHECK(std::isnan(value_of(to_bits(float(v)), exponent, mantissa)));
    } else {
      CHECK_EQ(to_bits(float(v)), b);
    }
  }
  for (uint16_t b = 0; b < infinity; ++b) {  // between neighbours: nearest, ties to the even one
    const double lo = value_of(b, exponent, mantissa);
    const bool last = b + 1 == infinity;
    const double hi = last ? 2 * lo - value_of(uint16_t(b - 1), exponent, mantissa)
                           : value_of(uint16_t(b + 1), exponent, mantissa);
    const float middle = float((lo + hi) / 2);
    if (double(middle) != (lo + hi) / 2) continue;  // below fp32's own resolution
    const uint16_t up = uint16_t(b + 1);
    CHECK_EQ(to_bits(middle), b % 2 == 0 ? b : up);
    CHECK_EQ(to_bits(std::nextafter(middle, 0.0f)), b);
    CHECK_EQ(to_bits(std::nextafter(middle, INFINITY)), up);
    CHECK_EQ(to_bits(-middle), (b % 2 == 0 ? b : up) | 0x8000);
  }
  CHECK_EQ(to_bits(INFINITY), infinity);
  CHECK_EQ(to_bits(-INFINITY), infinity | 0x8000);
  CHECK_EQ(to_bits(std::numeric_limits<float>::max()), infinity);
  CHECK(std::isnan(value_of(to_bits(bits_to_float(0x7f800001u)), exponent, mantissa)));
}

TEST(every_16_bit_float_decodes_to_its_value) {
  for (uint32_t b = 0; b < 65536; ++b) {
    CHECK(same(to_float(fp16{uint16_t(b)}), value_of(uint16_t(b), 5, 10)));
    CHECK(same(to_float(bf16{uint16_t(b)}), value_of(uint16_t(b), 8, 7)));
  }
}
TEST(fp16_rounds_to_nearest_even) {
  check_rounding(5, 10, [](float f) { return to_fp16(f).bits; });
}
TEST(bf16_rounds_to_nearest_even) {
  check_rounding(8, 7, [](float f) { return to_bf16(f).bits; });
}

TEST(loads_and_stores_elements_at_any_address) {
  for (Code code : {Code::f32, Code::f16, Code::bf16}) {
    std::vector<char> bytes(1 + 4 * 3);
    for (int i = 0; i < 3; ++i) store_from_float(bytes.data() + 1, code, i, 1.5f * float(i - 1));
    for (int i = 0; i < 3; ++i) {
      CHECK_EQ(load_as_float(bytes.data() + 1, code, i), 1.5f * float(i - 1));
    }
  }
  CHECK_EQ(std::string(code_name(Code::bf16)), std::string("bf16"));
  CHECK_EQ(code_bits(Code::f32), 32u);
  CHECK_EQ(code_bits(Code::f16), 16u);
}

TEST(integer_helpers) {
  CHECK_EQ(ceil_div(0, 8), 0);
  CHECK_EQ(ceil_div(9, 8), 2);
  CHECK_EQ(round_up(16, 8), 16);
  CHECK_EQ(round_up(17, 8), 24);
}

TEST(buffer_grows_aligned_and_moves) {
  AlignedBuffer a;
  CHECK(a.data() == nullptr);
  float* p = a.reserve_as<float>(3);
  CHECK_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0u);
  CHECK_EQ(a.size(), 64u);
  p[15] = 1;
  CHECK(a.reserve(10) == p);  // large enough already
  a.reserve(65);
  CHECK_EQ(a.size(), 128u);
  AlignedBuffer b = std::move(a);
  CHECK_EQ(b.size(), 128u);
  CHECK_THROWS(AlignedBuffer(size_t{1} << 62), "bad_alloc");
}

TEST(require_builds_the_message) {
  require(true, "never", "shown");
  CHECK_THROWS(require(false, "route", "k must be at most ", 4, "; got ", 5, "."),
               "route: k must be at most 4; got 5.");
}

}  // namespace
}  // namespace cpumoe

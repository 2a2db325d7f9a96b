// Weights of every format as the tools that define the formats decode them (golden*.inc).
#include <bit>
#include <string>
#include <vector>

#include "formats/format.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

struct Golden {
  const char* format;
  Layout layout;
  int64_t n, k;
  float global_scale;
  const char* data;
  Code scale_code;
  int64_t scale_rows, scale_cols;
  const char* scales;
  Code zero_code;
  int64_t zero_rows, zero_cols;
  const char* zeros;
  const char* want;
};

const Golden kGolden[] = {
#define CPUMOE_GOLDEN(format, layout, n, k, global, data, scale_code, scale_rows, scale_cols, \
                      scales, zero_code, zero_rows, zero_cols, zeros, want)                   \
  {#format,          Layout::layout, n,          k,      global,          data,               \
   Code::scale_code, scale_rows,     scale_cols, scales, Code::zero_code, zero_rows,          \
   zero_cols,        zeros,          want},
#include "formats/golden.inc"
#include "formats/golden_gguf.inc"
#undef CPUMOE_GOLDEN
};

std::vector<char> from_hex(const std::string& digits) {
  std::vector<char> bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes.push_back(char(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

MatrixView grid(const std::vector<char>& bytes, Code code, int64_t rows, int64_t cols) {
  if (bytes.empty()) return {};
  return {bytes.data(), code, rows, cols, round_up(cols, code_block(code).elements)};
}

TEST(other_tools_decode_the_same_bits) {
  for (const Golden& g : kGolden) {
    const std::vector<char> data = from_hex(g.data), scales = from_hex(g.scales),
                            zeros = from_hex(g.zeros), want = from_hex(g.want);
    WeightView w;
    w.format = find_format(g.format);
    CHECK_MSG(w.format != nullptr, g.format);
    w.layout = g.layout;
    w.n = g.n;
    w.k = g.k;
    w.stride = round_up(g.layout == Layout::rows ? g.k : g.n, code_block(w.format->code).elements);
    w.data = data.data();
    w.scales = grid(scales, g.scale_code, g.scale_rows, g.scale_cols);
    w.zeros = grid(zeros, g.zero_code, g.zero_rows, g.zero_cols);
    w.global_scale = g.global_scale;
    CHECK_EQ(weight_fault(w), std::string());
    CHECK_EQ(weight_bytes(w), int64_t(data.size() + scales.size() + zeros.size()));
    CHECK_EQ(want.size(), size_t(g.n * g.k * 4));
    for (int64_t i = 0; i < g.n * g.k; ++i) {
      const float got = decode_weight(w, i / g.k, i % g.k);
      const float expected = load_as_float(want.data(), Code::f32, i);
      CHECK_MSG(
          expected != expected ? got != got : float_to_bits(got) == float_to_bits(expected),
          g.format << " at " << i / g.k << "," << i % g.k << " got " << got << " for " << expected);
    }
  }
}

}  // namespace
}  // namespace cpumoe

// What weight bytes mean. A Format is a row of formats.inc; a WeightView is bytes with a meaning.
#pragma once
#include <cstdint>
#include <string_view>

#include "base/types.h"

namespace cpumoe {

enum class ScaleType : uint8_t { none };
enum class ZeroRule : uint8_t { none };
enum class Packing : uint8_t { plain };
enum class Layout : uint8_t { rows, columns };

struct Format {
  const char* name;
  Code code;
  int32_t scale_rows, scale_cols;
  ScaleType scale_type;
  ZeroRule zero_rule;
  Packing packing;
};

// The table, its length, and look-up by name (null when unknown).
const Format* formats(int* count);
const Format* find_format(std::string_view name);

// One weight matrix W[N, K] (N output features, K inputs) that somebody else owns.
// rows:    feature n starts at data + n * stride elements, its K inputs are contiguous.
// columns: input k starts at data + k * stride elements, its N features are contiguous.
struct WeightView {
  const Format* format = nullptr;
  Layout layout = Layout::rows;
  int64_t n = 0, k = 0, stride = 0;  // elements
  const void* data = nullptr;
  const void* scales = nullptr;
  const void* zeros = nullptr;
};

inline int64_t weight_bytes(const WeightView& w) {
  return w.n * w.k * int64_t(code_bits(w.format->code)) / 8;
}
// Reference decoder, any format: W[n, k] as fp32. Slow; the oracle of every kernel test.
float decode_weight(const WeightView& w, int64_t n, int64_t k);

}  // namespace cpumoe

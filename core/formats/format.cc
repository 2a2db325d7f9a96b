#include "formats/format.h"

namespace cpumoe {
namespace {

constexpr Format kFormats[] = {
#define CPUMOE_FORMAT(name, code, scale_rows, scale_cols, scale_type, zero_rule, packing) \
  {                                                                                       \
      #name,                                                                              \
      Code::code,                                                                         \
      scale_rows,                                                                         \
      scale_cols,                                                                         \
      ScaleType::scale_type,                                                              \
      ZeroRule::zero_rule,                                                                \
      Packing::packing},
#include "formats/formats.inc"
#undef CPUMOE_FORMAT
};

}  // namespace

const Format* formats(int* count) {
  *count = int(sizeof kFormats / sizeof kFormats[0]);
  return kFormats;
}

const Format* find_format(std::string_view name) {
  for (const Format& f : kFormats) {
    if (name == f.name) return &f;
  }
  return nullptr;
}

float decode_weight(const WeightView& w, int64_t n, int64_t k) {
  const int64_t i = w.layout == Layout::rows ? n * w.stride + k : k * w.stride + n;
  return load_as_float(w.data, w.format->code, i);
}

}  // namespace cpumoe

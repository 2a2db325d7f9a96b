#include <string>

#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"

namespace cpumoe {

#define CPUMOE_DOT(isa, shape, code, layout, act_class, act_isa, act_layout, order, m_min, m_max,  \
                   m_block, n_block, n_slice)                                                     \
  namespace isa {                                                                               \
  void dot_##shape##_##layout##_##code(const DotArgs&);                                         \
  size_t scratch_##shape(int64_t n, int64_t m, int64_t k);                                      \
  }                                                                                             \
  namespace act_isa {                                                                           \
  void pack_##act_layout(const PackArgs&);                                                      \
  void mid_##act_layout(const StoreMidArgs&);                                                   \
  void out_##order(const StoreOutArgs&);                                                        \
  }
#include "kernels/dot/kernels.inc"
#undef CPUMOE_DOT

namespace {

constexpr int64_t kAnyTokens = int64_t(1) << 40;

size_t act_bytes_rows(int64_t m, int64_t k) { return size_t(Rows::floats(m, k)) * 4; }
size_t act_bytes_rows_even_odd(int64_t m, int64_t k) {
  return size_t(RowsEvenOdd::floats(m, k)) * 4;
}
size_t act_bytes_rows_scaled(int64_t m, int64_t k) { return size_t(m * RowsScaled::line(k)) * 4; }
size_t act_bytes_rows_scaled64(int64_t m, int64_t k) {
  return size_t(m * RowsScaled64::line(k)) * 4;
}
size_t act_bytes_rows_scaled128(int64_t m, int64_t k) {
  return size_t(m * RowsScaled128::line(k)) * 4;
}
size_t act_bytes_panels8(int64_t m, int64_t k) { return size_t(Panels8::floats(m, k)) * 4; }
size_t act_bytes_bf16_rows(int64_t m, int64_t k) { return size_t(m * Bf16Rows::line(k)) * 2; }
size_t act_bytes_int8_rows(int64_t m, int64_t k) { return size_t(m * Int8Rows::line_bytes(k)); }
#define CPUMOE_GROUPS(act_layout, L)                                                           \
  size_t act_bytes_##act_layout(int64_t m, int64_t k) { return size_t(m * L::line_bytes(k)); } \
  constexpr int64_t k_group_##act_layout = kActGroup;
CPUMOE_GROUPS(int8_quads, Spans)
CPUMOE_GROUPS(int8_quads_high, Spans)
CPUMOE_GROUPS(int8_pairs, Spans)
CPUMOE_GROUPS(int8_fours, Spans)
CPUMOE_GROUPS(int8_lines2, Lines2)
CPUMOE_GROUPS(int8_lines4, Lines4)
#undef CPUMOE_GROUPS

constexpr int64_t k_group_rows = 1, k_group_rows_even_odd = 1, k_group_panels8 = 1,
                  k_group_bf16_rows = 1,
                  k_group_rows_scaled = RowsScaled::kGroup,
                  k_group_rows_scaled64 = RowsScaled::kGroup,
                  k_group_rows_scaled128 = RowsScaled::kGroup, k_group_int8_rows = kActGroup;

#define CPUMOE_DOT(isa, shape, code, layout, act_class, act_isa, act_layout, order, m_min, m_max,  \
                   m_block, n_block, n_slice)                                                     \
  {#isa "_" #shape "_" #layout "_" #code,                                                       \
   Isa::isa,                                                                                    \
   Code::code,                                                                                  \
   Layout::layout,                                                                              \
   ActClass::act_class,                                                                         \
   #act_layout,                                                                                 \
   TileOrder::order,                                                                            \
   m_min,                                                                                       \
   m_max,                                                                                       \
   m_block,                                                                                     \
   n_block,                                                                                     \
   n_slice,                                                                                     \
   k_group_##act_layout,                                                                        \
   isa::dot_##shape##_##layout##_##code,                                                        \
   isa::scratch_##shape,                                                                        \
   act_bytes_##act_layout,                                                                      \
   act_isa::pack_##act_layout,                                                                   \
   act_isa::mid_##act_layout,                                                                    \
   act_isa::out_##order},
constexpr DotKernel kKernels[] = {
#include "kernels/dot/kernels.inc"
};
#undef CPUMOE_DOT

const char* layout_name(Layout l) { return l == Layout::rows ? "rows" : "columns"; }

// Empty when the kernel fits.
std::string refusal(const DotKernel& k, const DotRequest& r, IsaSet isa) {
  if (k.layout != r.layout) return std::string("reads the ") + layout_name(k.layout) + " layout";
  if (k.act_class != r.act_class) return std::string("is of class ") + act_class_name(k.act_class);
  if (!isa.has(k.isa)) return std::string("needs ") + isa_name(k.isa) + ", which may not be used";
  if (max64(r.m, 1) < k.m_min) return "is for " + std::to_string(k.m_min) + " tokens or more";
  if (r.m > k.m_max) return "is for " + std::to_string(k.m_max) + " tokens or fewer";
  return "";
}

}  // namespace

const DotKernel* dot_kernels(int* count) {
  *count = int(sizeof kKernels / sizeof kKernels[0]);
  return kKernels;
}

ActClass class_for(const Format& f, Layout layout, std::optional<ActClass> asked, IsaSet isa) {
  const auto has = [&](ActClass c) {
    if (c == ActClass::fp32) return true;
    if (c == ActClass::int8) return has_integers(f.code, layout);
    for (const DotKernel& k : kKernels) {
      if (k.code == f.code && k.layout == layout && k.act_class == c && isa.has(k.isa)) return true;
    }
    return false;
  };
  if (asked && has(*asked)) return *asked;
  return has(f.act_class) ? f.act_class : ActClass::fp32;
}

const DotKernel* select_dot(const DotRequest& request, IsaSet isa, std::string* why) {
  std::string reasons;
  for (const DotKernel& k : kKernels) {
    if (k.code != request.code) continue;
    const std::string r = refusal(k, request, isa);
    if (r.empty()) {
      if (why != nullptr) *why = reasons;
      return &k;
    }
    reasons += std::string(reasons.empty() ? "" : "; ") + k.name + " " + r;
  }
  if (why != nullptr) {
    *why = std::string("no dot kernel for ") + code_name(request.code) + " weights in " +
           layout_name(request.layout) + " layout, class " + act_class_name(request.act_class) +
           " and " + std::to_string(request.m) +
           " tokens: " + reasons;
  }
  return nullptr;
}

}  // namespace cpumoe

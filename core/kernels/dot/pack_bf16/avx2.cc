// Writing bf16_rows. Rounding is that of base/types.h, whatever form of a loop meets an element.
#include "kernels/dot/dot.h"
#include "kernels/dot/layouts.h"
#include "kernels/vec/avx2_lanes.h"

namespace cpumoe::avx2 {
namespace {

CPUMOE_INLINE void write_zeros(char* line, int64_t inputs) {
  memset(line + 2 * inputs, 0, size_t(2 * (Bf16Rows::line(inputs) - inputs)));
}

template <Code C>
void pack_lines(const PackArgs& a) {
  const int64_t inputs = a.src.cols;
  for (int64_t m = a.m0; m < a.m1; ++m) {
    const int64_t row = a.index != nullptr ? a.index[m] : m, first = row * a.src.stride;
    char* line = static_cast<char*>(a.dst) + m * Bf16Rows::line(inputs) * 2;
    if constexpr (C == Code::bf16) {
      memcpy(line, static_cast<const char*>(a.src.data) + first * 2, size_t(inputs) * 2);
    } else {
      int64_t k = 0;
      for (; k + 8 <= inputs; k += 8)
        store_lanes<Code::bf16>(line, k, load8<C>(a.src.data, first + k), 8);
      for (; k < inputs; ++k)
        store_from_float(line, Code::bf16, k, load_as_float(a.src.data, C, first + k));
    }
    write_zeros(line, inputs);
  }
}

}  // namespace

void pack_bf16_rows(const PackArgs& a) {
  if (a.src.code == Code::f32) return pack_lines<Code::f32>(a);
  if (a.src.code == Code::f16) return pack_lines<Code::f16>(a);
  pack_lines<Code::bf16>(a);
}

void mid_bf16_rows(const StoreMidArgs& a) {
  for (int64_t m = a.m0; m < a.m1; ++m) {
    char* line = static_cast<char*>(a.dst) + m * Bf16Rows::line(a.k) * 2;
    if (a.order == TileOrder::m_major) {
      const float* tile = a.tile + (m - a.m0) * a.stride;
      for (int64_t n = a.n0; n < a.n1; n += 8) {
        const int64_t count = min64(8, a.n1 - n);
        store_lanes<Code::bf16>(line, n, Vec::load(tile + (n - a.n0), count), count);
      }
    } else {
      const float* tile = a.tile + (m - a.m0);
      for (int64_t n = a.n0; n < a.n1; ++n)
        store_from_float(line, Code::bf16, n, tile[(n - a.n0) * a.stride]);
    }
    if (a.n1 == a.k) write_zeros(line, a.k);
  }
}

}  // namespace cpumoe::avx2

// A product with random weights, tokens gathered by index and a kernel to compute it.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "kernels/dot/dot.h"
#include "kernels/dot/quantize.h"
#include "kernels/testing/tolerance.h"
#include "kernels/testing/weights.h"
#include "machine/isa.h"

namespace cpumoe::testing {

inline IsaSet test_isa() {
  const char* forced = std::getenv("CPUMOE_ISA");
  return usable_isa(forced != nullptr ? forced : "");
}
inline std::vector<DotKernel> kernels_under_test() {
  int count = 0;
  const DotKernel* all = dot_kernels(&count);
  std::vector<DotKernel> out;
  for (int i = 0; i < count; ++i) {
    if (test_isa().has(all[i].isa)) out.push_back(all[i]);
  }
  return out;
}
// All formats of a code.
inline std::vector<const Format*> formats_of(Code code) {
  int count = 0;
  const Format* all = formats(&count);
  std::vector<const Format*> out;
  for (int i = 0; i < count; ++i) {
    if (all[i].code == code) out.push_back(&all[i]);
  }
  return out;
}
// Any of them, with any code of scales and zero points.
struct RandomFormat {
  const Format* format;
  WeightOptions options;
};
inline RandomFormat random_format(Code code, Rng& rng) {
  const std::vector<const Format*> all = formats_of(code);
  constexpr Code kScales[] = {Code::f32, Code::f16, Code::bf16, Code::e8m0, Code::e4m3};
  constexpr Code kZeros[] = {Code::u8, Code::u4, Code::u2, Code::u4_awq};
  return {all[size_t(rng.below(int64_t(all.size())))],
          {rng.below(2) * rng.below(20), kScales[rng.below(5)], kZeros[rng.below(4)],
           rng.below(2) == 0 ? 1.0f : 0.75f}};
}

inline bool same_bits(float a, float b) { return float_to_bits(a) == float_to_bits(b); }

// Source rows m + 2, of which `index` picks m. n and k are rounded up to what the format holds.
struct Problem {
  const DotKernel& kernel;
  RandomWeights weights;
  int64_t n, k, m;
  GuardedBuffer source, act;
  std::vector<int32_t> index;
  MatrixView x;

  Problem(const DotKernel& kernel, const RandomFormat& f, int64_t n_wanted, int64_t k_wanted,
          int64_t m, Code x_code, Rng& rng)
      : kernel(kernel),
        weights(random_weights(*f.format, kernel.layout, n_wanted,
                               whole_inputs(*f.format, kernel.layout, k_wanted), f.options, rng)),
        n(weights.view.n),
        k(weights.view.k),
        m(m),
        source(size_t((m + 2) * k) * code_bits(x_code) / 8),
        act(guarded_bytes(kernel.act_bytes(m, k))) {
    fill_random(source.data(), x_code, (m + 2) * k, 1, rng);
    x = {source.data(), x_code, m + 2, k, k};
    for (int64_t i = 0; i < m; ++i) index.push_back(int32_t(rng.below(m + 2)));
  }
  const WeightView& view() const { return weights.view; }
  float token(int64_t i, int64_t j) const {
    return load_as_float(x.data, x.code, index[size_t(i)] * x.stride + j);
  }
  void set_token(int64_t i, int64_t j, float v) {
    store_from_float(source.data(), x.code, index[size_t(i)] * x.stride + j, v);
  }
  // Token i as the kernel's class rounds it.
  std::vector<double> rounded(int64_t i) const {
    std::vector<double> out;
    for (int64_t j = 0; j < k; ++j) out.push_back(double(token(i, j)));
    if (kernel.act_class == ActClass::fp32) return out;
    if (kernel.act_class == ActClass::bf16) {
      uint16_t half;
      for (double& v : out) {
        store_from_float(&half, Code::bf16, 0, float(v));
        v = double(load_as_float(&half, Code::bf16, 0));
      }
      return out;
    }
    for (int64_t g = 0; g < k; g += kActGroup) {
      float group[kActGroup];
      int8_t codes[kActGroup];
      const int64_t count = min64(kActGroup, k - g);
      for (int64_t j = 0; j < count; ++j) group[j] = token(i, g + j);
      const double scale = double(quantize_group(group, count, codes));
      for (int64_t j = 0; j < count; ++j) out[size_t(g + j)] = scale * codes[j];
    }
    return out;
  }
  void pack() { kernel.pack({x, index.data(), 0, m, m, act.data()}); }

  // The tile of [n0, n1) x [m0, m1) as [feature][token].
  std::vector<float> run(int64_t n0, int64_t n1, int64_t m0, int64_t m1) const {
    const bool n_major = kernel.order == TileOrder::n_major;
    const int64_t features = round_up(n1 - n0, kernel.n_block),
                  tokens = round_up(m1 - m0, kernel.m_block);
    const int64_t c_stride = round_up(n_major ? tokens : features, 16);
    GuardedBuffer c(size_t((n_major ? features : tokens) * c_stride) * 4);
    GuardedBuffer scratch(guarded_bytes(kernel.scratch_bytes(n1 - n0, m1 - m0, k)));
    kernel.run({&weights.view, n0, n1, const_cast<GuardedBuffer&>(act).data(), m, m0, m1,
                c.as<float>(), c_stride, scratch.data()});
    std::vector<float> out;
    for (int64_t i = 0; i < n1 - n0; ++i) {
      for (int64_t j = 0; j < m1 - m0; ++j) {
        out.push_back(c.as<float>()[n_major ? i * c_stride + j : j * c_stride + i]);
      }
    }
    return out;
  }
};

}  // namespace cpumoe::testing

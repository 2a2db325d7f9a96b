// Class fp32 on quantised weights: a product with one input set to 1 is the weight as decode_line
// rounds it, for every format, kind of scale and zero point, and place in a block.
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include <cmath>
#include <string>
#include <vector>

#include "kernels/dot/dot.h"
#include "kernels/testing/dot_problem.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using testing::formats_of;
using testing::guarded_bytes;
using testing::GuardedBuffer;
using testing::random_weights;
using testing::RandomWeights;
using testing::Rng;

std::vector<DotKernel> kernels_of_class_fp32() {
  std::vector<DotKernel> out;
  for (const DotKernel& k : testing::kernels_under_test()) {
    if (k.act_class == ActClass::fp32 && !is_float(k.code)) out.push_back(k);
  }
  return out;
}

// c[feature][token] of [n0, n1) for tokens x [m, k].
std::vector<float> product(const DotKernel& kernel, const WeightView& w, int64_t n0, int64_t n1,
                           const std::vector<float>& x, int64_t m) {
  const bool n_major = kernel.order == TileOrder::n_major;
  const int64_t features = round_up(n1 - n0, kernel.n_block), tokens = round_up(m, kernel.m_block);
  const int64_t c_stride = round_up(n_major ? tokens : features, 16);
  GuardedBuffer act(guarded_bytes(kernel.act_bytes(m, w.k)));
  GuardedBuffer c(size_t((n_major ? features : tokens) * c_stride) * 4);
  GuardedBuffer scratch(guarded_bytes(kernel.scratch_bytes(n1 - n0, m, w.k)));
  kernel.pack({{x.data(), Code::f32, m, w.k, w.k}, nullptr, 0, m, m, act.data()});
  kernel.run({&w, n0, n1, act.data(), m, 0, m, c.as<float>(), c_stride, scratch.data()});
  std::vector<float> out;
  for (int64_t i = 0; i < n1 - n0; ++i) {
    for (int64_t t = 0; t < m; ++t)
      out.push_back(c.as<float>()[n_major ? i * c_stride + t : t * c_stride + i]);
  }
  return out;
}

constexpr Code kScales[] = {Code::f32, Code::f16, Code::bf16, Code::e8m0, Code::e4m3};
constexpr Code kZeros[] = {Code::u8, Code::u4, Code::u2, Code::u4_awq};

TEST(one_input_gives_the_decoded_weight) {
  for (const DotKernel& kernel : kernels_of_class_fp32()) {
    Rng rng(11);
    int turn = 0;
    for (const Format* f : formats_of(kernel.code)) {
      const bool rows = kernel.layout == Layout::rows;
      for (const int64_t n : {int64_t(5), rows ? int64_t(133) : int64_t(203)}) {
        const int64_t k = testing::whole_inputs(*f, kernel.layout, n == 5 ? 300 : 43);
        ++turn;
        const RandomWeights weights =
            random_weights(*f, kernel.layout, n, k,
                           {rng.below(2) * 8, kScales[turn % 5], kZeros[turn / 5 % 4],
                            turn % 2 != 0 ? 1.0f : 0.3f},
                           rng);
        const WeightView& w = weights.view;
        const int64_t m = kernel.m_max <= 4 ? 1 + turn % 4 : 1 + turn % 11;
        for (int64_t first = 0; first < k; first += m) {
          std::vector<float> x(size_t(m * k), 0.0f);
          for (int64_t t = 0; t < m && first + t < k; ++t) x[size_t(t * k + first + t)] = 1;
          const std::vector<float> got = product(kernel, w, 0, n, x, m);
          for (int64_t i = 0; i < n; ++i) {
            for (int64_t t = 0; t < m && first + t < k; ++t) {
              const float want = decode_weight(w, i, first + t);
              CHECK_MSG(got[size_t(i * m + t)] == want,
                        kernel.name << " " << f->name << " scales " << code_name(w.scales.code)
                                    << " at " << i << "," << first + t << " got "
                                    << got[size_t(i * m + t)] << " for " << want);
            }
          }
        }
      }
    }
  }
}

TEST(nan_codes_and_scales_reach_their_own_features) {
  for (const DotKernel& kernel : kernels_of_class_fp32()) {
    Rng rng(12);
    for (const Format* f : formats_of(kernel.code)) {
      if (f->scale_rows > 1) continue;  // the scale is that of other features, too
      for (const int64_t m : {1, 2, 3, 4, 9}) {
        const int64_t n = 19, k = testing::whole_inputs(*f, kernel.layout, 77);
        RandomWeights weights = random_weights(*f, kernel.layout, n, k, {}, rng);
        if (!testing::set_nan(weights, 4, k - 1)) continue;
        const std::vector<float> x(size_t(m * k), 0.0f);  // 0 * NaN is NaN
        const std::vector<float> got = product(kernel, weights.view, 0, n, x, m);
        for (int64_t i = 0; i < n * m; ++i) CHECK_EQ(std::isnan(got[size_t(i)]), i / m == 4);
      }
    }
  }
}

TEST(e4m3_has_two_nan_codes) {
  for (const DotKernel& kernel : kernels_of_class_fp32()) {
    if (kernel.code != Code::e4m3) continue;
    for (const int64_t k : {8, 31, 32, 64, 129, 300}) {
      for (const int code : {0x7f, 0xff, 0x7e}) {
        for (const int64_t at : {int64_t(0), k / 2, k - 1}) {
          for (const int64_t m : {1, 2, 3, 4, 8}) {
            const int64_t n = 3;
            std::vector<uint8_t> codes(size_t(n * k), 0x38);  // 1
            const bool rows = kernel.layout == Layout::rows;
            codes[size_t(rows ? k + at : at * n + 1)] = uint8_t(code);
            const float one = 1;
            WeightView w{
                find_format("fp8_tensor"), kernel.layout, n, k, rows ? k : n, codes.data()};
            w.scales = {&one, Code::f32, 1, 1, 1};
            std::vector<float> x(size_t(m * k), 1.0f);
            const std::vector<float> got = product(kernel, w, 0, n, x, m);
            for (int64_t i = 0; i < n * m; ++i) {
              const bool nan = i / m == 1 && code != 0x7e;
              CHECK_EQ(std::isnan(got[size_t(i)]), nan);
              if (!nan) CHECK_EQ(got[size_t(i)], float(k) + (i / m == 1 ? 447 : 0));
            }
          }
        }
      }
    }
  }
}

#ifdef __x86_64__
TEST(subnormal_codes_survive_a_caller_that_flushes_them) {
  const unsigned control = _mm_getcsr();
  for (const DotKernel& kernel : kernels_of_class_fp32()) {
    if (kernel.code != Code::e4m3 && kernel.code != Code::e2m1) continue;
    const uint8_t smallest = kernel.code == Code::e4m3 ? 0x01 : 0x11;  // 2^-9, 1/2
    const std::vector<uint8_t> codes(64, smallest);
    const float scales[2] = {1, 1};
    WeightView w{find_format(kernel.code == Code::e4m3 ? "fp8_tensor" : "mxfp4"),
                 kernel.layout,
                 1,
                 64,
                 64,
                 codes.data()};
    if (kernel.layout == Layout::columns) w.n = 64, w.k = 1;
    w.scales = {scales, Code::f32, 1, 2, 2};
    std::vector<float> x(size_t(w.k), 1.0f);
    if (kernel.code == Code::e2m1 && kernel.layout == Layout::columns) continue;  // other scales
    _mm_setcsr(control | 0x8040u);
    const std::vector<float> got = product(kernel, w, 0, w.n, x, 1);
    CHECK_EQ(_mm_getcsr() & 0x8040u, 0x8040u);
    _mm_setcsr(control);
    CHECK_EQ(got[0], float(w.k) * (kernel.code == Code::e4m3 ? 0x1p-9f : 0.5f));
  }
}
#endif

}  // namespace
}  // namespace cpumoe

#include "kernels/rope/rope.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "kernels/testing/guard.h"
#include "kernels/testing/random.h"
#include "kernels/testing/tolerance.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using testing::GuardedBuffer;
using testing::kRoundoff;
using testing::kTiny;
using testing::Rng;

std::vector<const RopeKernel*> kernels() {
  const char* forced = std::getenv("CPUMOE_ISA");
  const IsaSet isa = usable_isa(forced ? forced : "");
  std::vector<const RopeKernel*> out;
  int count = 0;
  const RopeKernel* all = rope_kernels(&count);
  for (int i = 0; i < count; ++i) {
    if (isa.has(all[i].isa)) out.push_back(&all[i]);
  }
  return out;
}

TEST(pairs_rotate_and_the_rest_stays) {
  Rng rng(1);
  for (const RopeKernel* kernel : kernels()) {
    for (int64_t dims : {0, 2, 6, 8, 14, 16, 18, 32, 64, 128}) {
      for (int variant = 0; variant < 6; ++variant) {
        const int64_t extra = variant % 3 == 0 ? 0 : variant % 3 == 1 ? 1 : 8;
        const bool interleaved = variant >= 3;
        const int64_t half = dims / 2, head_dim = std::max<int64_t>(dims + extra, 1);
        const int64_t rows = 3, heads = 2, stride = heads * head_dim + 5;
        const int64_t used = (rows - 1) * stride + heads * head_dim;
        GuardedBuffer x(size_t(used) * 4), cos(size_t(rows * half) * 4), sin(cos.size());
        testing::fill_random(x.data(), Code::f32, used, 4, rng);
        const std::vector<float> before(x.as<float>(), x.as<float>() + used);
        std::vector<float> inv_freq;
        for (int64_t j = 0; j < half; ++j) inv_freq.push_back(rng.uniform(0, 1));
        const int64_t positions[] = {0, 17, 123456};
        for (int64_t r = 0; r < rows; ++r) {
          rope_table(positions[r], inv_freq.data(), half, 1.25f, cos.as<float>() + r * half,
                     sin.as<float>() + r * half);
        }
        RopeArgs a{x.as<float>(),   rows, heads,      head_dim, stride, dims, cos.as<float>(),
                   sin.as<float>(), half, interleaved};
        kernel->run(a);
        std::vector<float> want(before);
        std::vector<double> bound(before.size());
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t j = 0; j < half; ++j) {
            const double c = cos.as<float>()[r * half + j], s = sin.as<float>()[r * half + j];
            for (int64_t h = 0; h < heads; ++h) {
              const size_t at = size_t(r * stride + h * head_dim + (interleaved ? 2 * j : j));
              const size_t to = at + size_t(interleaved ? 1 : half);
              const double first = before[at], second = before[to];
              want[at] = float(first * c - second * s);
              want[to] = float(second * c + first * s);
              // Two products and a sum, each at most one rounding, and that of `want`.
              bound[at] = 4 * kRoundoff * (std::fabs(first * c) + std::fabs(second * s)) + kTiny;
              bound[to] = 4 * kRoundoff * (std::fabs(second * c) + std::fabs(first * s)) + kTiny;
            }
          }
        }
        for (size_t i = 0; i < before.size(); ++i) {
          CHECK_MSG(std::fabs(double(x.as<float>()[i]) - want[i]) <= bound[i],
                    kernel->name << (interleaved ? " interleaved" : "") << " dims " << dims
                                 << " at " << i << ": " << x.as<float>()[i] << " not " << want[i]);
        }
      }
    }
  }
}

TEST(table_is_cos_and_sin_of_the_fp32_angle) {
  const float inv_freq[] = {1.0f, 0.1f, 1e-3f, 7.3e-6f};
  for (int64_t position : {0, 1, 4095, 131071, 1000003}) {
    float cos[4], sin[4];
    rope_table(position, inv_freq, 4, 0.75f, cos, sin);
    for (int j = 0; j < 4; ++j) {
      const float angle = float(position) * inv_freq[j];
      // One rounding to fp32 and one of the product with the scale.
      CHECK(std::fabs(cos[j] - std::cos(double(angle)) * 0.75) <= 2 * kRoundoff);
      CHECK(std::fabs(sin[j] - std::sin(double(angle)) * 0.75) <= 2 * kRoundoff);
    }
  }
}

TEST(nan_stays_in_its_pair) {
  for (const RopeKernel* kernel : kernels()) {
    std::vector<float> x(40, 1.0f), cos(20, 0.6f), sin(20, 0.8f);
    x[3] = std::numeric_limits<float>::quiet_NaN();
    kernel->run({x.data(), 1, 1, 40, 40, 40, cos.data(), sin.data(), 20});
    for (size_t i = 0; i < 40; ++i) CHECK_EQ(std::isnan(x[i]), i == 3 || i == 23);
    kernel->run({x.data(), 1, 1, 20, 40, 20, cos.data(), sin.data(), 20, true});
    for (size_t i = 0; i < 40; ++i) CHECK_EQ(std::isnan(x[i]), i == 2 || i == 3 || i == 23);
  }
}

TEST(selection) {
  CHECK_EQ(std::string(select_rope(IsaSet{1})->name), "rope_scalar");
  int count = 0;
  const RopeKernel* all = rope_kernels(&count);
  CHECK_EQ(std::string(select_rope(IsaSet{~0u})->name), std::string(all[0].name));
  CHECK(select_rope(IsaSet{0}) == nullptr);
}

}  // namespace
}  // namespace cpumoe

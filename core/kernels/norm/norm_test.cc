#include "kernels/norm/norm.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "kernels/testing/guard.h"
#include "kernels/testing/random.h"
#include "kernels/testing/sizes.h"
#include "kernels/testing/tolerance.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using testing::gamma;
using testing::GuardedBuffer;
using testing::kTiny;
using testing::Rng;

std::vector<const NormKernel*> kernels() {
  const char* forced = std::getenv("CPUMOE_ISA");
  const IsaSet isa = usable_isa(forced ? forced : "");
  std::vector<const NormKernel*> out;
  int count = 0;
  const NormKernel* all = norm_kernels(&count);
  for (int i = 0; i < count; ++i) {
    if (isa.has(all[i].isa)) out.push_back(&all[i]);
  }
  return out;
}

// sum of squares: size roundings of positive terms, halved by the root; mean, eps, root, quotient,
// two products and the offset: 8 more.
double bound(double want, int64_t size) {
  return gamma(size / 2 + 9) * std::fabs(want) + 2 * kTiny;
}

TEST(rows_agree_with_float64) {
  Rng rng(1);
  for (const NormKernel* kernel : kernels()) {
    for (int64_t size : testing::sizes_near({8, 16, 32, 64, 2048})) {
      for (Code code : {Code::f32, Code::f16, Code::bf16}) {
        for (int mode = 0; mode < 8; ++mode) {
          const bool weighted = mode & 1, residual = mode & 2, in_place = mode & 4;
          const int64_t rows = 3, stride = size, step = size == 17 ? 2 : 1;
          const float magnitude = std::ldexp(1.0f, int(rng.below(41)) - 20);
          GuardedBuffer x(size_t(rows * stride) * 4), r(x.size()), sum(x.size()), out(x.size());
          GuardedBuffer w(size_t((size - 1) * step + 1) * code_bits(code) / 8);
          testing::fill_random(x.data(), Code::f32, rows * stride, magnitude, rng);
          testing::fill_random(r.data(), Code::f32, rows * stride, magnitude, rng);
          testing::fill_random(w.data(), code, (size - 1) * step + 1, 2, rng);
          std::vector<float> input(x.as<float>(), x.as<float>() + rows * stride);
          if (residual) {
            for (size_t i = 0; i < input.size(); ++i) input[i] += r.as<float>()[i];
          }
          NormArgs a{};
          a.x = x.as<float>();
          a.rows = rows;
          a.size = size;
          a.x_stride = a.out_stride = stride;
          if (weighted) a.weight = {w.data(), code, size, step};
          a.weight_offset = weighted && (mode & 4) ? 1.0f : 0.0f;
          a.eps = 1e-6f;
          if (residual) {
            a.residual = r.as<float>();
            a.sum = in_place ? x.as<float>() : sum.as<float>();
          }
          a.out = in_place && !residual ? x.as<float>() : out.as<float>();
          kernel->run(a);
          for (int64_t row = 0; row < rows; ++row) {
            double squares = 0;
            for (int64_t i = 0; i < size; ++i) {
              const double v = input[size_t(row * stride + i)];
              squares += v * v;
            }
            const double root = std::sqrt(squares / double(size) + double(a.eps));
            for (int64_t i = 0; i < size; ++i) {
              const float v = input[size_t(row * stride + i)];
              double weight = 1;
              if (weighted) {  // the offset is added in fp32, then counted as exact
                weight = load_as_float(w.data(), code, i * step) + a.weight_offset;
              }
              const double want = v / root * weight;
              const float got = a.out[row * stride + i];
              CHECK_MSG(std::fabs(got - want) <= bound(want, size),
                        kernel->name << " size " << size << " mode " << mode << " at " << row << ","
                                     << i << ": " << got << " not " << want);
              if (residual) CHECK_EQ(a.sum[row * stride + i], v);
            }
          }
        }
      }
    }
  }
}

TEST(strides_leave_the_gap_alone) {
  Rng rng(2);
  for (const NormKernel* kernel : kernels()) {
    const int64_t size = 13, stride = 20;
    std::vector<float> x(60), out(60, -7.0f);
    testing::fill_random(x.data(), Code::f32, 60, 1, rng);
    NormArgs a{};
    a.x = x.data();
    a.rows = 3;
    a.size = size;
    a.x_stride = a.out_stride = stride;
    a.eps = 1e-5f;
    a.out = out.data();
    kernel->run(a);
    for (int64_t i = 0; i < 60; ++i) {
      if (i % stride >= size) CHECK_EQ(out[size_t(i)], -7.0f);
    }
    a.rows = 0;
    kernel->run(a);
  }
}

TEST(nan_and_infinity_stay_in_their_row) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const NormKernel* kernel : kernels()) {
    std::vector<float> x(30, 1.0f), out(30);
    x[4] = std::numeric_limits<float>::quiet_NaN();
    x[12] = inf;
    NormArgs a{};
    a.x = x.data();
    a.rows = 3;
    a.size = a.x_stride = a.out_stride = 10;
    a.eps = 1e-5f;
    a.out = out.data();
    kernel->run(a);
    for (size_t i = 0; i < 10; ++i) CHECK(std::isnan(out[i]));
    // 1 / sqrt(inf) = 0, so the others vanish and inf * 0 is NaN.
    for (size_t i = 10; i < 20; ++i) CHECK(i == 12 ? std::isnan(out[i]) : out[i] == 0);
    for (size_t i = 20; i < 30; ++i) CHECK(std::isfinite(out[i]));
    // An all-zero row stays zero.
    std::fill(x.begin(), x.end(), 0.0f);
    kernel->run(a);
    for (const float v : out) CHECK_EQ(v, 0.0f);
  }
}

TEST(selection) {
  CHECK_EQ(std::string(select_norm(IsaSet{1})->name), "norm_scalar");
  int count = 0;
  const NormKernel* all = norm_kernels(&count);
  CHECK_EQ(std::string(select_norm(IsaSet{~0u})->name), std::string(all[0].name));
  CHECK(select_norm(IsaSet{0}) == nullptr);
}

}  // namespace
}  // namespace cpumoe

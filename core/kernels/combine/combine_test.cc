#include "kernels/combine/combine.h"

#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "kernels/testing/guard.h"
#include "kernels/testing/random.h"
#include "kernels/testing/sizes.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

std::vector<const CombineKernel*> kernels() {
  const char* forced = std::getenv("CPUMOE_ISA");
  const IsaSet isa = usable_isa(forced ? forced : "");
  std::vector<const CombineKernel*> out;
  int count = 0;
  const CombineKernel* all = combine_kernels(&count);
  for (int i = 0; i < count; ++i) {
    if (isa.has(all[i].isa)) out.push_back(&all[i]);
  }
  return out;
}

constexpr Code kCodes[] = {Code::f32, Code::f16, Code::bf16};

// Same bits as the formula in fp32, in its order, on buffers that end at a guard page.
TEST(equals_the_formula_bit_by_bit) {
  testing::Rng rng(3);
  for (const CombineKernel* k : kernels()) {
    for (Code code : kCodes) {
      const int64_t size = int64_t(code_bits(code)) / 8;
      for (int64_t len : testing::sizes_near({8, 32, 64})) {
        for (int64_t count : {0, 1, 2, 8}) {
          for (int mode = 0; mode < 4; ++mode) {
            const bool accumulate = mode & 1, indexed = mode & 2;
            testing::GuardedBuffer rows(size_t(12 * len * 4)), out(size_t(len * size));
            testing::fill_random(rows.data(), Code::f32, 12 * len, 3.0f, rng);
            testing::fill_random(out.data(), code, len, 3.0f, rng);
            std::vector<int32_t> index = {11, 3, 3, 0, 7, 10, 2, 5};
            std::vector<char> want(out.data(), out.data() + out.size());
            for (int64_t i = 0; i < len; ++i) {
              float sum = accumulate ? load_as_float(want.data(), code, i) : 0.0f;
              for (int64_t r = 0; r < count; ++r) {
                sum += rows.as<float>()[(indexed ? index[size_t(r)] : r) * len + i];
              }
              store_from_float(want.data(), code, i, sum);
            }
            k->run({rows.as<float>(), len, indexed ? index.data() : nullptr, count, len, out.data(),
                    code, accumulate});
            CHECK_MSG(memcmp(want.data(), out.data(), want.size()) == 0,
                      k->name << " " << code_name(code) << " len " << len << " count " << count
                              << " mode " << mode);
          }
        }
      }
    }
  }
}

TEST(rounding_nan_and_infinity) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // Ties, overflow to infinity, subnormal halves, and values that stay.
  const std::vector<float> row = {nan,      inf,      -inf,  1.00390625f, 1.01171875f,
                                  65519.0f, 65520.0f, 3e38f, 3.4e38f,     1e-7f,
                                  -1e-8f,   -0.0f,    6e-8f};
  for (const CombineKernel* k : kernels()) {
    for (Code code : kCodes) {
      char out[64] = {}, want[64] = {};
      const int64_t len = int64_t(row.size());
      for (int64_t i = 0; i < len; ++i) store_from_float(want, code, i, 0.0f + row[size_t(i)]);
      k->run({row.data(), len, nullptr, 1, len, out, code, false});
      for (int64_t i = 0; i < len; ++i) {
        const float a = load_as_float(out, code, i), b = load_as_float(want, code, i);
        CHECK_MSG(float_to_bits(a) == float_to_bits(b) || (a != a && b != b),
                  k->name << " " << code_name(code) << " element " << i << ": " << a << ", " << b);
      }
    }
  }
}

TEST(selection_prefers_the_first_row_that_the_machine_runs) {
  CHECK_EQ(std::string(select_combine(IsaSet{1})->name), "combine_scalar");
  int count = 0;
  const CombineKernel* all = combine_kernels(&count);
  CHECK_EQ(std::string(select_combine(IsaSet{~0u})->name), std::string(all[0].name));
}

}  // namespace
}  // namespace cpumoe

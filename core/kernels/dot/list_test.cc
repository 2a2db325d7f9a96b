// The list of kernels, the choice from it and refusals.
#include <optional>
#include <string>

#include "kernels/dot/dot.h"
#include "kernels/testing/dot_problem.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using testing::test_isa;

TEST(list_is_well_formed) {
  int count = 0;
  const DotKernel* all = dot_kernels(&count);
  for (int i = 0; i < count; ++i) {
    const DotKernel& k = all[i];
    CHECK_GE(k.m_min, 1);
    CHECK_LE(k.m_min, k.m_max);
    CHECK(k.m_block >= 1 && k.n_block >= 1 && k.n_slice % k.n_block == 0);
    CHECK_EQ(k.act_bytes(0, 5), size_t(0));
    for (int j = 0; j < i; ++j) CHECK_NE(std::string(k.name), std::string(all[j].name));
  }
}

// All up to the one of this name.
IsaSet up_to(const std::string& name) {
  int last = 0;
  while (name != isa_name(Isa(last))) ++last;
  return {(2u << last) - 1};
}

TEST(selection_golden_table) {
  struct Golden {
    const char* set;
    Code code;
    Layout layout;
    ActClass act_class;
    int64_t m;
    const char* name;
  };
  const Golden golden[] = {
#include "kernels/dot/selection_golden.inc"
  };
  for (const Golden& g : golden) {
    const IsaSet isa = up_to(g.set);
    if ((isa.mask & ~test_isa().mask) != 0) continue;
    const DotKernel* k = select_dot({g.code, g.layout, g.act_class, g.m}, isa);
    CHECK(k != nullptr);
    CHECK_EQ(std::string(k->name), std::string(g.name));
  }
}

TEST(classes_that_a_cpu_has) {
  const auto of = [](const char* name, Layout layout, std::optional<ActClass> asked,
                     const char* isa) {
    return class_for(*find_format(name), layout, asked, up_to(isa));
  };
  CHECK(of("bf16", Layout::rows, {}, "avx2") == ActClass::fp32);
  CHECK(of("bf16", Layout::rows, ActClass::bf16, "avx512") == ActClass::fp32);
  CHECK(of("bf16", Layout::rows, ActClass::fp32, "avx512_bf16") == ActClass::fp32);
  if (test_isa().has(Isa::avx512_bf16)) {
    CHECK(of("bf16", Layout::rows, {}, "avx512_bf16") == ActClass::bf16);
    CHECK(of("bf16", Layout::rows, ActClass::int8, "avx512_bf16") == ActClass::bf16);
    CHECK(of("fp8_block", Layout::rows, ActClass::bf16, "avx512_bf16") == ActClass::bf16);
    CHECK(of("fp8_block", Layout::rows, {}, "avx512_bf16") == ActClass::bf16);
  }
  CHECK(of("fp32", Layout::rows, ActClass::bf16, "avx512_bf16") == ActClass::fp32);
  CHECK(of("q4_0", Layout::rows, {}, "scalar") == ActClass::int8);
  CHECK(of("q4_0", Layout::rows, ActClass::bf16, "avx512_bf16") == ActClass::int8);
  CHECK(of("q4_0", Layout::rows, ActClass::fp32, "avx2") == ActClass::fp32);
  CHECK(of("int4_g32", Layout::columns, ActClass::int8, "avx2") == ActClass::fp32);
}

TEST(refusal_names_every_candidate) {
  std::string why;
  CHECK(select_dot({Code::bf16, Layout::rows, ActClass::fp32, 4}, IsaSet{0}, &why) == nullptr);
  CHECK(why.find("bf16 weights in rows layout, class fp32 and 4 tokens") != std::string::npos);
  int count = 0;
  const DotKernel* all = dot_kernels(&count);
  for (int i = 0; i < count; ++i) {
    CHECK_EQ(why.find(all[i].name) != std::string::npos, all[i].code == Code::bf16);
  }
  CHECK(why.find("scalar_plain_rows_bf16 needs scalar, which may not be used") !=
        std::string::npos);
  CHECK(why.find("scalar_plain_columns_bf16 reads the columns layout") != std::string::npos);
}

}  // namespace
}  // namespace cpumoe
